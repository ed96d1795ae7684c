"""The rules of sharding propagation, against what XLA makes of the same program."""

import functools
import re

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxpp
from experiments.models import gpt, gpt2, llama, mixtral, resnet
from jaxpp._specs import axes_of, partition_spec, replicated, spec_of
from jaxpp.transforms import _loop, _sharding_rules

P = PartitionSpec
SIZES = {"data": 2, "model": 2}
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 2), tuple(SIZES), axis_types=(AxisType.Auto,) * 2)


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def trace(fun, mesh, *args) -> jex.ClosedJaxpr:
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.make_jaxpr(fun)(*args)


def compiled(jaxpr, mesh, specs, out_specs=None):
    """What XLA makes of a jaxpr, its results left to XLA or pinned; without LLVM's work."""
    pinned = {}
    if out_specs is not None:
        outs = [NamedSharding(mesh, partition_spec(s or ())) for s in out_specs]
        pinned = {"out_shardings": outs}
    jitted = jax.jit(
        jex.jaxpr_as_fun(jaxpr),
        in_shardings=[NamedSharding(mesh, partition_spec(s)) for s in specs],
        **pinned,
    )
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jitted.lower(*jaxpr.in_avals).compile(compiler_options=options)


def chosen(executable, jaxpr):
    return [
        spec_of(sharding.spec, aval.ndim)
        for sharding, aval in zip(executable.output_shardings, jaxpr.out_avals, strict=True)
    ]


def count(executable) -> int:
    text = executable.as_text()
    return sum(len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in COLLECTIVES)


def whole(specs, jaxpr):
    """The specs as they are pinned: what may be any is whole."""
    return [
        replicated(a.ndim) if s is None else s for s, a in zip(specs, jaxpr.out_avals, strict=True)
    ]


# ---- one primitive ------------------------------------------------------------------------------

X, IMAGES = array(8, 16, 32), array(8, 4, 8, 8)
D, DM, DNM, NM = P("data"), P("data", "model"), P("data", None, "model"), P(None, "model")
MODEL = P("model")


def tokens(*shape):
    return array(*shape, dtype=jnp.int32)


def convolve(x, kernel, **options):
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", **options)


depthwise = functools.partial(convolve, feature_group_count=4)


