"""Edits that change no value are proven to change none, for steps of all sorts."""

import jax
import jax.numpy as jnp
import pytest

import jaxpp
from jaxpp.extend import Kind, edit_loops
from tests.certification import steps

K = Kind("K", "quiet", after="F", holds=0)


def same(*arrays):
    return list(arrays)


def every_edit(loop):
    """Each edit once for each task that it can be of, by functions that give what they take."""
    for stage in range(loop.table.num_stages):
        for value in loop.values:
            is_key = jnp.issubdtype(value.aval.dtype, jax.dtypes.extended)
            own = [key for key in value.readers if key.stage == stage and key.kind != K]
            if value.maker == ("F", stage) and own and not is_key:
                loop, new = loop.insert(K, stage, same, [value])
                for key in own:
                    loop = loop.read(key, new[0], of=value)
                break
    for key in loop.tasks:
        if grads := loop.gradients(key):
            loop = loop.replace(key, grads, same)
    for value in loop.values:
        far = [key for key in value.readers if key.stage != value.maker.stage]
        if far:
            loop, new = loop.after(value.maker, same, [value])
            for key in far:
                loop = loop.before(key, same, new, of=value)
    return loop.order(tuple)


@pytest.mark.parametrize("name", [n for n in steps.CASES if n != "accumulated"])  # by `schedule`
def test_edits_that_give_what_they_take_are_proven(name, monkeypatch):
    schedule = jaxpp.schedule
    monkeypatch.setattr(jaxpp, "schedule", lambda *args: edit_loops(schedule(*args), every_edit))
    step, args = steps.CASES[name]()
    lowered = step.lower(*args)
    certificate = lowered.certify()
    assert not certificate.edits and "edit_loops" in certificate.transforms
    assert any(e.primitive.name == "pipeline_loop" for e in lowered.passes["trace"].jaxpr.eqns)


def in_bfloat16(x):
    return x.astype(jnp.bfloat16).astype(x.dtype)


def in_eight_bits(x):
    return jax.lax.reduce_precision(x, 5, 2)


@pytest.mark.parametrize("rounded", [in_bfloat16, in_eight_bits])
@pytest.mark.parametrize("name", ["plain", "narrow loss"])
def test_an_edit_that_rounds_changes_values(name, rounded):
    """The gradients of a narrow loss are rounded elsewhere than by definition without an edit."""

    def loss_fn(w, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w))
        loss = jnp.mean((h @ w) ** 2)
        return loss if name == "plain" else loss.astype(jnp.bfloat16)

    loop = jaxpp.microbatch(jaxpp.wrap_forward(loss_fn), 4)
    grad_fn = jaxpp.schedule(jax.value_and_grad(loop), jaxpp.schedules.OneFOneB())

    def edited(change):
        def rule(loop):
            value = next(v for v in loop.values if ("F", 1) in v.readers)
            return loop.replace(value.maker, [value], change)

        step = jaxpp.place(edit_loops(grad_fn, rule), jaxpp.MpmdMesh((2,)))
        return jaxpp.certify(step, jnp.ones((4, 4)), jnp.ones((8, 4)))

    unchanged, changed = edited(lambda x: x * 1), edited(rounded)
    assert not unchanged.edits and "edit_loops" in unchanged.transforms
    assert bool(unchanged.rounded) == (name != "plain")
    assert changed.edits and changed.transforms == ("place",) and not changed.rounded
