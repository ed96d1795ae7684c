"""The parameters, the data and the loss of a program; plain JAX but for the marks."""

import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxpp
from tests.programs.operations import F32, WEIGHTS, WIDTH, Scope
from tests.programs.program import Output, Program


def make_params(program: Program) -> Any:
    params = {}
    for name, kind in sorted(program.weights.items()):
        rng = np.random.default_rng([program.seed, zlib.crc32(name.encode())])
        values = rng.normal(size=WEIGHTS[kind]).astype(np.float32) / 2
        half = program.half_weights and rng.random() < 0.5
        params[name] = jnp.asarray(values, jnp.bfloat16 if half else F32)
    if program.params == "list":
        return list(params.values())
    if program.params == "nested":
        return {"model": {name: {"value": value} for name, value in params.items()}}
    return params


def _named(program: Program, params: Any) -> dict[str, Any]:
    """The parameters by name, whatever pytree they are in."""
    return dict(zip(sorted(program.weights), jax.tree.leaves(params), strict=True))


def make_data(program: Program, number: int, examples: int) -> Any:
    """The data of a call: a key for each microbatch, all else by example but for what is shared."""
    rng = np.random.default_rng([program.seed, number])
    size = program.microbatches * examples
    return {
        "x": jnp.asarray(rng.normal(size=(size, WIDTH)), F32),
        "labels": jnp.asarray(rng.integers(0, 5, size=size), jnp.int32),
        "shared": jnp.asarray(1 + rng.random(WIDTH), F32),
        "keys": jax.random.split(jax.random.key(program.seed + number), program.microbatches),
    }


#: The axes of the data.
AXES = {"x": 0, "labels": 0, "shared": None, "keys": 0}


def make_loss(program: Program) -> Callable[[Any, Any], Any]:
    """The loss function of a program, with marks where it has them; it gives all of its outputs."""

    def enter(values, stage):
        if program.cuts == "automatic":
            return values
        if program.cuts == "marks":
            return jaxpp.pipeline_enter_stage(values) if stage else values
        return jaxpp.pipeline_enter_stage(values, stage_id=stage)

    def forward(params, data):
        named = _named(program, params)
        made: list[Any] = []  # of each stage: its rows, and what it hands on beside them
        for number, stage in enumerate(program.stages):
            inputs = [made[j] for j in stage.reads] or [(data["x"], {})]
            inputs = enter(inputs, number)
            h = sum(rows for rows, _ in inputs)
            carried = {kind: x for _, handed in inputs for kind, x in handed.items()}
            scope = Scope(named, data, carried)
            made.append((scope.run(stage.lines, h), carried))
        return made[-1]

    def loss_fn(params, data):
        h, carried = _AROUND[program.around](forward)(params, data)
        loss = _LOSSES[program.loss](h, data)
        if program.penalty:
            squares = sum(jnp.sum(w.astype(F32) ** 2) for w in jax.tree.leaves(params))
            loss = loss + 0.01 * jnp.asarray(squares, F32)
        outputs = [(o.name, _output(o, h, data)) for o in program.outputs]
        outputs.insert(program.place_of_loss, ("loss", loss))
        return outputs

    return loss_fn


_AROUND: dict[str, Callable[[Callable], Callable]] = {
    "nothing": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
}


def _cross_entropy(h, data):
    labels = (data["labels"] % WIDTH)[:, None]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(h), labels, 1))


_LOSSES: dict[str, Callable] = {
    "squares": lambda h, data: jnp.mean((h - 0.3) ** 2),
    "labels": _cross_entropy,
    "mean": lambda h, data: jnp.tanh(h).mean(),
    "abs": lambda h, data: jnp.abs(h - data["x"]).sum() / h.shape[0],
}


def _output(output: Output, h, data) -> Any:
    """What the loss function gives beside the loss."""
    match output.kind:
        case "metric":
            return jnp.abs(h).max()
        case "count":
            return (h > 0).sum(dtype=jnp.int32)
        case "rows":
            return 2 * h
        case "flag":
            return (h > 0.5).all()
        case "half":
            return h[0].astype(jnp.bfloat16)
        case "labels":
            return data["labels"]
        case "constant":
            return jnp.arange(3)
        case "key":
            return jax.random.fold_in(data["keys"][0], 1)
        case "empty":
            return h[:, :0]
    raise ValueError(output.kind)
