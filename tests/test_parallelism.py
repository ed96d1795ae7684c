"""A step is the same on every mesh: pipeline, data, tensor and expert parallelism, and ZeRO-1."""

import dataclasses
import functools
import itertools
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp
from experiments.hlo_collectives import count_collectives
from experiments.models import gpt2, llama, mixtral, parallel
from jaxpp.runtime.executor import _compile
from jaxpp.schedules import GPipe, OneFOneB, Recompute, ZeroBubbleH1, ZeroBubbleH2
from tests.helpers import assert_close, assert_close_sums, assert_same, train_step_of

TIME, VOCABULARY, EXAMPLES, MICROBATCHES, STEPS = 8, 20, 4, 4, 3
AXES = ("mpmd", "data", "model")
MESHES = [
    (1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (2, 2, 2), (4, 2, 1),
]  # fmt: skip
WHOLE, SLOW = (2, 2, 2), pytest.mark.slow

# With Adam's usual epsilon of 1e-8, its first updates are as large for a gradient that is zero but
# for roundings (that of GPT-2's key biases) as for any other, and compare nothing but roundings.
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-3))


def id_of(shape):
    """Such as `2x2x2`."""
    return "x".join(map(str, shape))


@dataclasses.dataclass(frozen=True)
class Zoo:
    """A model's class, its loss, and a tiny configuration of it."""

    model: Any
    loss_fn: Any
    config: Any

    def sized(self, layers):
        return dataclasses.replace(self.config, layers=layers)

    def make(self, layers):
        """The model with other values than its initial ones, which take long to compile."""
        rng = np.random.default_rng(0)
        shapes = eqx.filter_eval_shape(self.model, self.sized(layers), key=jax.random.key(0))

        def draw(path, leaf):
            if not isinstance(leaf, jax.ShapeDtypeStruct):
                return leaf
            scales = "norm" in jax.tree_util.keystr(path) and path[-1].name == "weight"
            return jnp.asarray(scales + 0.3 * rng.normal(size=leaf.shape), leaf.dtype)

        return jax.tree_util.tree_map_with_path(draw, shapes)

    def data(self, step, microbatches=MICROBATCHES):
        """Tokens, and for a model with dropout a key for each sequence, others in each step."""
        batch = EXAMPLES * microbatches
        tokens = np.random.default_rng(step).integers(VOCABULARY, size=(batch, TIME + 1))
        keys = jax.random.split(jax.random.fold_in(jax.random.key(2), step), batch)
        dropout = getattr(self.config, "dropout", 0.0)
        return (jnp.asarray(tokens, jnp.int32), *([keys] if dropout else []))


LLAMA = dict(
    layers=2, width=16, heads=4, kv_heads=2, head_width=4, mlp_width=24, vocabulary=VOCABULARY
)
ZOO = {
    "gpt2": Zoo(gpt2.GPT2, gpt2.loss_fn, gpt2.Config(2, 16, 4, TIME, VOCABULARY, dropout=0.1)),
    "llama": Zoo(llama.Llama, llama.loss_fn, llama.Config(**LLAMA)),
    "mixtral": Zoo(
        mixtral.Mixtral, mixtral.loss_fn, mixtral.Config(**LLAMA, experts=4, balance=0.1)
    ),
}


def init(zoo, layers):
    model = zoo.make(layers)
    return model, OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))


def microbatched(zoo, loss_fn, microbatches=MICROBATCHES, replicas=1):
    in_axes = (None, *(0 for _ in zoo.data(0)))
    grad_fn = eqx.filter_value_and_grad(loss_fn)
    return jaxpp.microbatch(grad_fn, microbatches, in_axes=in_axes, replicas=replicas)


def trained(step, zoo, layers):
    """The state after some steps, and the loss of each."""
    state, losses = init(zoo, layers), []
    for n in range(STEPS):
        *state, loss = step(*state, *zoo.data(n))
        losses.append(np.asarray(loss))
    return state, losses


@functools.cache
def on_one_device(name, layers, replicas=1):
    zoo = ZOO[name]
    grad_fn = microbatched(zoo, zoo.loss_fn, replicas=replicas)
    step = eqx.filter_jit(train_step_of(OPTIMIZER, grad_fn))
    return trained(step, zoo, layers)