def max_pool(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


def gradients(fun, argnums=0):
    return jax.grad(lambda *args: (fun(*args) ** 2).sum(), argnums)


def pick(x, index):
    return jnp.take_along_axis(x, index[..., None], -1)


def manual(axes, out_specs):
    def fun(x):
        one = jax.shard_map(
            lambda a: jax.lax.psum(a, axes),
            in_specs=P(*axes),
            out_specs=out_specs,
            axis_names=set(axes),
        )
        return one(x)

    return fun


constrain = jax.lax.with_sharding_constraint

#: Each a function, its operands, and their specs.
PRIMITIVES = {
    "matmul": (jnp.matmul, [array(8, 32), array(32, 64)], [D, NM]),
    "contracted": (jnp.matmul, [array(8, 32), array(32, 64)], [DM, MODEL]),
    "contracted-in-one": (jnp.matmul, [array(8, 32), array(32, 64)], [D, MODEL]),
    "contracted-and-free": (jnp.matmul, [array(8, 32), array(32, 64)], [DM, NM]),
    "larger-wins": (jnp.matmul, [array(8, 32), array(32, 256)], [D, P(None, "data")]),
    "first-wins": (jnp.add, [array(8, 32), array(8, 32)], [D, P(None, "data")]),
    "bias": (jnp.add, [array(8, 32), array(32)], [D, MODEL]),
    "bias-loses": (jnp.add, [array(32), array(8, 32)], [D, D]),
    "einsum": (
        lambda a, b: jnp.einsum("te,etw->tw", a, b), [array(8, 4), array(4, 8, 32)], [D, MODEL]
    ),
    "attention": (
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True),
        [array(8, 16, 4, 8)] * 3, [DNM] * 3,
    ),
    "embedding-rows": (lambda w, t: w[t], [array(64, 32), tokens(8, 16)], [MODEL, D]),
    "embedding-columns": (lambda w, t: w[t], [array(64, 32), tokens(8, 16)], [NM, D]),
    "embedding-conflict": (lambda w, t: w[t], [array(64, 32), tokens(8, 16)], [P(None, "data"), D]),
    "embedding-gradient": (
        lambda t, g: jnp.zeros((64, 32)).at[t].add(g), [tokens(8, 16), X], [D, DNM]
    ),
    "scatter-into-split": (
        lambda w, t, g: w.at[t].add(g), [array(64, 32), tokens(8, 16), X], [MODEL, D, D]
    ),
    "take-along-axis": (pick, [X, tokens(8, 16)], [DNM, D]),
    "take-along-axis-gradient": (gradients(pick), [X, tokens(8, 16)], [DNM, D]),
    "slice": (lambda x: x[:, :8], [X], [DM]),
    "slice-uneven": (lambda x: x[:, :-1], [X], [DM]),
    "slice-gradient": (gradients(lambda x: x[:, :8]), [X], [DM]),
    "index": (lambda x: x[0], [X], [DM]),
    "split": (lambda x: jnp.split(x, 2, -1), [X], [DNM]),
    "concatenate": (lambda x, y: jnp.concatenate([x, y], 1), [X, X], [DM, DM]),
    "pad": (lambda x: jnp.pad(x, ((0, 0), (0, 16), (0, 0))), [X], [DM]),
    "dynamic-slice": (
        lambda x, i: jax.lax.dynamic_slice_in_dim(x, i, 8, 1), [X, tokens()], [DM, P()]
    ),
    "dynamic-update-slice": (
        lambda x, u, i: jax.lax.dynamic_update_slice_in_dim(x, u, i, 1),
        [X, array(8, 8, 32), tokens()], [DM, DM, P()],
    ),
    "cumsum": (lambda x: jnp.cumsum(x, 1), [X], [DM]),
    "sort": (lambda x: jnp.sort(x, 1), [X], [DM]),
    "argsort": (jnp.argsort, [X], [DM]),
    "top-k": (lambda x: jax.lax.top_k(x, 4), [X], [DNM]),
    "argmax": (lambda x: jnp.argmax(x, -1), [X], [DM]),
    "flip": (lambda x: jnp.flip(x, 1), [X], [DM]),
    "one-hot": (lambda t: jax.nn.one_hot(t, 64), [tokens(8, 16)], [DM]),
    "softmax": (jax.nn.softmax, [X], [DNM]),
    "mean-of-a-vmapped-axis": (
        jax.vmap(lambda x: x - jax.lax.pmean(x, "batch"), axis_name="batch"), [X], [DM]
    ),
    "mean": (jnp.mean, [X], [DM]),
    "merge-major": (lambda x: x.reshape(128, 32), [X], [DM]),
    "merge-minor": (lambda x: x.reshape(128, 32), [X], [NM]),
    "merge-both": (lambda x: x.reshape(32, 32), [array(2, 16, 32)], [DM]),
    "split-heads": (lambda x: x.reshape(8, 16, 4, 8), [X], [DNM]),
    "split-three": (lambda x: x.reshape(8, 16, 3, 8), [array(8, 16, 24)], [DNM]),
    "reshape-across": (lambda x: x.reshape(4, 6), [array(6, 4)], [DM]),
    "transpose": (lambda x: x.transpose(2, 0, 1), [X], [DM]),
    "repeat": (lambda x: jnp.repeat(x, 2, -2), [array(8, 16, 4, 8)], [DNM]),
    "convolution": (convolve, [IMAGES, array(16, 4, 3, 3)], [D, MODEL]),
    "convolution-features": (convolve, [IMAGES, array(16, 4, 3, 3)], [DM, NM]),
    "convolution-space": (convolve, [IMAGES, array(16, 4, 3, 3)], [DNM, P()]),
    "convolution-gradient": (
        gradients(convolve, (0, 1)), [IMAGES, array(16, 4, 3, 3)], [D, MODEL]
    ),
    "depthwise": (depthwise, [IMAGES, array(4, 1, 3, 3)], [DM, MODEL]),
    "depthwise-gradient": (gradients(depthwise, (0, 1)), [IMAGES, array(4, 1, 3, 3)], [DM, MODEL]),
    "max-pool": (max_pool, [IMAGES], [DM]),
    "max-pool-gradient": (gradients(max_pool), [IMAGES], [DM]),
    "resize": (lambda x: jax.image.resize(x, (8, 4, 16, 16), "linear"), [IMAGES], [DM]),
    "cholesky": (jnp.linalg.cholesky, [array(8, 4, 4)], [D]),
    "dropout": (
        lambda x, seed: jax.random.bernoulli(jax.random.key(seed), 0.5, x.shape) * x,
        [X, tokens()], [DM, P()],
    ),
    "keys": (
        lambda seeds: jax.vmap(lambda s: jax.random.normal(jax.random.key(s), (16,)))(seeds),
        [tokens(8)], [D],
    ),
    "scan": (
        lambda x, w: jax.lax.scan(lambda c, w: (c @ w, c.sum(0)), x, w),
        [array(8, 32), array(4, 32, 32)], [D, P(None, None, "model")],
    ),
    "scan-from-zeros": (
        lambda x, w: jax.lax.scan(lambda c, x: (c + x @ w, None), jnp.zeros((8, 32)), x)[0],
        [array(4, 8, 32), array(32, 32)], [P(None, "data"), NM],
    ),
    "while": (
        lambda x, w: jax.lax.while_loop(lambda c: c.sum() < 1, lambda c: c @ w, x),
        [array(8, 32), array(32, 32)], [D, NM],
    ),
    "cond": (
        lambda x, w, p: jax.lax.cond(p > 0, lambda x: x @ w, lambda x: x, x),
        [array(8, 32), array(32, 32), array()], [D, NM, P()],
    ),
    "constraint": (lambda x: constrain(x, P(None, "data")), [array(8, 32)], [DM]),
    "constraint-that-is-used": (
        lambda x, y: (lambda held: [held, held + y])(constrain(x, P())),
        [array(8, 32)] * 2, [DM, DM],
    ),
    "unconstrained": (lambda x: constrain(x, P(None, P.UNCONSTRAINED)), [array(8, 32)], [DM]),
    "shard-map": (manual(("data", "model"), P()), [array(8, 32)], [DM]),
    "shard-map-of-one-axis": (manual(("data",), P()), [array(8, 32)], [DM]),
}  # fmt: skip


