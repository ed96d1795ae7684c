"""Measures the first call of a placed step: a GPT with AdamW, by depth and number of microbatches.

    python -m benchmarks.first_call
    python -m benchmarks.first_call --layers=8 --microbatches=8,64

Prints the time to trace, lower and compile a step that `place` runs on four ranks, and its ratio to
that of `jax.jit` for the plain step, which accumulates the same gradients by a scan. Then, of the
placed step, the time to trace the function under each further transform, and the time of each pass
of `place`: what grows faster than the layers, or at all with the microbatches, stands out there.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from absl import app, flags

import jaxpp
from benchmarks.equal_blocks import train_step_of
from experiments.models.gpt import GPT, loss_fn
from jaxpp import _jaxprs
from jaxpp.transforms.place import _lower, _lower_step, _task_graph

_LAYERS = flags.DEFINE_list("layers", ["8", "16", "32"], "Numbers of blocks of the GPT.")
_MICROBATCHES = flags.DEFINE_list("microbatches", ["8", "64"], "Numbers of microbatches.")
_STAGES = flags.DEFINE_integer("stages", 4, "Stages, a rank each.", 2)
_WIDTH = flags.DEFINE_integer("width", 32, "Features of a position.")
_COMPILE = flags.DEFINE_bool("compile", True, "Whether to compile, which takes longest.")

_CONTEXT = 16


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """Gives a function's result, and the seconds that it took."""
    start = time.perf_counter()
    result = run()
    return result, time.perf_counter() - start


def measure(layers: int, microbatches: int) -> dict[str, Any]:
    """Measures the parts of the first call, in seconds, of the plain step and of the placed one."""
    stages, optimizer = _STAGES.value, optax.adamw(1e-3)
    model = GPT(layers=layers, width=_WIDTH.value, heads=4, context=_CONTEXT, key=jax.random.key(0))
    state = model, optimizer.init(eqx.filter(model, eqx.is_array))
    tokens = jnp.zeros((2 * microbatches, _CONTEXT + 1), jnp.int32)

    at = [f"blocks.{n * layers // stages}" for n in range(1, stages)]
    staged = jaxpp.wrap_forward(jaxpp.split_stages(loss_fn, at=at))
    differentiated = eqx.filter_value_and_grad(staged)
    looped = jaxpp.microbatch(differentiated, microbatches)
    scheduled = jaxpp.schedule(looped, jaxpp.schedules.OneFOneB())

    arrays, static = eqx.partition(state, eqx.is_array)
    plain = train_step_of(
        jaxpp.microbatch(eqx.filter_value_and_grad(loss_fn), microbatches), optimizer
    )
    jitted = jax.jit(
        lambda arrays, batch: eqx.filter(plain(*eqx.combine(arrays, static), batch), eqx.is_array),
        donate_argnums=0,
    )
    traced, trace_s = timed(lambda: jitted.trace(arrays, tokens))
    lowered, lower_s = timed(traced.lower)
    figures: dict[str, Any] = {"plain": {"trace": trace_s, "lower": lower_s}}

    mesh = jaxpp.MpmdMesh((stages,))
    step = jaxpp.place(train_step_of(scheduled, optimizer), mesh, donate_argnums=(0, 1))
    programs, programs_s = timed(lambda: step.lower(*state, tokens))
    figures["placed"] = {"trace and lower": programs_s}
    if _COMPILE.value:
        figures["plain"]["compile"] = timed(lowered.compile)[1]
        figures["placed"]["compile"] = timed(programs.compile)[1]

    transforms = {
        "forward": loss_fn,
        "stages": staged,
        "gradients": differentiated,
        "microbatch": looped,
        "schedule": scheduled,
    }
    known = 0.0
    figures["transforms"] = {}
    for name, fun in transforms.items():
        whole = timed(lambda: _jaxprs.trace(fun, (state[0], tokens)))[1]  # noqa: B023
        figures["transforms"][name], known = whole - known, whole
    before, *_ = programs.passes.values()
    figures["passes"] = {}
    for run in _lower_step.PASSES:
        before, figures["passes"][run.__name__] = timed(lambda: run(before))  # noqa: B023
    graph, figures["passes"]["task_graph"] = timed(lambda: _task_graph.build(before))
    figures["passes"]["lower"] = timed(lambda: _lower.lower(before, graph))[1]
    return figures


def report(figures: dict[str, Any]) -> str:
    """Writes the figures of a step: the ratio, then the parts in milliseconds."""
    whole = {name: sum(figures[name].values()) for name in ("plain", "placed")}
    lines = [f"placed {whole['placed'] / whole['plain']:.2f} of plain"]
    for name, parts in figures.items():
        written = ", ".join(f"{part} {1e3 * seconds:.0f}" for part, seconds in parts.items())
        lines.append(f"  {name} {1e3 * sum(parts.values()):.0f} ms: {written}")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise SystemExit(f"unexpected arguments: {argv[1:]}")
    jax.config.update("jax_num_cpu_devices", _STAGES.value)
    measure(_STAGES.value, 2)  # JAX's own first uses
    for layers in map(int, _LAYERS.value):
        for microbatches in map(int, _MICROBATCHES.value):
            print(f"{layers} layers, {microbatches} microbatches:", end=" ")
            print(report(measure(layers, microbatches)), flush=True)


if __name__ == "__main__":
    app.run(main)
