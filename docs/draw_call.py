"""Draws `call.svg`, the functions that a call goes through: run `python docs/draw_call.py`."""

from collections.abc import Callable
from typing import Any

from drawing import GREY, PALE, STAGES, Picture, beside

from jaxpp.runtime.executor import Dispatcher
from jaxpp.runtime.remote._group import WorkerGroup
from jaxpp.runtime.site._array import Handles, RemoteArray
from jaxpp.runtime.site._process import Process
from jaxpp.runtime.site._rank import Rank
from jaxpp.runtime.site._step import RemoteStep

_LEFT, _WIDTH, _HEIGHT = 118, 752, 250
#: The middle of each lane: a thread, and whose it is.
_LANES = {"driver": 64, "fetches": 132, "steps": 200}
_NAMES = {
    "driver": ("driver", "the user's thread"),
    "steps": ("worker", "lane of steps"),
    "fetches": ("worker", "lane of fetches"),
}


def main() -> None:
    """Draws the two halves of a call: its dispatch, and the fetch of a result."""
    picture = Picture(_WIDTH, _HEIGHT)
    picture.text(_LEFT, 16, "value = step(params, batch)", bold=True, code=True)
    picture.text(496, 16, "float(value)", bold=True, code=True)
    for lane, y in _LANES.items():
        picture.box((_LEFT - 6, y - 24, _WIDTH - _LEFT, 48), fill=PALE, edge=PALE, round_by=0)
        name, thread = _NAMES[lane]
        picture.text(10, y - 7, name, bold=True)
        picture.text(10, y + 8, thread, ink=GREY, size=8)
    assert vars(Process.run)["lane"] == "steps" and vars(Process.fetch)["lane"] == "fetches"
    call = _box(picture, "driver", 0, RemoteStep.__call__)
    send = _box(picture, "driver", 1, WorkerGroup.send_steps)
    run = _box(picture, "steps", 1, Process.run)
    feed = _box(picture, "steps", 2, Rank.feed)
    dispatch = _box(picture, "steps", 3, Dispatcher.run)
    keep = _box(picture, "steps", 4, Rank.take_results)
    read = _box(picture, "driver", 3, RemoteArray.__array__)
    fetch = _box(picture, "driver", 4, Handles.fetch)
    serve = _box(picture, "fetches", 4, Process.fetch)
    for before, after in [(call, send), (run, feed), (feed, dispatch), (dispatch, keep)]:
        picture.arrow(before["right"], after["left"])
    picture.arrow(read["right"], fetch["left"])
    picture.arrow(send["below"], run["above"])
    picture.arrow(fetch["below"], serve["above"])
    picture.arrow(keep["above"], serve["below"])
    picture.text(send["below"][0] + 8, 98, "one Call, by Ray", ink=GREY, size=8)
    picture.text(
        _LEFT, 237, "Handles go from rank to rank by the transport, never through Ray.", size=8.5
    )
    picture.save(beside(__file__, "call.svg"))


def _box(
    picture: Picture, lane: str, column: int, function: Callable[..., Any]
) -> dict[str, tuple[float, float]]:
    """Draws a function in a lane; gives the middles of its sides."""
    owner, _, name = function.__qualname__.rpartition(".")
    x, y = _LEFT + 4 + 126 * column, _LANES[lane]
    fill = STAGES[list(_LANES).index(lane)]
    picture.box((x, y - 17, 112, 34), fill=fill)
    picture.text(x + 56, y - 6, owner, size=7.5, align="center", ink=GREY)
    picture.text(x + 56, y + 7, name, size=8.5, align="center", code=True)
    return {
        "left": (x, y),
        "right": (x + 112, y),
        "above": (x + 56, y - 17),
        "below": (x + 56, y + 17),
    }


if __name__ == "__main__":
    main()
