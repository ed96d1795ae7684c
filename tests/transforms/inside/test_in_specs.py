"""Steps whose ranks are meshes of their own: what is split, and what is wrong with a split."""

import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpp
from experiments.hlo_collectives import count_collectives
from jaxpp.transforms.inside import specs_of_leaves
from tests.helpers import assert_close, assert_same, bytes_on, train_step_of
from tests.transforms import two_layers
from tests.transforms.residual import (
    AXES,
    RULES,
    WIDTH,
    batch,
    parameters,
)

ONE_F_ONE_B = jaxpp.schedules.OneFOneB()
optimizer = optax.adam(1e-2, eps=1e-3)


def keep(x):
    return x


def make_step(
    schedule: Any = ONE_F_ONE_B, num_stages=2, constrain=keep, num_microbatches=4, replicas=1
):
    def loss_fn(params, x, y):
        for n, layer in enumerate(params):
            if n and n % (4 // num_stages) == 0:
                x = jaxpp.pipeline_enter_stage(x)
            x = x + constrain(jnp.tanh(x @ layer["up"])) @ layer["down"] + layer["bias"]
        return jnp.mean((x - y) ** 2)

    grad_fn = jax.value_and_grad(jaxpp.wrap_forward(loss_fn))
    axes = (None, 0, 0)
    grad_fn = jaxpp.microbatch(grad_fn, num_microbatches, in_axes=axes, replicas=replicas)
    if schedule is not None:
        grad_fn = jaxpp.schedule(grad_fn, schedule)
    return train_step_of(optimizer, grad_fn)


def place(fun, shape, **options: Any):
    specs: dict[str, Any] = {"in_specs": (RULES, RULES, P("data"), P("data"))}
    return jaxpp.place(fun, jaxpp.MpmdMesh(shape, AXES), **(specs | options))


def train(step, num_steps=3) -> Any:
    params = parameters()
    state, loss = optimizer.init(params), None
    for seed in range(num_steps):
        params, state, loss = step(params, state, *batch(seed))
    return params, state, loss


# ---- the same numbers ---------------------------------------------------------------------------

SHAPES = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (2, 2, 2), (4, 2, 1)]


@pytest.fixture(scope="module")
def wanted():
    return train(jax.jit(make_step(None)))


@pytest.mark.parametrize("zero1", [(), "data"])
@pytest.mark.parametrize("shape", [*SHAPES[:7], pytest.param(SHAPES[7], marks=pytest.mark.slow)])
def test_a_split_step_gives_what_the_step_gives(shape, zero1, wanted):
    step = place(make_step(num_stages=shape[0], replicas=shape[1]), shape, zero1=zero1)
    assert_close(train(step), wanted, rtol=2e-5)


@pytest.mark.more
@pytest.mark.parametrize("shape", [(2, 2, 1), (2, 2, 2)])
def test_schedules_of_one_kind_agree_to_the_bit(shape):
    gpipe = make_step(jaxpp.schedules.GPipe())
    assert_same(train(place(gpipe, shape)), train(place(make_step(), shape)))


@pytest.mark.more
def test_a_mesh_of_ranks_of_one_device_each_gives_the_same_bits():
    step = make_step()
    plain = jaxpp.place(step, jaxpp.MpmdMesh((2,)))
    assert_same(train(place(step, (2, 1, 1))), train(plain))


# ---- where things are ---------------------------------------------------------------------------


def test_parameters_are_split_as_asked_and_stay_so():
    step = place(make_step(), (2, 2, 2))
    params, state, _ = train(step)
    for tree in (params, state[0].mu):
        assert tree[0]["up"].sharding.spec == P(None, "model")
        assert tree[0]["down"].sharding.spec == P("model")
        assert tree[0]["bias"].sharding.is_fully_replicated
        assert tree[0]["up"].devices() == set(jax.devices()[:4])
        assert tree[3]["up"].devices() == set(jax.devices()[4:])
    shardings = step._cache[0].input_shardings
    for x, sharding in zip(jax.tree.leaves(params), jax.tree.leaves(shardings[0]), strict=True):
        assert x.sharding == sharding


