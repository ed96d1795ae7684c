"""What a certificate says, and what it needs: types alone, and no compilation."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback

import jaxpp
from jaxpp import extend, testing
from jaxpp._program import Run
from jaxpp.transforms.microbatch import _reductions
from jaxpp.transforms.place import _lower_step


def mesh_of(ranks):
    return jaxpp.MpmdMesh((ranks,), devices=[jax.devices()[0]] * ranks)


def two_layers(w, x):
    h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
    return jnp.mean((h @ w[1]) ** 2)


def step_of(loss=two_layers, schedule=None, ranks=2, microbatches=4):
    grad = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss)), microbatches)
    grad = jaxpp.schedule(grad, schedule or jaxpp.schedules.OneFOneB())

    def train(w, x):
        value, grads = grad(w, x)
        return jax.tree.map(lambda p, d: p - 0.1 * d, w, grads), value

    return jaxpp.place(train, mesh_of(ranks), donate_argnums=0)


W, X = [jnp.eye(4) * 0.7, jnp.eye(4) * 0.5], jnp.arange(32.0).reshape(8, 4)
ALL = ("split_stages", "wrap_forward", "microbatch", "schedule", "place")


def test_it_says_what_was_proven():
    certificate = jaxpp.certify(step_of(), W, X)
    assert certificate.transforms == ALL and not certificate.undecided
    assert (certificate.results, certificate.ranks) == (3, 2)
    assert certificate.exact and not certificate.regrouped
    assert certificate.passes == ("trace", *(f.__name__ for f in _lower_step.PASSES))
    assert certificate.tasks >= 16 and certificate.messages >= 8
    headline, *_ = str(certificate).splitlines()
    assert headline == (
        "3 results of 2 ranks are those of the function, bit by bit: split_stages, wrap_forward, "
        "microbatch, schedule, place are proven"
    )


def test_passes_may_be_left_out():
    assert jaxpp.certify(step_of(), W, X, passes=False).passes == ("trace",)


def test_a_model_larger_than_memory_is_proven_by_its_types():
    layers, width = 64, 32768
    params = jax.ShapeDtypeStruct((layers, width, width), jnp.float32)  # 275 GB

    def loss(w, x):
        h, _ = jax.lax.scan(lambda h, layer: (jnp.tanh(h @ layer), None), x, w)
        return jnp.mean(h**2)

    grad = jaxpp.microbatch(
        jax.value_and_grad(jaxpp.wrap_forward(jaxpp.split_stages(loss, num_stages=4))), 4
    )
    grad = jaxpp.schedule(grad, jaxpp.schedules.ZeroBubbleH1())
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))

    def train(w, state, x):
        value, grads = grad(w, x)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(w, updates), state, value

    step = jaxpp.place(train, mesh_of(4), donate_argnums=(0, 1))
    state = jax.eval_shape(optimizer.init, params)
    certificate = step.lower(params, state, jax.ShapeDtypeStruct((8, width), jnp.float32)).certify()
    assert not certificate.undecided
    assert not certificate.exact  # the norm is added up rank by rank


def test_nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *_, **__: pytest.fail("it compiles"))
    testing.assert_computes_the_function(step_of(), W, X)


def test_a_step_inside_jit_has_its_own_trace():
    """A trace with the schedule that JAX has cached does not stand for the function."""
    grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(two_layers)), 4)
    grad = jax.jit(jaxpp.schedule(grad, jaxpp.schedules.OneFOneB()))
    grad(W, X)
    step = jaxpp.place(lambda w, x: grad(w, x), mesh_of(2))
    assert jaxpp.certify(step, W, X).transforms == ALL


def test_effects_are_counted_in_their_order():
    def loss(w, x):
        io_callback(lambda _: None, None, x[0, 0], ordered=True)
        jax.debug.print("{}", x[0, 1])
        return two_layers(w, x)

    certificate = jaxpp.certify(step_of(loss), W, X)
    assert certificate.effects == 8 and not certificate.undecided


def test_a_scan_too_long_to_unroll_is_compared_as_a_whole():
    def loss(w, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        h, _ = jax.lax.scan(lambda h, k: (0.5 * h + k, None), h, jnp.arange(2000.0))
        return jnp.mean((h @ w[1]) ** 2)

    certificate = jaxpp.certify(step_of(loss), W, X)
    assert certificate.exact and not certificate.undecided and certificate.equations < 20_000


def test_the_gradient_outside_of_the_loop_is_the_same():
    loss = jaxpp.microbatch(jaxpp.wrap_forward(two_layers), 4)
    grad = jaxpp.schedule(jax.value_and_grad(loss), jaxpp.schedules.ZeroBubbleH1())
    testing.assert_computes_the_function(jaxpp.place(grad, mesh_of(2)), W, X)


class Average:
    """The mean, as an operator of a user's."""

    def init(self, x):
        return jnp.zeros(x.shape, x.dtype)

    def combine(self, acc, x):
        return acc + x

    def finish(self, acc, num_microbatches):
        return acc / num_microbatches


def test_an_operator_of_the_users_is_by_its_own_definition():
    grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(two_layers)), 4, reduce=Average())
    step = jaxpp.place(jaxpp.schedule(grad, jaxpp.schedules.OneFOneB()), mesh_of(2))
    testing.assert_computes_the_function(step, W, X)


def test_a_transform_that_changes_the_function_is_refuted(monkeypatch):
    mean = _reductions.REDUCTIONS["mean"]
    a_sum = dataclasses.replace(mean, finish=lambda acc, count: acc)
    monkeypatch.setitem(_reductions.REDUCTIONS, "mean", a_sum)
    with pytest.raises(jaxpp.Refuted, match=r"result\[0\]\[0\] is not that of the function"):
        jaxpp.certify(step_of(), W, X)