def reference(name, shape):
    """The training on one device, of as many replicas as there are devices along `data`."""
    return on_one_device(name, layers_on(shape), shape[AXES.index("data")])


def layers_on(shape):
    """The layers of a model on a mesh: one for each rank, but two at least."""
    return max(2, shape[AXES.index("mpmd")])


def placed(name, shape, schedule=OneFOneB(), zero1=(), experts=None, microbatches=MICROBATCHES):  # noqa: B008
    """The step on a mesh; experts over `data` are for devices that share each microbatch."""
    replicas = 1 if experts == "data" else shape[AXES.index("data")]
    zoo, ranks, layers = ZOO[name], shape[AXES.index("mpmd")], layers_on(shape)
    at = [f"blocks.{layers * n // ranks}" for n in range(1, ranks)]
    staged = jaxpp.wrap_forward(jaxpp.split_stages(zoo.loss_fn, ranks, at=at or None))
    rules = parallel.rules("model", experts=experts)
    grad_fn = jaxpp.schedule(microbatched(zoo, staged, microbatches, replicas), schedule)
    return jaxpp.place(
        train_step_of(OPTIMIZER, grad_fn),
        jaxpp.MpmdMesh(shape, AXES),
        donate_argnums=(0, 1),
        in_specs=(rules, rules, *(P("data") for _ in zoo.data(0))),
        zero1=zero1,
    )


@functools.cache
def on_mesh(name, shape, **options) -> Any:
    return trained(placed(name, shape, **options), ZOO[name], layers_on(shape))


def without_roundings(tree):
    """All but the moments of GPT-2's key biases, which are nothing but roundings."""

    def leaf(path, x):
        return None if re.search(r"(mu|nu).*key_proj\.bias", jax.tree_util.keystr(path)) else x

    return jax.tree_util.tree_map_with_path(leaf, tree)


def assert_same_training(got, want):
    assert len({float(loss) for loss in want[1]}) == STEPS
    assert_close(got[1], want[1], atol=0)
    assert_close_sums(*(without_roundings(state) for state, _ in (got, want)), rtol=5e-5)


@pytest.fixture(scope="module")
def case(request):
    """A model and the shape of a mesh; tests of one case share what they compile."""
    yield request.param
    on_mesh.cache_clear()
    _compile.clear_cache()


def cases(chosen, names=tuple(ZOO), shapes=MESHES):
    """The cases of a test, of which those that are not chosen are slow.

    pytest runs the tests of one case after each other, because the fixture is the module's.
    """
    return pytest.mark.parametrize(
        "case",
        [
            pytest.param(c, id=f"{c[0]}-{id_of(c[1])}", marks=() if c in chosen else SLOW)
            for c in itertools.product(names, shapes)
        ],
        indirect=True,
    )


# ---- the same training on every mesh -------------------------------------------------------------


@cases([("gpt2", WHOLE)])
def test_a_training_is_that_of_one_device(case):
    # GPT-2 has dropout: which features are dropped does not depend on the mesh either.
    name, shape = case
    assert_same_training(on_mesh(name, shape), reference(name, shape))


def test_dropout_takes_part():
    zoo = ZOO["gpt2"]
    model, (tokens, keys) = zoo.make(2), zoo.data(0)
    losses = eqx.filter_jit(jax.vmap(zoo.loss_fn, (None, None, 0)))(
        model, tokens, jnp.stack([keys, keys[::-1]])
    )
    assert losses[0] != losses[1]


@cases([("gpt2", WHOLE)])
def test_schedules_of_whole_backward_tasks_agree_bitwise(case):
    assert_same(on_mesh(*case, schedule=GPipe()), on_mesh(*case))


@cases([])
def test_schedules_of_split_backward_tasks_agree_bitwise(case):
    first, second = (on_mesh(*case, schedule=s) for s in (ZeroBubbleH1(), ZeroBubbleH2()))
    assert_same(first, second)
    assert_same_training(first, on_mesh(*case))


