"""Names of other systems that people type here: the error names ours."""

from typing import Any

from jaxpp import schedules

_OURS = {
    "Std1F1B": "jaxpp.schedules.OneFOneB()",
    "Schedule1F1B": "jaxpp.schedules.OneFOneB()",
    "ScheduleGPipe": "jaxpp.schedules.GPipe()",
    "treduce": "jaxpp.accumulate_grads, or jaxpp.microbatch and jaxpp.schedule",
    "treduce_i": "jaxpp.accumulate_grads over jnp.arange(length)",
    "mpmd_jit_with_loop": "jaxpp.pipelined(mesh=mesh), or jaxpp.place(step, mesh)",
    "mark_stage_end": "jaxpp.pipeline_enter_stage, where the next stage begins",
    "Add": 'reduce="sum"',
    "Max": 'reduce="max"',
    "Concat": 'reduce="stack"',
    "LoopOutput": 'reduce=("sum", "stack", "max", "last")',
    "ArrayRef": "jaxpp.RemoteArray",
    "MpmdArray": "jaxpp.RemoteArray",
}


def __getattr__(name: str) -> Any:
    ours = _OURS.get(name)
    if name in vars(schedules):
        ours = f"jaxpp.schedules.{name}, whose number of stages is read off the function"
    hint = f"; use {ours}." if ours else "."
    raise AttributeError(f"module 'jaxpp' has no attribute {name!r}{hint}", name=name)
