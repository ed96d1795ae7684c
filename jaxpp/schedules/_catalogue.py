"""The schedules by the name that a command line gives them."""

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

from jaxpp.schedules._base import Schedule
from jaxpp.schedules._forward_only import ForwardOnly
from jaxpp.schedules._gpipe import GPipe
from jaxpp.schedules._interleaved import Interleaved1F1B
from jaxpp.schedules._one_f_one_b import Eager1F1B, OneFOneB
from jaxpp.schedules._zero_bubble import ZeroBubbleH1

CATALOGUE: Mapping[str, Callable[..., Schedule]] = types.MappingProxyType(
    {
        "forward_only": ForwardOnly,
        "gpipe": GPipe,
        "1f1b": OneFOneB,
        "eager_1f1b": Eager1F1B,
        "interleaved_1f1b": Interleaved1F1B,
        "zb_h1": ZeroBubbleH1,
    }
)


def by_name(name: str, **knobs: Any) -> Schedule:
    """Makes a schedule from its name in `CATALOGUE`.

    Args:
      name: a key of `CATALOGUE`.
      **knobs: the fields of that schedule, such as `stages_per_rank`.

    Raises:
      ValueError: there is no such schedule, or it has no such knob.

    >>> by_name("interleaved_1f1b", stages_per_rank=4)
    Interleaved1F1B(stages_per_rank=4)
    """
    if name not in CATALOGUE:
        raise ValueError(f"there is no schedule named {name!r}; use one of {', '.join(CATALOGUE)}.")
    make = CATALOGUE[name]
    known = inspect.signature(make).parameters
    if unknown := [knob for knob in knobs if knob not in known]:
        has = f"its knobs are {', '.join(known)}" if known else "it has none"
        raise ValueError(f"the schedule {name!r} has no knob {unknown[0]!r}; {has}.")
    return make(**knobs)
