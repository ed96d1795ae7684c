"""The rules of sharding propagation for each primitive, against what XLA does; their laws."""

import functools

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

import jaxpp
from jaxpp._specs import replicated, spec_of
from jaxpp.transforms.inside import _automatic_axes, _propagation
from jaxpp.transforms.tasks import _loop
from tests.transforms.xla import SIZES, array, chosen, compiled, make_mesh, tokens, trace, whole

P = PartitionSpec


@pytest.fixture(scope="module")
def mesh():
    return make_mesh()


# ---- one primitive ------------------------------------------------------------------------------

X, IMAGES = array(8, 16, 32), array(8, 4, 8, 8)
D, DM, DNM, NM = P("data"), P("data", "model"), P("data", None, "model"), P(None, "model")
MODEL = P("model")


def convolve(x, kernel, **options):
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", **options)


depthwise = functools.partial(convolve, feature_group_count=4)


def max_pool(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


def gradients(fun, argnums: int | tuple[int, ...] = 0):
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
    ours = whole(_propagation.output_specs(jaxpr, specs, SIZES), jaxpr)
    xla = chosen(compiled(jaxpr, mesh, specs), jaxpr)
    return {name: (ours[own], xla[own]) for name, own in numbers.items()}


@pytest.mark.parametrize("name", PRIMITIVES)
def test_results_are_split_as_xla_splits_them(primitives, name):
    ours, xla = primitives[name]
    assert ours == xla


# ---- laws ---------------------------------------------------------------------------------------


def specs_of(fun, args, given, sizes=SIZES):
    jaxpr = jax.make_jaxpr(fun)(*args)
    return _propagation.output_specs(jaxpr, given, sizes)


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


def test_a_primitive_without_a_rule_gives_what_is_whole():
    unknown = jex.Primitive("unknown")
    unknown.def_abstract_eval(lambda aval: aval)
    given = (("data",), ())
    assert specs_of(unknown.bind, [array(8, 16)], [given]) == [replicated(2)]
    assert specs_of(unknown.bind, [array(8, 16)], [None]) == [None]


def test_explicit_axes_are_where_the_types_said():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto))

    def fun(x, w):
        return jax.reshard(x, P("data")) @ w

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jaxpr = jax.make_jaxpr(fun)(array(8, 4), array(4, 16))
    jaxpr = _automatic_axes.with_automatic_axes(jaxpr)
    made = _propagation.output_specs(jaxpr, [None, ((), ("model",))], SIZES)
    assert made == [(("data",), ("model",))]


@pytest.mark.more
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
    assert _propagation.output_specs(scheduled, given, SIZES) == plain