@cases([("gpt2", WHOLE)], names=["gpt2"])
def test_recomputations_change_no_bit(case):
    got = on_mesh(*case, schedule=Recompute("1f1b"), zero1="data")
    assert_same(got, on_mesh(*case, zero1="data"))


# ---- collectives ---------------------------------------------------------------------------------


@cases([])
def test_sums_over_data_do_not_depend_on_the_number_of_microbatches(case):
    name, shape = case
    counts = []
    for microbatches in (2, 4, 8):
        step = placed(name, shape, zero1="data", microbatches=microbatches)
        state = eqx.filter_eval_shape(init, ZOO[name], layers_on(shape))
        compiled = step.lower(*state, *ZOO[name].data(0, microbatches)).compile()
        counts.append([sums_over_data(rank.all) for rank in count_collectives(compiled)])
    assert counts[0] == counts[1] == counts[2]
    replicas = shape[AXES.index("data")]
    assert {"reduce-scatter over data" in own for own in counts[0]} == {replicas > 1}


def sums_over_data(collectives):
    kinds = ("all-reduce", "reduce-scatter")
    return {k: n for k, n in collectives.items() if k.startswith(kinds) and "data" in k}


# ---- experts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        pytest.param(s, a, id=f"{id_of(s)}-{a}", marks=SLOW)
        for s in [(1, 1, 2), (2, 1, 2), (2, 2, 1), WHOLE]
        for a in ("model", "data")
    ],
)
def test_experts_over_an_axis_of_choice(shape, axis):
    got = on_mesh("mixtral", shape, experts=axis)
    shared = axis == "data"
    want = on_one_device("mixtral", 2) if shared else reference("mixtral", shape)
    assert_same_training(got, want)
    weight = got[0][0].blocks[0].mixture.experts.up.weight
    parts = shape[AXES.index(axis)]
    assert {s.data.shape[0] for s in weight.addressable_shards} == {weight.shape[0] // parts}


# ---- ZeRO-1 --------------------------------------------------------------------------------------


def bytes_by_device(tree):
    """The bytes of a tree's arrays on each device; scalars, such as counts, are left out."""
    found = {}
    for x in jax.tree.leaves(eqx.filter(tree, eqx.is_array)):
        for shard in x.addressable_shards if x.ndim else ():
            found[shard.device] = found.get(shard.device, 0) + shard.data.nbytes
    return found


@cases([("gpt2", WHOLE)], shapes=[s for s in MESHES if s[1] > 1])
def test_zero1_divides_the_optimizer_state(case):
    name, shape = case
    (model, opt_state), _ = split = on_mesh(name, shape, zero1="data")
    (whole_model, whole_opt_state), _ = on_mesh(name, shape)
    assert_same_training(split, reference(name, shape))
    assert bytes_by_device(model) == bytes_by_device(whole_model)
    replicas = shape[AXES.index("data")]
    whole = bytes_by_device(whole_opt_state)
    assert len(whole) == np.prod(shape)
    assert {d: n * replicas for d, n in bytes_by_device(opt_state).items()} == whole


# ---- initial values ------------------------------------------------------------------------------


@functools.cache
def initial_values(name, layers):
    return initialiser(name, layers)(jax.random.key(7))


def initialiser(name, layers):
    def make(key):
        model = ZOO[name].model(ZOO[name].sized(layers), key=key)
        return model, OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))

    return make


# tests/transforms/initialize/test_initialize_inside.py has a smaller model.
@cases([], names=["mixtral"])
def test_initial_values_do_not_depend_on_the_mesh(case):
    name, shape = case
    make = initialiser(name, layers_on(shape))
    state = eqx.filter_eval_shape(make, jax.random.key(7))
    step = placed(name, shape, zero1="data")
    compiled = step.lower(*state, *ZOO[name].data(0)).compile()
    state = compiled.initialize(make, jax.random.key(7))
    assert_same(state, initial_values(name, layers_on(shape)))
    wanted = jax.tree.leaves(compiled.input_shardings[: len(state)])
    for x, sharding in zip(jax.tree.leaves(eqx.filter(state, eqx.is_array)), wanted, strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
