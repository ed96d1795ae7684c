"""Values are split as XLA would split them; what is free, and what is whole."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import pytest
from jax.interpreters import mlir
from jax.sharding import AxisType, PartitionSpec

import jaxpp
from jaxpp._specs import replicated, spec_of
from jaxpp.transforms.inside import _automatic_axes, _shardy
from jaxpp.transforms.tasks import _loop
from tests.transforms.xla import SIZES, array, chosen, compiled, make_mesh, tokens, trace, whole

P = PartitionSpec
D, DM, DNM, NM = P("data"), P("data", "model"), P("data", None, "model"), P(None, "model")
X = array(8, 16, 32)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh()


def callback(x):
    jax.debug.print("{}", x[0, 0, 0], ordered=True)
    return jnp.tanh(x)


#: What XLA changes before it asks Shardy, and what has bodies or constraints: each a function, its
#: operands, and their specs.
CASES = {
    "elementwise-of-chlo": (
        lambda x: [jnp.exp(jnp.square(x)), jnp.arctanh(x)], [X], [DNM]
    ),
    "top-k": (lambda x: jax.lax.top_k(x, 4), [X], [DM]),
    "top-k-of-a-split-dimension": (lambda x: jax.lax.top_k(x, 4), [X], [DNM]),
    "matmul": (jnp.matmul, [array(8, 32), array(32, 64)], [DM, NM]),
    "attention": (
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True),
        [array(8, 16, 4, 8)] * 3, [DNM] * 3,
    ),
    "keys": (
        lambda seeds: jax.vmap(jax.random.key)(seeds), [tokens(8)], [D],
    ),
    "scan": (
        lambda x, w: jax.lax.scan(lambda c, w: (c @ w, c.sum(0)), x, w),
        [array(8, 32), array(4, 32, 32)], [D, P(None, None, "model")],
    ),
    "cond": (
        lambda x, w, p: jax.lax.cond(p > 0, lambda x: x @ w, lambda x: x, x),
        [array(8, 32), array(32, 32), array()], [D, NM, P()],
    ),
    "constraint": (
        lambda x: jax.lax.with_sharding_constraint(x, P(None, "data")), [array(8, 32)], [DM]
    ),
    "shard-map-of-one-axis": (
        lambda x: jax.shard_map(
            lambda a: jax.lax.psum(a, "data"), in_specs=D, out_specs=P(), axis_names={"data"}
        )(x),
        [array(8, 32)], [DM],
    ),
    "callback": (callback, [X], [DNM]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_results_are_split_as_xla_splits_them(mesh, name):
    fun, args, given = CASES[name]
    specs = [spec_of(p, a.ndim) for a, p in zip(args, given, strict=True)]
    jaxpr = trace(lambda *xs: jax.tree.leaves(fun(*xs)), mesh, *args)
    ours = whole(_shardy.propagate(jaxpr, specs, SIZES)[1], jaxpr)
    if name == "callback":  # XLA has no ordered print for several devices
        jaxpr = trace(lambda x: [jnp.tanh(x)], mesh, *args)
    assert ours == chosen(compiled(jaxpr, mesh, specs), jaxpr)


# ---- laws ---------------------------------------------------------------------------------------


def specs_of(fun, args, given, sizes=SIZES):
    return _shardy.propagate(jax.make_jaxpr(fun)(*args), given, sizes)[1]


def test_what_is_made_of_nothing_may_be_split_in_any_way():
    def fun(x):
        positions = jnp.arange(8)[:, None] * jnp.ones((8, 16))
        return jnp.zeros((8, 16)), positions, jnp.ones((8, 16)) + x, x.sum(0)

    given = (("data",), ())
    assert specs_of(fun, [array(8, 16)], [given]) == [None, None, given, replicated(1)]


def test_what_may_be_any_is_split_as_what_it_is_combined_with():
    def fun(total, x, w):
        return total + x @ w

    jaxpr = jax.make_jaxpr(fun)(array(8, 16), array(8, 4), array(4, 16))
    given = [None, (("data",), ()), ((), ("model",))]
    inputs, outputs = _shardy.propagate(jaxpr, given, SIZES)
    assert inputs == [outputs[0], *given[1:]] and outputs == [(("data",), ("model",))]


def test_a_dimension_that_a_part_of_an_axis_splits_is_whole():
    jaxpr = jax.make_jaxpr(lambda x, y: x.reshape(2, 8) + y)(array(16), array(2, 8))
    found = _shardy.propagate(jaxpr, [(("data",),), None], {"data": 4})
    assert found == ([(("data",),), replicated(2)], [replicated(2)])


def test_an_input_without_a_use_keeps_its_place():
    given = [(("model",),), (("data",), ())]
    jaxpr = jax.make_jaxpr(lambda unused, x: jnp.tanh(x))(array(4), array(8, 16))
    assert _shardy.propagate(jaxpr, given, SIZES) == (given, given[1:])


def test_a_constraint_splits_where_nothing_is_given(mesh):
    jaxpr = trace(lambda x: [jax.lax.with_sharding_constraint(x, D)], mesh, array(8, 16))
    given = (("data",), ())
    assert _shardy.propagate(jaxpr, [None], SIZES) == ([given], [given])


def test_types_of_64_bits_are_kept_where_the_computation_alone_has_them():
    with jax.enable_x64(True):
        jaxpr = jax.make_jaxpr(lambda x: x + jnp.float64(0.1))(jnp.ones((8, 16, 32)))
    given = (("data",), (), ())
    assert _shardy.propagate(jaxpr, [given], SIZES)[1] == [given]


def test_an_input_in_host_memory_is_split_there():
    given = (("data",), ())
    x = jax.device_put(jnp.ones((8, 16)), jax.memory.Space.Host)
    jaxpr = jax.make_jaxpr(lambda x: jax.device_put(x, jax.memory.Space.Device) + 1)(x)
    assert _shardy.propagate(jaxpr, [given], SIZES) == ([given], [given])


def test_equal_computations_are_asked_once():
    def ask(width):
        return specs_of(lambda x: jnp.tanh(x @ x.T), [array(8, width)], [(("data",), ())])

    ask(24)
    before = _shardy._answer.cache_info()
    assert ask(24) == ask(24)
    assert _shardy._answer.cache_info().misses == before.misses
    ask(40)
    assert _shardy._answer.cache_info().misses == before.misses + 1


def test_what_cannot_be_lowered_is_whole_and_named():
    unknown = jex.Primitive("unknown")
    unknown.def_abstract_eval(lambda aval: aval)
    given = (("data",), ())

    def fun(x):
        return unknown.bind(x)

    with pytest.warns(UserWarning, match=r"test_shardy.py:\d+ cannot be lowered .*unknown"):
        assert specs_of(fun, [array(8, 16)], [given]) == [replicated(2)]
    assert specs_of(fun, [array(8, 16)], [None]) == [None], "nothing is split"


def test_a_kernel_of_another_platform_is_lowered_for_it():
    of_gpu = jex.Primitive("of_gpu")
    of_gpu.def_abstract_eval(lambda aval: aval)
    lowering = mlir.lower_fun(jnp.tanh, multiple_results=False)
    mlir.register_lowering(of_gpu, lowering, platform="cuda")
    given = (("data",), ())
    assert specs_of(of_gpu.bind, [array(8, 16)], [given]) == [given]


def test_explicit_axes_are_where_the_types_said():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto))

    def fun(x, w):
        return jax.reshard(x, P("data")) @ w

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jaxpr = jax.make_jaxpr(fun)(array(8, 4), array(4, 16))
    jaxpr = _automatic_axes.with_automatic_axes(jaxpr)
    made = _shardy.propagate(jaxpr, [None, ((), ("model",))], SIZES)[1]
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
    assert _shardy.propagate(scheduled, given, SIZES)[1] == plain
