"""Runs a program twice, as plain JAX and as a pipeline, and compares all that can be seen of it."""

import contextlib
import dataclasses
import pathlib
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxpp
from tests.programs import build, events, steps
from tests.programs.program import Call, Program

ROOT = pathlib.Path(jaxpp.__file__).parent

CONTEXTS = {
    "none": contextlib.nullcontext,
    "threefry_partitionable(False)": lambda: jax.threefry_partitionable(False),
    "threefry_partitionable(True)": lambda: jax.threefry_partitionable(True),
    "matmul_precision(highest)": lambda: jax.default_matmul_precision("highest"),
    "x64": lambda: jax.enable_x64(True),
    "numpy_rank_promotion(warn)": lambda: jax.numpy_rank_promotion("allow"),
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a program.

    `verdict` is `"ok"`, `"refused"` (an error of ours that says what to do), `"failed"`, or
    `"invalid"` where plain JAX itself does not run it. `kind` is the same for alike failures.
    """

    verdict: str
    kind: str = ""
    message: str = ""


class Difference(AssertionError):
    """Something that differs from the plain step: what kind of thing, and how."""

    def __init__(self, kind: str, message: str):
        super().__init__(f"{kind}: {message}")
        self.kind = kind


def run(program: Program) -> Outcome:
    """Runs a program and says what came of it."""
    before = jax.config.jax_traceback_filtering  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_traceback_filtering", "off")  # so that errors of JAX are told from ours
    try:
        return _run(program)
    finally:
        jax.config.update("jax_traceback_filtering", before)


def _run(program: Program) -> Outcome:
    try:
        wanted = _run_plain(program)
    except Exception as error:
        return Outcome("invalid", _kind_of(error), _text_of(error))
    try:
        _run_placed(program, wanted)
    except Difference as difference:
        return Outcome("failed", difference.kind, str(difference))
    except Exception as error:
        return Outcome(verdict_on(error), _kind_of(error), _text_of(error))
    return Outcome("ok")


@dataclasses.dataclass
class _Seen:
    """What could be seen of a call."""

    results: Any
    types: Any
    events: list


def _call(step, program: Program, state: Any, call: Call, number: int) -> tuple[Any, _Seen]:
    with CONTEXTS[call.context]():
        data = build.make_data(program, number, call.examples)
        with events.recorded() as happened:
            state, seen = step(*state, data) if program.flat else step(state, data)
            jax.block_until_ready((state, seen))
        types = jax.tree.map(
            lambda x: (x.shape, str(x.dtype), getattr(x, "weak_type", False)), (state, seen)
        )
        values = jax.tree.map(_to_numpy, (state, seen))
    return state, _Seen(values, types, happened)


def _to_numpy(x) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    x = np.asarray(x)
    return x.astype(np.float32) if x.dtype == jnp.bfloat16 else x


def _run_plain(program: Program) -> list[_Seen]:
    plain = jax.jit(steps.make_step(program, steps.plain_loops(program)))
    state, seen = steps.make_state(program), []
    for number, call in enumerate(program.calls):
        state, one = _call(plain, program, state, call, number)
        seen.append(one)
    return seen


def _placed(program: Program) -> Any:
    devices = jax.devices("cpu")
    devices = devices[:1] * program.ranks if program.shared else devices[: program.ranks]
    mesh = jaxpp.MpmdMesh((program.ranks,), devices=devices)
    donated = () if not program.donated else (0, 1, 2) if program.flat else (0,)
    step = steps.make_step(program, steps.pipelined_loops(program))
    return jaxpp.place(step, mesh, donate_argnums=donated)


def lower(program: Program) -> Any:
    """The placed step of a program, lowered for its first call; nothing is compiled."""
    call = program.calls[0]
    with CONTEXTS[call.context]():
        state, data = steps.make_state(program), build.make_data(program, 0, call.examples)
        return _placed(program).lower(*(state if program.flat else (state,)), data)


def _run_placed(program: Program, wanted: list[_Seen]) -> None:
    placed = _placed(program)
    state = steps.make_state(program)
    for number, (call, want) in enumerate(zip(program.calls, wanted, strict=True)):
        state, got = _call(placed, program, state, call, number)
        _compare(program, f"call {number}", got, want)


# ---- comparison ---------------------------------------------------------------------------------


def _tolerance(program: Program) -> float:
    names = {op.name for op in program.operations()}
    half = program.half_weights or names & {"half_precision", "make_half"}
    half = half or any(o.kind == "half" for o in program.outputs)
    return 5e-2 if half else 2e-4


def _compare(program: Program, where: str, got: _Seen, want: _Seen) -> None:
    tolerance = _tolerance(program)
    if jax.tree.structure(got.results) != jax.tree.structure(want.results):
        raise Difference("structure", f"{where}: {jax.tree.structure(got.results)}")
    is_type = lambda t: isinstance(t, tuple) and len(t) == 3 and isinstance(t[1], str)  # noqa: E731
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(want.results)]
    ours, theirs = (jax.tree.leaves(s.types, is_leaf=is_type) for s in (got, want))
    for path, x, y in zip(paths, ours, theirs, strict=True):
        for what, a, b in zip(("shape", "dtype", "weak type"), x, y, strict=True):
            if a != b:
                raise Difference(what, f"{where}{path}: {a}, wanted {b}")
    ours, theirs = jax.tree.leaves(got.results), jax.tree.leaves(want.results)
    for path, x, y in zip(paths, ours, theirs, strict=True):
        if wrong := _differs(x, y, tolerance):
            raise Difference("value", f"{where}{path}: {wrong}")
    _compare_events(program, where, got.events, want.events)


def _differs(x: np.ndarray, y: np.ndarray, tolerance: float) -> str:
    if x.shape != y.shape:
        return f"shape {x.shape}, wanted {y.shape}"
    if not np.issubdtype(y.dtype, np.inexact):
        return "" if np.array_equal(x, y) else f"{x.tolist()}, wanted {y.tolist()}"
    scale = np.max(np.abs(y[np.isfinite(y)]), initial=0.0)
    if np.allclose(x, y, rtol=0, atol=tolerance * scale + 1e-6, equal_nan=True):
        return ""
    return f"{np.ravel(x)[:6].tolist()}, wanted {np.ravel(y)[:6].tolist()}"


def _compare_events(program: Program, where: str, got: list, want: list) -> None:
    tolerance = _tolerance(program)
    has_refs = any(op.name == "reference" for op in program.operations())
    tags = sorted({tag for tag, _ in [*got, *want]})
    for tag in tags:
        ours, theirs = ([v for t, v in log if t == tag] for log in (got, want))
        if not ours and tag.startswith("backward") and has_refs:
            continue  # JAX differentiates what passes a ref, though it depends on no parameter
        if len(ours) != len(theirs):
            raise Difference(
                f"effects: {_family(tag)}",
                f"{where}: {tag!r} happened {len(ours)} times, wanted {len(theirs)}",
            )
        if tag != "ordered":  # in any order: that of their first values
            ours, theirs = (sorted(log, key=lambda v: v[:1].tolist()) for log in (ours, theirs))
        if "outside" in program.loops and tag.startswith("backward"):
            continue  # a cotangent: what divides the sum by the number of microbatches comes later
        for x, y in zip(ours, theirs, strict=True):
            if wrong := _differs(x, y, tolerance):
                raise Difference(f"effects: {_family(tag)}", f"{where}: {tag!r} saw {wrong}")


def _family(tag: str) -> str:
    return tag.rstrip("0123456789 ")


# ---- errors -------------------------------------------------------------------------------------


def _innermost(error: BaseException) -> str:
    """The innermost line of ours that an error went through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if pathlib.Path(f.filename).is_relative_to(ROOT)]
    frame = (ours or frames)[-1]
    return f"{pathlib.Path(frame.filename).name}:{frame.name}"


def verdict_on(error: Exception) -> str:
    """An error that we raise ourselves, on purpose, refuses the program."""
    frames = traceback.extract_tb(error.__traceback__)
    raised_here = pathlib.Path(frames[-1].filename).is_relative_to(ROOT)
    tells = isinstance(error, ValueError) and len(str(error)) > 60
    return "refused" if raised_here and tells else "failed"


def _kind_of(error: Exception) -> str:
    return f"{type(error).__name__} in {_innermost(error)}"


def _text_of(error: Exception) -> str:
    return str(error)[:400]