def test_a_function_that_is_not_placed_is_no_step():
    for fun in (two_layers, jax.jit(two_layers)):
        with pytest.raises(TypeError, match="takes a placed step, got `two_layers`"):
            jaxpp.certify(fun, W, X)


def test_a_lowered_step_certifies_itself():
    lowered = step_of().lower(W, X)
    with pytest.raises(TypeError, match=r"it is lowered already: step.lower\(...\).certify\(\)"):
        jaxpp.certify(lowered)


def test_edits_that_change_what_is_computed_have_to_be_accepted():
    def halved(loop):
        for key in loop.tasks:
            if grads := loop.gradients(key):
                loop = loop.replace(key, grads, lambda *own: [0.5 * g for g in own])
        return loop

    grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(two_layers)), 4)
    grad = extend.edit_loops(jaxpp.schedule(grad, jaxpp.schedules.OneFOneB()), halved)
    step = jaxpp.place(grad, mesh_of(2))
    with pytest.raises(AssertionError, match="Edits change what the step computes: `.*halved`"):
        testing.assert_computes_the_function(step, W, X)
    testing.assert_computes_the_function(step, W, X, accept_edits=True)


def test_a_wrong_mean_is_named_with_the_one_that_is_wanted(monkeypatch):
    mean = _reductions.REDUCTIONS["mean"]
    other = dataclasses.replace(mean, finish=lambda acc, count: acc / (count + 1))
    monkeypatch.setitem(_reductions.REDUCTIONS, "mean", other)
    with pytest.raises(jaxpp.Refuted, match=r"5\.0[^\n]*\n *where 4\.0[^\n]* is wanted") as error:
        jaxpp.certify(step_of(), W, X)
    assert error.value.line.startswith(__file__)


@pytest.mark.parametrize("change", ["given another's operands", "lost"])
def test_a_wrong_task_is_refuted(change):
    lowered = step_of().lower(W, X)
    bundle = lowered.bundle
    program, *others = bundle.programs
    instructions: list[Any] = list(program.instructions)
    number = {i.label: n for n, i in enumerate(instructions) if isinstance(i, Run)}
    if change == "lost":
        del instructions[number["B0.0"]]
    else:
        one = instructions[number["F0.1"]]
        instructions[number["F0.1"]] = dataclasses.replace(
            one, inputs=instructions[number["F0.0"]].inputs
        )
    programs = (dataclasses.replace(program, instructions=tuple(instructions)), *others)
    wrong = dataclasses.replace(lowered, bundle=dataclasses.replace(bundle, programs=programs))
    with pytest.raises(jaxpp.Refuted, match="rank 0") as error:
        wrong.certify()
    assert error.value.pass_name == "the programs" and error.value.rank == 0


def test_a_batch_that_devices_share_is_proven():
    mesh = jaxpp.MpmdMesh((2, 2), ("mpmd", "data"), devices=jax.devices()[:4])
    grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(two_layers)), 2)
    grad = jaxpp.schedule(grad, jaxpp.schedules.OneFOneB())
    step = jaxpp.place(grad, mesh, in_specs=(None, jax.sharding.PartitionSpec("data")))
    testing.assert_computes_the_function(step, W, X)


def test_an_axis_of_tensor_parallelism_is_proven():
    P = jax.sharding.PartitionSpec
    mesh = jaxpp.MpmdMesh((2, 2), ("mpmd", "model"), devices=jax.devices()[:4])

    def loss(w, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        return jnp.mean((jax.lax.with_sharding_constraint(h @ w[1], P(None, "model"))) ** 2)

    grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss)), 2)
    grad = jaxpp.schedule(grad, jaxpp.schedules.OneFOneB())
    step = jaxpp.place(grad, mesh, in_specs=([P(None, "model"), P("model", None)], None))
    testing.assert_computes_the_function(step, W, X)


def test_a_fed_argument_is_proven_by_its_type():
    grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(two_layers)), 4)
    grad = jaxpp.schedule(grad, jaxpp.schedules.OneFOneB())
    step = jaxpp.place(grad, mesh_of(2), feed={1: lambda n: np.ones((8, 4), np.float32)})
    testing.assert_computes_the_function(step, W, 0)


@pytest.mark.parametrize("setting", ["set_mesh", "debug_key_reuse", "enable_x64"])
def test_a_step_is_proven_under_settings_of_jax(setting):
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    contexts = {
        "set_mesh": lambda: jax.set_mesh(mesh),
        "debug_key_reuse": lambda: jax.debug_key_reuse(True),
        "enable_x64": lambda: jax.enable_x64(True),
    }
    with contexts[setting]():
        testing.assert_computes_the_function(step_of(), W, X)


def test_a_loop_under_vmap_is_not_refuted_where_it_is_batched_in_another_form():
    grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(two_layers)), 4)
    grad = jax.vmap(jaxpp.schedule(grad, jaxpp.schedules.OneFOneB()), (0, None))
    step = jaxpp.place(grad, mesh_of(2))
    certificate = jaxpp.certify(step, [jnp.stack([w, -w]) for w in W], X)
    assert certificate.transforms in (ALL, ("place",))
    assert ("vmap" in certificate.undecided) == (certificate.transforms == ("place",))


def test_other_settings_are_not_those_of_the_step():
    lowered = step_of().lower(W, X)
    with jax.enable_x64(True), pytest.raises(jaxpp.Undecided, match="other settings of JAX"):
        lowered.certify()