def test_out_specs_split_results():
    step = place(make_step(), (2, 1, 2), out_specs=([(r"up$", P("model"))], None, None))
    params, _, _ = step(parameters(), optimizer.init(parameters()), *batch(0))
    assert params[0]["up"].sharding.spec == P("model")
    assert params[0]["down"].sharding.spec == P("model")  # as it came in


@pytest.mark.more
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_zero1_divides_the_bytes_of_the_optimizer(size):
    shape = (2, size, 1)
    split = train(place(make_step(replicas=size), shape, zero1="data"))
    whole = train(place(make_step(replicas=size), shape))
    for device in jax.devices()[: 2 * size]:
        # What cannot be split is the count of steps.
        count = whole[1][0].count.nbytes
        own, all_of_it = (bytes_on(device, tree[1]) - count for tree in (split, whole))
        assert all_of_it > 0 and own * size == all_of_it
        assert bytes_on(device, split[0]) == bytes_on(device, whole[0])


@pytest.mark.parametrize("delayed", [False, True])
def test_zero1_splits_the_optimizer_of_several_steps_in_one_program(delayed):
    """A later loop reads weights that come of the state, but no stage reads the state."""
    step = make_step(replicas=2)
    step = jaxpp.delay(step) if delayed else step

    def steps(weights, state, batches):
        for own in batches:
            weights, state, _ = step(weights, state, *own)
        return weights, state

    weights = (parameters(),) * 2 if delayed else parameters()
    placed = place(steps, (2, 2, 1), zero1="data", in_specs=None)
    _, state = placed(weights, optimizer.init(parameters()), [batch(n) for n in range(3)])
    assert "data" in state[0].mu[0]["up"].sharding.spec  # of whichever dimension


def test_zero1_gathers_each_parameter_once_a_step():
    step = place(make_step(replicas=2), (2, 2, 1), zero1="data")
    train(step, 1)
    for rank in count_collectives(step):
        assert rank.all["all-gather over data"] <= 6  # parameters of two layers
    whole = place(make_step(replicas=2), (2, 2, 1))
    train(whole, 1)
    for rank in count_collectives(whole):
        assert "all-gather over data" not in rank.all


@pytest.mark.more
@pytest.mark.parametrize(("zero1", "reduced"), [((), "all-reduce"), ("data", "reduce-scatter")])
def test_reductions_do_not_depend_on_the_number_of_microbatches(zero1, reduced):
    counts = []
    for number in (2, 8):
        step = place(make_step(num_microbatches=number, replicas=2), (2, 2, 1), zero1=zero1)
        ranks = count_collectives(step.lower(*ARGS).compile())
        assert all(rank.in_tasks == {} for rank in ranks)
        counts.append([rank.once for rank in ranks])
        assert all(f"{reduced} over data" in own for own in counts[-1])
    assert counts[0] == counts[1]


def normalized(w, x):
    """A loss that depends on which examples the statistics are of; `x` is [width, examples]."""
    h = x.T @ w[0]
    h = jaxpp.pipeline_enter_stage((h - jnp.mean(h, 0)) / jnp.std(h, 0))
    return jnp.mean(jax.nn.gelu(h @ w[1]) ** 3)