@pytest.fixture(scope="module")
def primitives(mesh):
    """For each name our specs of its results and XLA's, all from one compilation."""
    numbers = {}

    def all_of_them(*operands):
        remaining, results = list(operands), []
        for name, (fun, args, _) in PRIMITIVES.items():
            made = jax.tree.leaves(fun(*remaining[: len(args)]))
            numbers[name] = slice(len(results), len(results) + len(made))
            results += made
            del remaining[: len(args)]
        return results

    operands = [
        (a, p) for _, args, given in PRIMITIVES.values() for a, p in zip(args, given, strict=True)
    ]
    specs = [spec_of(p, a.ndim) for a, p in operands]
    jaxpr = trace(all_of_them, mesh, *(a for a, _ in operands))
    ours = whole(_sharding_rules.output_specs(jaxpr, specs, SIZES), jaxpr)
    xla = chosen(compiled(jaxpr, mesh, specs), jaxpr)
    return {name: (ours[own], xla[own]) for name, own in numbers.items()}


@pytest.mark.parametrize("name", PRIMITIVES)
def test_results_are_split_as_xla_splits_them(primitives, name):
    ours, xla = primitives[name]
    assert ours == xla


# ---- layers and models --------------------------------------------------------------------------

#: Megatron's columns and rows (Shoeybi et al., arXiv 1909.08053, section 3), by the path of a
#: parameter, for the linear layers of Equinox: weights are [out, in].
MEGATRON = [
    (r"experts.*", lambda ndim: P("model")),
    (r"(embed|head)\.weight", lambda ndim: P("model")),
    (
        r"(queries|keys|values|(query|key|value)_proj|qkv|up|gate)\.(weight|bias)",
        lambda ndim: P("model"),
    ),
    (r"(out|output_proj|down)\.weight", lambda ndim: P(None, "model")),
]


def megatron(path, leaf, stacked: bool):
    name = jax.tree_util.keystr(path)
    for pattern, rule in MEGATRON:
        if re.search(pattern + "$", name):
            inner = spec_of(rule(leaf.ndim), leaf.ndim - stacked)
            return ((),) * stacked + inner
    return replicated(leaf.ndim)


KEY = jax.random.key(0)
LLAMA = dict(layers=1, width=16, heads=4, kv_heads=2, head_width=4, mlp_width=24, vocabulary=32)


def block_loss(block, x):
    return (jax.vmap(block)(x) ** 2).mean()


def mlp_loss(mlp, x):
    return (jax.vmap(jax.vmap(mlp))(x) ** 2).mean()


def mixture_loss(mixture, x):
    mixed, balance = jax.vmap(mixture)(x)
    return (mixed**2).mean() + balance.mean()


def norm_loss(norm, x):
    return (jax.vmap(jax.vmap(norm))(x) ** 2).mean()


def resnet_loss(model_and_state, images, labels):
    return resnet.loss_fn(*model_and_state, images, labels)[0]


def make_resnet():
    config = resnet.Config(groups=(1, 1), bottleneck=False, width=4, classes=2)
    return eqx.nn.make_with_state(resnet.ResNet)(config, key=KEY)


