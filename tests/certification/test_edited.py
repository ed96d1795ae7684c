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