@pytest.mark.more
def test_devices_share_the_examples_of_a_loop_without_replicas():
    """Statistics are then of all of them, and each backward task sums its gradients."""
    w = [jax.random.normal(k, (WIDTH, WIDTH)) for k in jax.random.split(jax.random.key(1))]
    x = np.random.default_rng(3).normal(size=(WIDTH, 24)).astype(np.float32)
    results = {}
    for number, replicas in ((3, 1), (3, 2), (6, 1)):
        grad_fn = jax.value_and_grad(jaxpp.wrap_forward(normalized))
        grad_fn = jaxpp.microbatch(grad_fn, number, in_axes=(None, 1), replicas=replicas)
        mesh = jaxpp.MpmdMesh((2, 2), ("mpmd", "data"))
        step = jaxpp.schedule(grad_fn, ONE_F_ONE_B)
        step = jaxpp.place(step, mesh, in_specs=(None, P(None, "data")))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            lowered = step.lower(w, x)
            results[number, replicas] = got = step(w, x)
        own = [c for c in caught if "place" in str(c.message)]
        notes = [f"place: {note}" for note in lowered.bundle.notes]
        assert [str(c.message) for c in own] == 2 * notes and len(notes) == (replicas == 1)
        assert all(c.filename == __file__ for c in own)
        for note in lowered.bundle.notes:
            assert f"note: {note}" in lowered.as_text().splitlines()
            assert re.search(r"test_in_specs.py:\d+ are split over data.*replicas=2", note)
        assert_close(got, jax.jit(grad_fn)(w, x), rtol=2e-5)
        in_tasks = [rank.in_tasks for rank in count_collectives(step)]
        both = [{"F0", "B0"}, {"F1", "B1"}] if replicas == 1 else [set(), set()]
        assert [set(tasks) for tasks in in_tasks] == both
        for collectives in (c for tasks in in_tasks for c in tasks.values()):
            assert collectives.keys() == {"all-reduce over data"}
    assert_close(results[3, 2], results[6, 1])
    with pytest.raises(AssertionError):
        assert_close(results[3, 2][0], results[3, 1][0], rtol=1e-3)


@pytest.mark.more
def test_a_constraint_is_one_of_the_rank_that_runs_it():
    def constrain(h):
        return jax.lax.with_sharding_constraint(h, P("data", "model"))

    step = place(make_step(constrain=constrain), (2, 2, 2))
    assert_same(train(step), train(place(make_step(), (2, 2, 2))))


@pytest.mark.more
def test_shard_map_over_the_axes_of_a_rank():
    def summed(h):
        double = jax.shard_map(
            lambda own: own + jax.lax.psum(own, "model") - jax.lax.psum(own, "model"),
            in_specs=P("data", "model"),
            out_specs=P("data", "model"),
        )
        return double(h)

    step = place(make_step(constrain=summed), (2, 2, 2))
    assert_close(train(step), train(place(make_step(), (2, 2, 2))), rtol=2e-5)


# ---- what is wrong ------------------------------------------------------------------------------

ARGS = (parameters(), optimizer.init(parameters()), *batch(0))


@pytest.mark.parametrize(
    ("in_specs", "words"),
    [
        (
            (RULES, None, P("rows"), None),
            r"in_specs for \[2\], float32\[16,8\]: .*'rows'.*no axis inside.*'data', 'model'",
        ),
        (([(r"up$", P("mpmd"))], None, None, None), r"\[0\]\[0\]\['up'\].*axis of the pipeline"),
        (([(r"bias$", P("data", "model"))], None, None, None), r"\['bias'\].*2 entries.*1 dim"),
        ((None, None, P("data", "data"), None), r"\[2\].*'data' twice"),
        ((None, None, None), "not a prefix"),
        ((None, None, "data", None), r"\[2\].*'data' is not a PartitionSpec"),
        ((None, None, P(P.UNCONSTRAINED), None), r"\[2\].*leaves a dimension open"),
        (([(r"upp$", P())], None, None, None), r"\[0\]: none of.*upp.*'0.0.bias', '0.0.down'"),
        (([(r"up($", P())], None, None, None), r"\[0\].*'up\(\$' is not a pattern"),
    ],
)
def test_a_spec_that_does_not_fit_is_named_with_its_leaf(in_specs, words):
    with pytest.raises(ValueError, match=words):
        place(make_step(), (2, 2, 2), in_specs=in_specs).lower(*ARGS)


def test_rules_may_have_nothing_to_speak_of():
    sgd = optax.sgd(0.1, momentum=None)
    specs = specs_of_leaves(
        (RULES, RULES, RULES),
        (parameters(), sgd.init(parameters()), {"count": jnp.zeros(())}),
        {"data": 2, "model": 2},
        "in_specs",
    )
    assert specs[-1] is None and ((), ("model",)) in specs


