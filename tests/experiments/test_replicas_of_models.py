"""Each model with replicas on 2 ranks of 2 x 2 devices gives what one device a rank gives.

`pytest -m slow -rP tests/experiments/test_replicas_of_models.py` prints how far each is off: the
largest difference of an element, over the largest magnitude in its array.
"""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp
from tests import models
from tests.experiments import test_zoo_architectures as architectures
from tests.experiments import test_zoo_language_models as languages
from tests.helpers import mesh_of

LANGUAGES = languages.ZOO
STACKED = ("gpt2", "llama", "mixtral")
NAMES = ["gpt", *LANGUAGES, *(f"stacked_{n}" for n in STACKED), *architectures.CASES]
#: A float32 has 24 bits; sums over devices of `model` are in another order.
ROUNDING = 2e-5


def case_of(name) -> Any:
    """The loss, cut in two, a model and its running statistics, and the data of a step."""
    if name in architectures.CASES:
        case = architectures.CASES[name]
        loss = architectures.cut(case, "automatic", 2)
        return loss, architectures.make(case), lambda n: twice(case.data, n)
    if name == "gpt":
        case = models.gpt()
        return jaxpp.split_stages(case.loss, 2), (case.model,), case.data
    zoo = LANGUAGES[name.removeprefix("stacked_")]
    model = zoo.make_stacked(4, remat=True) if "stacked" in name else zoo.make(2)
    return jaxpp.split_stages(zoo.loss_fn, 2), (model,), zoo.data


def twice(data, n):
    """The examples of two steps as those of one: each slice of a replica has two."""
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), data(2 * n), data(2 * n + 1))


def split(tree):
    """Matrices over `model`, by their first dimension, as far as it divides."""

    def spec(x):
        return P("model") if eqx.is_array(x) and x.ndim > 1 and x.shape[0] % 2 == 0 else None

    return jax.tree.map(spec, tree)


def merge_of(state):
    """Running statistics are averaged over replicas; a count of steps is that of any."""
    arrays = jax.tree.leaves(eqx.filter(state, eqx.is_array))
    return "mean" if all(map(eqx.is_inexact_array, arrays)) else "last"


@functools.cache
def trained(name, mesh_shape):
    """Three steps on a mesh; None is for one device a rank."""
    loss, start, data = case_of(name)
    stateful = len(start) > 1
    grad_fn = eqx.filter_value_and_grad(jaxpp.wrap_forward(loss), has_aux=stateful)
    axes = (None, *["carry"] * stateful, *(0 for _ in data(0)))
    combined = ("mean", "carry") if stateful else "mean"
    count = 2 if data(0)[0].shape[0] % 3 else 3
    options: dict[str, Any] = dict(in_axes=axes, reduce=(combined, "mean"), replicas=2)
    if stateful:
        options["merge"] = ((None, merge_of(start[1])), None)
    grad_fn = jaxpp.microbatch(grad_fn, count, **options)
    grad_fn = jaxpp.schedule(grad_fn, jaxpp.schedules.OneFOneB())
    optimizer = architectures.OPTIMIZER

    def step(model, opt_state, *args):
        out, grads = grad_fn(model, *args)
        updates, opt_state = optimizer.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state, out

    model, *state = start
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    if mesh_shape is None:
        placed = jaxpp.place(step, mesh_of(2, shared=True))
    else:
        mesh = jaxpp.MpmdMesh(mesh_shape, ("mpmd", "data", "model"))
        batch = (P("data") for _ in data(0))
        specs = split(model), split(opt_state), *(None for _ in state), *batch
        placed = jaxpp.place(step, mesh, in_specs=specs)
    losses = []
    for n in range(3):
        model, opt_state, out = placed(model, opt_state, *state, *data(n))
        loss, *state = out if stateful else (out,)
        losses.append(loss)
    found = jaxpp.gather((eqx.filter(model, eqx.is_array), opt_state, state, losses))
    return [np.asarray(x) for x in jax.tree.leaves(found) if eqx.is_inexact_array(x)]


def difference(got, want):
    """The largest difference of an element over the largest magnitude in its array.

    That is at least 1e-2: GPT-2's biases of keys have no gradient but roundings.
    """
    pairs = [(a, b) for a, b in zip(got, want, strict=True) if a.size]
    return max(np.abs(a - b).max() / max(np.abs(b).max(), 1e-2) for a, b in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_model_with_replicas_is_that_of_one_device_a_rank(name):
    want = trained(name, None)
    off = {shape: difference(trained(name, shape), want) for shape in ((2, 2, 1), (2, 2, 2))}
    print(name, *("bitwise" if not own else f"{own:.1e}" for own in off.values()))
    assert max(off.values()) < ROUNDING
    trained.cache_clear()
