"""Errors come at the first moment, and blame the right thing."""

import pathlib
import traceback
from typing import Any

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import jaxpp
from jaxpp.schedules import ScheduleError
from tests.helpers import mesh_of
from tests.transforms import two_layers

LINE = f"at {__file__}:"


def model_of():
    return {"layers": [jnp.eye(4), jnp.eye(4)], "scale": 2.0}


def loss(model, batch):
    h = jaxpp.pipeline_enter_stage(jnp.tanh(batch @ model["layers"][0]))
    return jnp.mean(h @ model["layers"][1]) * model["scale"]


def branches(model, batch):
    value = loss(model, batch)
    return value if value > 0 else -value


def grad_of(loss):
    grad = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss)), 4)
    return jaxpp.schedule(grad, jaxpp.schedules.OneFOneB())


def train_step(model, batch):
    value, grads = grad_of(loss)(model, batch)
    return grads, float(value)


NAMED = {
    "in the loss": (lambda: jaxpp.place(grad_of(branches), mesh_of(2)), "branches", "batch"),
    "in the step": (lambda: jaxpp.place(train_step, mesh_of(2)), "train_step", "batch"),
    "in a loop": (lambda: jaxpp.microbatch(branches, 4), "branches", "batch"),
    "in a cut": (lambda: jaxpp.split_stages(branches), "branches", "batch"),
}


@pytest.mark.cases(len(NAMED))
@pytest.mark.parametrize("name", NAMED)
def test_an_error_of_a_tracer_names_the_function_and_its_arguments(name):
    make, function, argument = NAMED[name]
    with pytest.raises(jax.errors.ConcretizationTypeError) as error:
        make()(model_of(), jnp.ones((8, 4)))
    message = str(error.value)
    assert f"while tracing the function {function} {LINE}" in message
    assert "model['layers'][0]" in message and f"and {argument}." in message
    assert "flat" not in message and "jaxprs/" not in message


def test_keywords_and_further_arguments_have_their_names():
    def fun(x, *more, flag):
        return jnp.sum(x) + more[0] if flag > 0 else x

    with pytest.raises(jax.errors.TracerBoolConversionError, match="argument flag"):
        jaxpp.split_stages(lambda x, *, flag: fun(x, x, flag=flag))(jnp.ones(3), flag=jnp.ones(()))
    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"argument args\[1\]"):
        jaxpp.split_stages(lambda *x: fun(x[0], x[0], flag=x[1]))(jnp.ones(3), jnp.ones(()))


@pytest.mark.parametrize("mistake", ["given twice", "deleted"])
@pytest.mark.cases(2)
def test_arrays_are_checked_before_anything_is_traced_or_compiled(mistake):
    traced = []

    def step(model, average, batch):
        traced.append(True)
        return grad_of(loss)(model, batch)[1], average

    step = jaxpp.place(step, mesh_of(2), donate_argnums=(0, 1))
    weights, batch = jnp.eye(4) * 1, jnp.ones((8, 4)) * 1
    if mistake == "deleted":
        batch.delete()
    with pytest.raises(ValueError, match=r"args\[1\] is the same|args\[2\] was donated"):
        step(weights, weights if mistake == "given twice" else jnp.copy(weights), batch)
    assert not traced


def test_a_mesh_of_jax_with_the_axis_of_ranks_is_a_mesh():
    step = two_layers.scheduled()
    ours = jaxpp.place(step, jaxpp.MpmdMesh((2,)))(two_layers.WEIGHTS, two_layers.X)
    placed = jaxpp.place(step, jax.make_mesh((2,), ("mpmd",)))
    assert isinstance(placed.mesh, jaxpp.MpmdMesh)
    got = placed(two_layers.WEIGHTS, two_layers.X)
    chex.assert_trees_all_equal(*jax.device_get((got, ours)))
    other = jax.make_mesh((2, 2), ("data", "mpmd"))
    mesh = jaxpp.place(step, other).mesh
    assert isinstance(mesh, jaxpp.MpmdMesh) and mesh.num_ranks == 2
    assert set(mesh.devices[:2]) == set(other.devices[:, 0])
    with pytest.raises(ValueError, match=r"Name it: jaxpp\.MpmdMesh\(\(2, 2\), \('mpmd', 'y'\)\)"):
        jaxpp.place(step, jax.make_mesh((2, 2), ("x", "y")))


@pytest.mark.parametrize("axes", [(0, 0), 0, (0, None)])
@pytest.mark.cases(3)
def test_a_model_that_is_sliced_is_called_a_model(axes):
    model = eqx.nn.MLP(4, 1, 4, 3, key=jax.random.key(0))

    def loss(model, batch):
        return jnp.mean(jax.vmap(model)(batch["x"]) - batch["y"])

    batch = {"x": jnp.ones((8, 4)), "y": jnp.ones((8, 1))}
    message = r"args\[0\], which holds the parameters of a model \(MLP\).* in_axes=\(None, 0\)"
    with pytest.raises(ValueError, match=message):
        jaxpp.microbatch(eqx.filter_grad(loss), 4, in_axes=axes)(model, batch)
    first = jaxpp.microbatch(lambda batch, model: loss(model, batch), 4)
    with pytest.raises(ValueError, match=r"in_axes=\(0, None\).*model first, and then the batch"):
        first(batch, model)
    # An error of the batch blames the batch, and a model as the batch of an ensemble is fine.
    with pytest.raises(ValueError, match=r"microbatch: args\[1\]\['x'\] has 6 examples"):
        jaxpp.microbatch(eqx.filter_grad(loss), 4)(model, {"x": jnp.ones((6, 4)), "y": 1.0})


def test_errors_print_the_name_by_which_they_are_imported():
    error = jaxpp.RankError("gone", rank=1)
    for own, name in ((error, "jaxpp.RankError"), (ScheduleError("x"), "jaxpp.schedules.S")):
        assert traceback.format_exception_only(own)[0].startswith(name)
    assert pathlib.Path(jaxpp.__file__).parent.name == jaxpp.RankError.__module__


def test_a_feed_that_is_no_mapping_is_an_error():
    wrong: Any = [next]
    with pytest.raises(TypeError, match="feed is a mapping from the position .*, got a list"):
        jaxpp.place(grad_of(loss), mesh_of(2), feed=wrong)


def test_the_end_of_a_feed_ends_the_loop():
    batches = iter([jnp.ones((8, 4))] * 2)
    step = jaxpp.place(grad_of(loss), mesh_of(2), feed={1: lambda number: next(batches)})
    done = []
    with pytest.raises(StopIteration):
        for number in range(4):
            done.append(step(model_of(), number))
    assert len(done) == 2
