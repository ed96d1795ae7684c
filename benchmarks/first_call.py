"""Measures the first call of a placed step over that of `jax.jit` for the plain step.

    python -m benchmarks.first_call
    python -m benchmarks.first_call --cases=4x16 --repeats=1 --parts
    python -m benchmarks.first_call --cases=2x8 --microbatches=8 --replicas=2 --noreadme

A case is a number of ranks and of layers of a transformer in plain functions (a list of dicts),
with AdamW and clipping by the global norm; then comes the model of the README. Each step is traced,
lowered and compiled, with empty caches, and the medians are printed: of the wall clock, and of the
process's CPU time, which other processes disturb less. Nothing is run. `--parts` also prints, for
the placed step, the time of each further transform, and of each pass of `place`. `--replicas=2`
gives each rank two devices, and also prints how much longer lowering takes than without replicas:
by the clocks, and by the number of function calls, which other processes do not change.
"""

import cProfile
import dataclasses
import functools
import pstats
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from absl import app, flags
from jax.sharding import PartitionSpec

import jaxpp
from benchmarks.equal_blocks import train_step_of
from jaxpp import jaxprs
from jaxpp.runtime.executor._compile import clear_cache
from jaxpp.transforms.graph import assign, lower
from jaxpp.transforms.place import _build_graph, _lower_step

_CASES = flags.DEFINE_list("cases", ["4x16", "8x32", "16x64"], "Ranks x layers.")
_README = flags.DEFINE_bool("readme", True, "Whether to measure the README's model, too.")
_MICROBATCHES = flags.DEFINE_integer("microbatches", 0, "Microbatches; 0 for two a rank.", 0)
_REPLICAS = flags.DEFINE_integer("replicas", 1, "Replicas, with devices of their own.", 1)
_REPEATS = flags.DEFINE_integer("repeats", 3, "Measurements, of which the median is printed.", 1)
_WIDTH = flags.DEFINE_integer("width", 64, "Features of a position.")
_PARTS = flags.DEFINE_bool("parts", False, "Whether to print the time of each transform and pass.")

_CONTEXT, _VOCABULARY, _HEADS = 32, 64, 4


# ---- a transformer in plain functions -----------------------------------------------------------


def init(layers: int, width: int) -> dict[str, Any]:
    keys = iter(jax.random.split(jax.random.key(0), 4 * layers + 3))

    def draw(*shape: int) -> jax.Array:
        return 0.02 * jax.random.normal(next(keys), shape)

    def norm() -> dict[str, jax.Array]:
        return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}

    def layer() -> dict[str, Any]:
        weights = {"qkv": draw(width, 3 * width), "out": draw(width, width)}
        weights |= {"up": draw(width, 4 * width), "down": draw(4 * width, width)}
        return {"before": norm(), "between": norm(), **weights}

    ends = {"embed": draw(_VOCABULARY, width), "positions": draw(_CONTEXT, width)}
    ends |= {"norm": norm(), "head": draw(width, _VOCABULARY)}
    return {"layers": [layer() for _ in range(layers)], **ends}


def normalized(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return (
        x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5) * params["scale"] + params["bias"]
    )