SEQUENCES = tokens(8, 13)
EXAMPLE_KEYS = jax.eval_shape(lambda: jax.random.split(KEY, 8))
#: Each a model, its loss and a batch, whose leading dimension is split over `data`.
MODELS = {
    "mlp": (lambda: gpt.MLP(16, dtype=jnp.float32, key=KEY), mlp_loss, [array(8, 12, 16)]),
    "attention": (
        lambda: gpt.Attention(16, 4, dtype=jnp.float32, key=KEY), block_loss, [array(8, 12, 16)],
    ),
    "grouped-attention": (
        lambda: llama.Attention(llama.Config(**LLAMA), key=KEY), block_loss, [array(8, 12, 16)],
    ),
    "layer-norm": (lambda: eqx.nn.LayerNorm(16), norm_loss, [array(8, 12, 16)]),
    "block": (
        lambda: gpt.Block(16, 4, 0.0, dtype=jnp.float32, key=KEY), block_loss, [array(8, 12, 16)],
    ),
    "mixture": (
        lambda: mixtral.MixtureOfExperts(mixtral.Config(**LLAMA, experts=4), key=KEY),
        mixture_loss, [array(8, 12, 16)],
    ),
    "gpt2": (  # tied embedding, dropout, cross-entropy
        lambda: gpt2.GPT2(gpt2.Config(1, 16, 4, 12, 32, dropout=0.1), key=KEY),
        gpt2.loss_fn, [SEQUENCES, EXAMPLE_KEYS],
    ),
    "stacked-gpt2": (
        lambda: gpt2.GPT2(
            gpt2.Config(3, 16, 4, 12, 32), stacked=True, remat=True, key=KEY
        ),
        gpt2.loss_fn, [SEQUENCES],
    ),
    "llama": (
        lambda: llama.Llama(llama.Config(**LLAMA), key=KEY), llama.loss_fn, [SEQUENCES],
    ),
    "mixtral": (
        lambda: mixtral.Mixtral(mixtral.Config(**LLAMA, experts=4), key=KEY),
        mixtral.loss_fn, [SEQUENCES],
    ),
    "resnet": (make_resnet, resnet_loss, [array(8, 3, 16, 16), tokens(8)]),
}  # fmt: skip
#: Whole models take longer.
QUICK = ("mlp", "attention", "grouped-attention", "layer-norm", "block", "mixture", "stacked-gpt2")
NAMES = [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in MODELS]


def flat_model(name):
    """The loss as a function of the floating parameters and the rest, and how each is split."""
    build, loss, batch = MODELS[name]
    arrays, static = eqx.partition(
        eqx.filter_eval_shape(build), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    )
    paths, tree = jax.tree_util.tree_flatten_with_path(arrays)
    specs = [megatron(p, x, "stacked" in name and "blocks" in str(p)) for p, x in paths]
    leaves = [x for _, x in paths]
    floating = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]
    rest = [i for i in range(len(leaves)) if i not in floating]

    def fun(parameters, others, *batch):
        found = dict(zip([*floating, *rest], [*parameters, *others], strict=True))
        model = tree.unflatten(found[i] for i in range(len(leaves)))
        return loss(eqx.combine(model, static), *batch)

    operands = [leaves[i] for i in floating], [leaves[i] for i in rest], *batch
    order = [specs[i] for i in (*floating, *rest)]
    return fun, operands, [*order, *(spec_of(D, a.ndim) for a in batch)]


def as_split(ours, xla) -> bool:
    """Whether a spec has all that XLA splits, and where it splits more, XLA has it whole."""
    return ours == xla or not axes_of(xla)


def check(fun, mesh, operands, specs, at_least=False):
    """Our specs of `fun`'s results, if they are XLA's, and pinning them costs no collectives."""
    leaves, tree = jax.tree.flatten(tuple(operands))
    jaxpr = trace(lambda *xs: jax.tree.leaves(fun(*tree.unflatten(xs))), mesh, *leaves)
    ours = whole(_sharding_rules.output_specs(jaxpr, specs, SIZES), jaxpr)
    left_free = compiled(jaxpr, mesh, specs)
    for aval, mine, its in zip(jaxpr.out_avals, ours, chosen(left_free, jaxpr), strict=True):
        assert as_split(mine, its) if at_least else mine == its, (aval, mine, its)
    assert count(compiled(jaxpr, mesh, specs, ours)) <= count(left_free)
    return ours


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_split_as_xla_splits_them(mesh, name):
    fun, operands, specs = flat_model(name)
    check(jax.value_and_grad(fun), mesh, operands, specs)


