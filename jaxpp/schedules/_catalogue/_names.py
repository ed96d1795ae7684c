"""The schedules by their names on a command line."""

import ast
import functools
import importlib
import inspect
import re
import types
from collections.abc import Callable, Mapping
from typing import Any

from jaxpp.schedules._base import Schedule
from jaxpp.schedules._catalogue._chimera import Chimera
from jaxpp.schedules._catalogue._dualpipe import DualPipe, DualPipeV
from jaxpp.schedules._catalogue._forward_only import ForwardOnly
from jaxpp.schedules._catalogue._gpipe import GPipe
from jaxpp.schedules._catalogue._hanayo import Hanayo
from jaxpp.schedules._catalogue._interleaved import Interleaved1F1B
from jaxpp.schedules._catalogue._interleaved_zero_bubble import InterleavedZeroBubble
from jaxpp.schedules._catalogue._one_f_one_b import Eager1F1B, OneFOneB
from jaxpp.schedules._catalogue._pipe_offload import GIS
from jaxpp.schedules._catalogue._seq1f1b import Seq1F1B
from jaxpp.schedules._catalogue._v_blocks import OneFOneBV, VHalf, VMin
from jaxpp.schedules._catalogue._zero_bubble import ZeroBubbleH1, ZeroBubbleH2
from jaxpp.schedules._catalogue._zero_bubble_v import ZeroBubbleV

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

#: The schedules that `register` has named.
_REGISTERED: dict[str, Callable[..., Schedule]] = {}


def register(name: str, make: Callable[..., Schedule]) -> None:
    """Names a schedule of your own, for `by_name` and the command lines that use it.

    Args:
      name: its name; letters, digits and underscores, for a command line.
      make: the class, or a function that makes the schedule from its knobs.

    Raises:
      ValueError: the name is taken, or is no such name.

    >>> register("looped_bfs_4", functools.partial(GPipe, stages_per_rank=4))
    >>> by_name("looped_bfs_4")
    GPipe(stages_per_rank=4)
    """
    if not re.fullmatch(r"\w+", name):
        raise ValueError(
            f"the name of a schedule has letters, digits and underscores, got {name!r}."
        )
    if name in CATALOGUE or _REGISTERED.setdefault(name, make) is not make:
        raise ValueError(f"there is a schedule named {name!r} already; take another name.")


def by_name(name: str, **knobs: Any) -> Schedule:
    """Makes a schedule from its name, as it is written on a command line.

    Args:
      name: a key of `CATALOGUE`, a name that you gave to `register`, or `"package.module:Class"`.
        Knobs may follow in parentheses, as `"interleaved_1f1b(stages_per_rank=4)"`.
      **knobs: the fields of that schedule, such as `stages_per_rank`.

    Raises:
      ValueError: there is no such schedule, or it has no such knob.

    >>> by_name("kimi_k2", stages_per_rank=4)
    Interleaved1F1B(stages_per_rank=4, extra_warmup=1, group_size=None)
    >>> by_name("kimi_k2(stages_per_rank=4)") == _
    True
    >>> by_name("jaxpp.schedules:GPipe(stages_per_rank=2)")
    GPipe(stages_per_rank=2)
    """
    name, written = _read(name)
    knobs = written | knobs
    make = _find(name)
    if isinstance(make, Schedule) and not knobs:
        return make
    if not callable(make):
        raise ValueError(f"{name} is {make!r}; give a class, or a function that makes a schedule.")
    known = inspect.signature(make).parameters
    if unknown := [knob for knob in knobs if knob not in known]:
        has = f"its knobs are {', '.join(known)}" if known else "it has none"
        raise ValueError(f"the schedule {name!r} has no knob {unknown[0]!r}; {has}.")
    made = make(**knobs)
    if not isinstance(made, Schedule):
        raise ValueError(f"{name} makes {made!r}, which is no jaxpp.schedules.Schedule.")
    return made


def _read(text: str) -> tuple[str, dict[str, Any]]:
    """Reads a name, and the knobs in parentheses behind it."""
    if not isinstance(text, str):
        raise ValueError(
            f"a schedule is named by text, such as '1f1b', got {text!r}; name one of your own by "
            f"jaxpp.schedules.register, or as 'package.module:Class'."
        )
    name, parenthesis, _ = text.partition("(")
    if not parenthesis:
        return name, {}
    try:
        call = ast.parse(f"f({text[len(name) + 1 :]}", mode="eval").body
        assert isinstance(call, ast.Call) and not call.args
        return name, {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError, AssertionError):
        raise ValueError(
            f"{text!r} is no schedule; write its knobs by name, as "
            f"'interleaved_1f1b(stages_per_rank=4)'."
        ) from None


def _find(name: str) -> Any:
    """Finds a schedule by its name, or in the module that its name has."""
    if (make := CATALOGUE.get(name) or _REGISTERED.get(name)) is not None:
        return make
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(
            f"there is no schedule named {name!r}; use one of "
            f"{', '.join((*CATALOGUE, *_REGISTERED))}, or "
            f"'package.module:Class' for one of your own."
        )
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"there is no schedule {name!r}: {error}.") from error