@pytest.mark.parametrize(
    "spec", [P("rows"), P("mpmd"), P("data", "data"), P("data", "model", None)]
)
def test_a_constraint_that_does_not_fit_is_an_error_of_its_line(spec):
    def constrain(h):
        return jax.lax.with_sharding_constraint(h, spec)

    with pytest.raises(Exception, match=r"not found in mesh|duplicate|rank at least 3") as error:
        place(make_step(constrain=constrain), (2, 2, 2)).lower(*ARGS)
    assert any(entry.name == "constrain" for entry in error.traceback)


def test_a_dimension_that_does_not_divide():
    step = place(make_step(), (2, 3, 1), in_specs=(None, None, P("data"), None))
    with pytest.raises(ValueError, match=r"\[2\].*dimension 0 of size 16 into 3 parts"):
        step.lower(*ARGS)


@pytest.mark.parametrize(
    "options", [{"in_specs": P()}, {"out_specs": P("data")}, {"zero1": "data"}, {"zero3": "data"}]
)
@pytest.mark.parametrize("mesh", [None, jaxpp.MpmdMesh((2,))])
def test_splits_need_axes_inside_a_rank(mesh, options):
    with pytest.raises(ValueError, match=f"{[*options][0]}.*each rank of the mesh is one device"):
        jaxpp.place(make_step(), mesh, **options)


@pytest.mark.parametrize("name", ["zero1", "zero3"])
@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ("rows", r"'rows'.*'data', 'model'"),
        (("data", "mpmd"), "'mpmd'.*no axis inside a rank"),
        (("data", "data"), "'data', twice"),
        (1, "the name of an axis inside a rank, got 1"),
    ],
)
def test_an_axis_for_the_state_is_one_of_the_mesh(name, axes, words):
    with pytest.raises(ValueError, match=f"{name}.*{words}"):
        place(make_step(), (2, 2, 1), **{name: axes})


def test_parameters_and_optimizer_state_are_not_split_over_different_axes():
    with pytest.raises(ValueError, match="zero3='data' .* with the parameters, got zero1='model'"):
        place(make_step(), (2, 2, 1), zero1="model", zero3="data")
    place(make_step(), (2, 2, 1), zero1="data", zero3="data")


def test_a_constraint_to_devices_is_an_error_with_its_line():
    mesh = Mesh(np.array(jax.devices()[4:6]), ("model",))

    def constrain(h):
        return jax.lax.with_sharding_constraint(h, NamedSharding(mesh, P(None, "model")))

    with pytest.raises(
        ValueError, match=r"sharding_constraint.*test_in_specs.py:\d+.*another rank"
    ):
        place(make_step(constrain=constrain), (2, 2, 2)).lower(*ARGS)


def test_a_rank_with_a_device_twice():
    device = jax.devices()[0]
    with pytest.raises(ValueError, match="rank 0 has a device twice"):
        jaxpp.MpmdMesh((2, 2), ("mpmd", "data"), devices=[device] * 4)


def test_too_few_devices_are_counted():
    with pytest.raises(ValueError, match=r"16 in all, got 8.*jax_num_cpu_devices', 16"):
        jaxpp.MpmdMesh((4, 4), ("mpmd", "data"))


@pytest.mark.parametrize("given", ["in_shardings", "out_shardings"])
def test_a_jit_inside_the_step_that_names_devices_is_refused(given):
    """As a sharding constraint over them is."""
    own = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    options: Any = {given: NamedSharding(own, P("data"))}
    double = jax.jit(lambda h: 2 * h, **options)

    def loss(w, x):
        return two_layers.loss(w, double(x))

    with pytest.raises(ValueError, match=r"the `jit` at .*test_in_specs.* over a mesh of its own"):
        two_layers.place(two_layers.scheduled(loss))(two_layers.WEIGHTS, two_layers.X)