def block(params: dict[str, Any], x: jax.Array) -> jax.Array:
    batch, length, width = x.shape

    def heads(x: jax.Array) -> jax.Array:
        return x.reshape(batch, length, _HEADS, width // _HEADS).swapaxes(1, 2)

    q, k, v = map(heads, jnp.split(normalized(params["before"], x) @ params["qkv"], 3, -1))
    scores = q @ k.swapaxes(-1, -2) / jnp.sqrt(width // _HEADS)
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    mixed = (jax.nn.softmax(scores) @ v).swapaxes(1, 2).reshape(batch, length, width)
    x = x + mixed @ params["out"]
    return x + jax.nn.gelu(normalized(params["between"], x) @ params["up"]) @ params["down"]


def transformer_loss(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    x = params["embed"][tokens[:, :-1]] + params["positions"]
    for layer in params["layers"]:
        x = block(layer, x)
    logits = normalized(params["norm"], x) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


# ---- cases --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its optimizer, and the pipeline that it is placed on."""

    loss_fn: Callable[..., jax.Array]
    model: Any
    batch: Any
    optimizer: optax.GradientTransformation
    ranks: int
    microbatches: int
    schedule: Any
    replicas: int = 1

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.model, self.optimizer.init(eqx.filter(self.model, eqx.is_array)), self.batch

    def transforms(self) -> dict[str, Callable]:
        """The function under each further transform."""
        staged = jaxpp.wrap_forward(jaxpp.split_stages(self.loss_fn, self.ranks))
        differentiated = eqx.filter_value_and_grad(staged)
        looped = jaxpp.microbatch(differentiated, self.microbatches, replicas=self.replicas)
        return {
            "forward": self.loss_fn,
            "stages": staged,
            "gradients": differentiated,
            "microbatch": looped,
            "schedule": jaxpp.schedule(looped, self.schedule),
        }

    def placed(self) -> Any:
        step = train_step_of(self.transforms()["schedule"], self.optimizer)
        if self.replicas == 1:
            return jaxpp.place(step, jaxpp.MpmdMesh((self.ranks,)), donate_argnums=(0, 1))
        mesh = jaxpp.MpmdMesh((self.ranks, self.replicas), ("mpmd", "data"))
        specs = (None, None, PartitionSpec("data"))
        return jaxpp.place(step, mesh, donate_argnums=(0, 1), in_specs=specs)


def transformer(ranks: int, layers: int, microbatches: int = 0) -> Case:
    microbatches = microbatches or 2 * ranks
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    replicas = _REPLICAS.value
    tokens = jnp.zeros((2 * microbatches * replicas, _CONTEXT + 1), jnp.int32)
    model = init(layers, _WIDTH.value)
    schedule = jaxpp.schedules.OneFOneB()
    return Case(transformer_loss, model, tokens, optimizer, ranks, microbatches, schedule, replicas)


def of_the_readme() -> Case:
    def loss_fn(model, batch):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    model = eqx.nn.MLP(4, 1, width_size=64, depth=7, key=jax.random.key(0))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))
    batch = jnp.ones((64, 4)), jnp.ones((64, 1))
    schedule = jaxpp.schedules.ZeroBubbleH1()
    return Case(loss_fn, model, batch, optimizer, 4, 8, schedule)


# ---- measurements -------------------------------------------------------------------------------


def timed(run: Callable[[], Any]) -> tuple[Any, tuple[float, float]]:
    """Gives a function's result, and its seconds by the wall clock and of the CPU."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = run()
    return result, (time.perf_counter() - wall, time.process_time() - cpu)


def calls(case: Case) -> int:
    """Counts the function calls of lowering a step, with empty caches."""
    arguments, profile = jax.block_until_ready(case.arguments), cProfile.Profile()
    forget()
    profile.runcall(lambda: case.placed().lower(*arguments))
    return pstats.Stats(profile).total_calls  # pyright: ignore[reportAttributeAccessIssue]


def measure(case: Case) -> tuple[dict[str, tuple[float, float]], int]:
    """Gives the seconds of each part of both first calls, and the number of computations."""
    arguments = jax.block_until_ready(case.arguments)
    arrays, static = eqx.partition(arguments, eqx.is_array)
    plain = train_step_of(eqx.filter_value_and_grad(case.loss_fn), case.optimizer)
    jitted = jax.jit(
        lambda state, batch: eqx.filter(plain(*eqx.combine((*state, batch), static)), eqx.is_array),
        donate_argnums=0,
    )
    seconds = {}
    forget()
    traced, trace_s = timed(lambda: jitted.trace(arrays[:2], arrays[2]))
    lowered, lower_s = timed(traced.lower)
    seconds["plain, to lower"] = trace_s[0] + lower_s[0], trace_s[1] + lower_s[1]
    seconds["plain, to compile"] = timed(lowered.compile)[1]
    forget()
    programs, seconds["placed, to lower"] = timed(lambda: case.placed().lower(*arguments))
    seconds["placed, to compile"] = timed(programs.compile)[1]
    if case.replicas > 1:
        alone = dataclasses.replace(case, replicas=1)
        forget()
        seconds["without replicas, to lower"] = timed(lambda: alone.placed().lower(*arguments))[1]
    return seconds, len(programs.bundle.computations)


def forget() -> None:
    """Forgets all that has been traced and compiled."""
    jax.clear_caches()
    clear_cache()


def report(name: str, case: Case) -> str:
    """Measures a case, and writes its ratios, then the seconds of the parts."""
    found = [measure(case) for _ in range(_REPEATS.value)]
    seconds = {
        part: tuple(statistics.median(own[part][clock] for own, _ in found) for clock in (0, 1))
        for part in found[0][0]
    }

    def ratio(clock: int, *parts: str) -> float:
        placed, plain = (
            sum(seconds[f"{who}, {part}"][clock] for part in parts) for who in ("placed", "plain")
        )
        return placed / plain

    lines = [
        f"{name}: {found[0][1]} computations; placed over plain, by the wall clock (CPU time):"
    ]
    for what, parts in {
        "first call": ("to lower", "to compile"), "trace and lower": ("to lower",)
    }.items():  # fmt: skip
        lines.append(f"  {what} {ratio(0, *parts):.2f} ({ratio(1, *parts):.2f})")
    if case.replicas > 1:
        wall, cpu = (
            seconds["placed, to lower"][clock] / seconds["without replicas, to lower"][clock]
            for clock in (0, 1)
        )
        counted = calls(case) / calls(dataclasses.replace(case, replicas=1))
        lines.append(f"  lowering with replicas over without {wall:.2f} ({cpu:.2f})")
        lines.append(f"  by function calls {counted:.2f}")
    lines += [f"  {part} {wall:.2f} s ({cpu:.2f} s)" for part, (wall, cpu) in seconds.items()]
    return "\n".join(lines)


def parts(case: Case) -> str:
    """Writes the CPU time of each transform and of each pass, in milliseconds."""
    model, _, batch = arguments = case.arguments
    found, known = {}, 0.0
    for name, fun in case.transforms().items():
        jax.clear_caches()
        whole = timed(lambda: jaxprs.trace(fun, (model, batch)))[1][1]  # noqa: B023
        found[name], known = whole - known, whole
    programs = case.placed().lower(*arguments)
    before, *_ = programs.passes.values()
    for run in _lower_step.PASSES:
        before, (_, found[run.__name__]) = timed(lambda: run(before))  # noqa: B023
    graph, (_, found["task_graph"]) = timed(lambda: _build_graph.build(before))
    found["lower"] = timed(lambda: lower(before, graph, assign(before, graph)))[1][1]
    return "  " + ", ".join(f"{name} {1e3 * seconds:.0f}" for name, seconds in found.items())


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise SystemExit(f"unexpected arguments: {argv[1:]}")
    sizes = [tuple(map(int, case.split("x"))) for case in _CASES.value]
    devices = max([4, *(ranks * _REPLICAS.value for ranks, _ in sizes)])
    jax.config.update("jax_num_cpu_devices", devices)
    measure(transformer(2, 2))  # JAX's own first uses
    cases: dict[str, Callable[[], Case]] = {
        f"{ranks} ranks, {layers} layers": functools.partial(
            transformer, ranks, layers, _MICROBATCHES.value
        )
        for ranks, layers in sizes
    }
    if _README.value:
        cases["README"] = of_the_readme
    for name, make in cases.items():
        print(report(name, make()), flush=True)
        if _PARTS.value:
            print(parts(make()), flush=True)


if __name__ == "__main__":
    app.run(main)
