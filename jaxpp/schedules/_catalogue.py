"""The schedules by their names on a command line."""

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

from jaxpp.schedules._base import Schedule
from jaxpp.schedules._building_blocks import OneFOneBV, VHalf, VMin
from jaxpp.schedules._chimera import Chimera
from jaxpp.schedules._dualpipe import DualPipe, DualPipeV
from jaxpp.schedules._forward_only import ForwardOnly
from jaxpp.schedules._gpipe import GPipe
from jaxpp.schedules._hanayo import Hanayo
from jaxpp.schedules._interleaved import Interleaved1F1B
from jaxpp.schedules._interleaved_zero_bubble import InterleavedZeroBubble
from jaxpp.schedules._one_f_one_b import Eager1F1B, OneFOneB
from jaxpp.schedules._pipe_offload import GIS
from jaxpp.schedules._seq1f1b import Seq1F1B
from jaxpp.schedules._zero_bubble import ZeroBubbleH1, ZeroBubbleH2
from jaxpp.schedules._zero_bubble_v import ZeroBubbleV

CATALOGUE: Mapping[str, Callable[..., Schedule]] = types.MappingProxyType(
    {
        "forward_only": ForwardOnly,
        "gpipe": GPipe,
        "1f1b": OneFOneB,
        "eager_1f1b": Eager1F1B,
        "interleaved_1f1b": Interleaved1F1B,
        "looped_bfs": functools.partial(GPipe, stages_per_rank=2),
        "kimi_k2": functools.partial(Interleaved1F1B, extra_warmup=1),
        "gis": GIS,
        "interleaved_zb": InterleavedZeroBubble,
        "zb_h1": ZeroBubbleH1,
        "zb_h2": ZeroBubbleH2,
        "zb_v": ZeroBubbleV,
        "v_half": VHalf,
        "v_min": VMin,
        "1f1b_v": OneFOneBV,
        "dualpipe": DualPipe,
        "dualpipe_v": DualPipeV,
        "chimera": Chimera,
        "hanayo": Hanayo,
        "seq1f1b": Seq1F1B,
    }
)


def by_name(name: str, **knobs: Any) -> Schedule:
    """Makes a schedule from its name in `CATALOGUE`.

    Args:
      name: a key of `CATALOGUE`.
      **knobs: the fields of that schedule, such as `stages_per_rank`.

    Raises:
      ValueError: there is no such schedule, or it has no such knob.

    >>> by_name("kimi_k2", stages_per_rank=4)
    Interleaved1F1B(stages_per_rank=4, extra_warmup=1, group_size=None)
    """
    if name not in CATALOGUE:
        raise ValueError(f"there is no schedule named {name!r}; use one of {', '.join(CATALOGUE)}.")
    make = CATALOGUE[name]
    known = inspect.signature(make).parameters
    if unknown := [knob for knob in knobs if knob not in known]:
        has = f"its knobs are {', '.join(known)}" if known else "it has none"
        raise ValueError(f"the schedule {name!r} has no knob {unknown[0]!r}; {has}.")
    return make(**knobs)