@pytest.mark.parametrize("name", NAMES)
def test_a_forward_and_its_backward_are_split_as_xla_splits_them(mesh, name):
    fun, operands, specs = flat_model(name)

    def forward(parameters, *others):
        return jax.vjp(lambda p: fun(p, *others), parameters)

    value, pullback = jax.eval_shape(forward, *operands)
    # What is made of nothing (a causal mask) XLA makes again for each use: then it splits only one.
    made = check(forward, mesh, operands, specs, at_least=True)
    residuals, tree = jax.tree.flatten(pullback)

    def backward(residuals, cotangent):
        return tree.unflatten(residuals)(cotangent)

    check(backward, mesh, [residuals, value], [*made[1:], ()])


# ---- laws ---------------------------------------------------------------------------------------


def specs_of(fun, args, given, sizes=SIZES):
    jaxpr = jax.make_jaxpr(fun)(*args)
    return _sharding_rules.output_specs(jaxpr, given, sizes)


def test_what_is_made_of_nothing_may_be_split_in_any_way():
    def fun(x):
        zeros = jnp.zeros((8, 16))
        positions = jnp.arange(8)[:, None] * jnp.ones((8, 16))
        return (
            zeros,
            positions,
            jnp.ones((8, 16)) + x,
            jax.random.normal(jax.random.key(0), (8, 16)),
        )

    given = (("data",), ())
    assert specs_of(fun, [array(8, 16)], [given]) == [None, None, given, None]


def test_an_accumulator_that_may_be_any_is_split_as_what_is_added():
    def fun(total, x, w):
        return total + x @ w

    args = [array(8, 16), array(8, 4), array(4, 16)]
    given = [None, (("data",), ()), ((), ("model",))]
    assert specs_of(fun, args, given) == [(("data",), ("model",))]


@pytest.mark.parametrize("seed", range(5))
def test_an_axis_is_there_once_and_divides(seed):
    """Whatever the inputs' specs are: also of axes that divide some of the dimensions only."""
    rng = np.random.default_rng(seed)
    sizes = {"a": 2, "b": 3, "c": 4}
    fun, operands, _ = flat_model("block")
    jaxpr = jax.make_jaxpr(jax.value_and_grad(fun))(*operands)
    specs = []
    for aval in jaxpr.in_avals:
        entries = [()] * aval.ndim
        for axis in rng.permutation(list(sizes))[: aval.ndim]:
            entries[rng.integers(aval.ndim)] += (str(axis),)
        specs.append(tuple(entries))
    known = _sharding_rules.propagate(jaxpr, specs, sizes)
    assert len(known) > 100
    for var, spec in known.items():
        if spec is None:
            continue
        assert len(set(axes_of(spec))) == len(axes_of(spec))
        for n, entry in zip(var.aval.shape, spec, strict=True):
            assert n % int(np.prod([sizes[a] for a in entry])) == 0


def test_a_primitive_without_a_rule_gives_what_is_whole():
    unknown = jex.Primitive("unknown")
    unknown.def_abstract_eval(lambda aval: aval)
    given = (("data",), ())
    assert specs_of(unknown.bind, [array(8, 16)], [given]) == [replicated(2)]
    assert specs_of(unknown.bind, [array(8, 16)], [None]) == [None]


def test_explicit_axes_are_where_the_types_say():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto))

    def fun(x, w):
        return jax.reshard(x, P("data")) @ w

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jaxpr = jax.make_jaxpr(fun)(array(8, 4), array(4, 16))
    made = _sharding_rules.output_specs(jaxpr, [None, ((), ("model",))], SIZES)
    assert made == [(("data",), ("model",))]


@pytest.mark.parametrize("schedule", [jaxpp.schedules.OneFOneB(), jaxpp.schedules.ZeroBubbleH1()])
def test_a_scheduled_loop_is_split_as_the_loop_that_it_came_from(schedule):
    def loss(parameters, x):
        first, second = parameters
        hidden = jaxpp.pipeline_enter_stage(jnp.tanh(x @ first), stage_id=1)
        return ((hidden @ second) ** 2).mean()

    grads = jax.value_and_grad(jaxpp.wrap_forward(jaxpp.split_stages(loss)))
    loop = jaxpp.microbatch(grads, 4, reduce=("mean", "mean"))
    args = [(array(16, 8), array(8, 16)), array(32, 16)]
    given = [((), ("model",)), (("model",), ()), (("data",), ())]
    plain = specs_of(loop, args, given)
    assert plain == [(), *given[:2]]
    scheduled = jax.make_jaxpr(jaxpp.schedule(loop, schedule))(*args)
    assert any(_loop.is_loop(eqn) for eqn in scheduled.eqns)
    assert _sharding_rules.output_specs(scheduled, given, SIZES) == plain
