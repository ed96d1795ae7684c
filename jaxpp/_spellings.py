"""Names that people type: ours, imported when first asked for, and those of other systems."""

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from typing import Any

from jaxpp import schedules
from jaxpp.jaxprs import P, R

_OURS = {
    "Std1F1B": "jaxpp.schedules.OneFOneB()",
    "ZeroBubble": "jaxpp.schedules.ZeroBubbleH1()",
    "Schedule1F1B": "jaxpp.schedules.OneFOneB()",
    "ScheduleGPipe": "jaxpp.schedules.GPipe()",
    "ScheduleInterleaved1F1B": "jaxpp.schedules.Interleaved1F1B()",
    "ScheduleInterleavedZeroBubble": "jaxpp.schedules.InterleavedZeroBubble()",
    "ScheduleZBVZeroBubble": "jaxpp.schedules.ZeroBubbleV()",
    "ScheduleDualPipeV": "jaxpp.schedules.DualPipeV()",
    "treduce": "jaxpp.accumulate_grads, or jaxpp.microbatch and jaxpp.schedule",
    "treduce_i": "jaxpp.accumulate_grads over jnp.arange(length)",
    "mpmd_jit_with_loop": "jaxpp.pipelined(mesh=mesh), or jaxpp.place(step, mesh)",
    "mark_stage_end": "jaxpp.pipeline_enter_stage, where the next stage begins",
    "Add": 'reduce="sum"',
    "Max": 'reduce="max"',
    "Concat": 'reduce="stack"',
    "LoopOutput": 'reduce=("sum", "stack", "max", "last")',
    "pipe_split": "jaxpp.pipeline_enter_stage, of the value that crosses",
    "ArrayRef": "jaxpp.RemoteArray",
    "MpmdArray": "jaxpp.RemoteArray",
}

#: The same for arguments.
_ARGUMENTS = {
    "in_shardings": "in_specs of jaxpp.place, over the axes inside a rank; ranks are inferred",
    "out_shardings": "out_specs of jaxpp.place, over the axes inside a rank; ranks are inferred",
    "donate_argnames": "donate_argnums; an argument by keyword counts at its position",
    "static_argnames": "static_argnums; an argument by keyword counts at its position",
    "mpmd_mesh": "mesh",
    "operation": 'reduce, such as ("sum", "stack")',
    "out_axes": 'reduce, such as "mean" or "concat"',
}


def names_ours(fun: Callable[P, R]) -> Callable[P, R]:
    """Lets a function that is given another system's argument say which argument is ours."""
    own = inspect.signature(fun).parameters

    @functools.wraps(fun)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name in _ARGUMENTS and name not in own:
                raise TypeError(
                    f"{fun.__name__}() got an unexpected keyword argument {name!r}; use "
                    f"{_ARGUMENTS[name]}."
                )
        return fun(*args, **kwargs)

    return call


def ours_for(name: str) -> str:
    """Says what is used here for a name of another system; empty where it is not known."""
    if name in vars(schedules):
        return f"jaxpp.schedules.{name}, whose number of stages is read off the function"
    return _OURS.get(name, "")


def __getattr__(name: str) -> Any:
    package = sys.modules["jaxpp"]
    if not name.startswith("_"):
        if importlib.util.find_spec(f"jaxpp.{name}"):
            return importlib.import_module(f"jaxpp.{name}")
        vars(package).update(_public())
        if name in vars(package):
            return vars(package)[name]
    hint = f"; use {ours}." if (ours := ours_for(name)) else "."
    raise AttributeError(f"module 'jaxpp' has no attribute {name!r}{hint}", name=name, obj=package)


def __dir__() -> list[str]:
    return sorted({*vars(sys.modules["jaxpp"]), *_public()} - {"TYPE_CHECKING"})


def _public() -> dict[str, Any]:
    names = vars(importlib.import_module("jaxpp._names"))  # a worker process saves this second
    return {name: value for name, value in names.items() if not name.startswith("_")}
