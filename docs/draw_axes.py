"""Draws `axes.svg`, the axes of a mesh: run `python docs/draw_axes.py`."""

import numpy as np
from drawing import EDGES, GREY, STAGES, Picture, beside

_RANKS, _DATA, _MODEL = 4, 2, 2
_LEFT, _TOP, _SIDE, _GAP = 118, 84, 126, 32
_DEVICE = 52


def main() -> None:
    """Draws the devices of four ranks, each two by two, and what each axis splits."""
    devices = np.arange(_RANKS * _DATA * _MODEL).reshape(_RANKS, _DATA, _MODEL)
    picture = Picture(752, 318)
    picture.text(_LEFT, 16, 'MpmdMesh((4, 2, 2), ("mpmd", "data", "model"))', code=True, bold=True)
    picture.text(_LEFT, 38, "mpmd: a stage on each rank", bold=True, ink=EDGES[0])
    end = _LEFT + _RANKS * _SIDE + (_RANKS - 1) * _GAP
    picture.arrow((_LEFT + 170, 38), (end, 38), ink=EDGES[0])
    for rank in range(_RANKS):
        x = _LEFT + rank * (_SIDE + _GAP)
        picture.text(x + _SIDE / 2, 64, f"rank {rank}: stage {rank}", align="center")
        picture.box((x, _TOP, _SIDE, _SIDE), fill=STAGES[rank], edge=EDGES[rank])
        for row in range(_DATA):
            for column in range(_MODEL):
                at = (x + 8 + 58 * column, _TOP + 8 + 58 * row, _DEVICE, _DEVICE)
                text = f"device\n{devices[rank, row, column]}"
                picture.box(at, text, edge=EDGES[rank], size=8)
        if rank:
            picture.arrow((x - _GAP + 3, _TOP + 63), (x - 3, _TOP + 63), width=2, head=9)
    picture.text(10, _TOP + 4, "data:", bold=True, ink=EDGES[3])
    for row in range(_DATA):
        picture.text(10, _TOP + 28 + 58 * row, f"half {row} of the", size=8.5)
        picture.text(10, _TOP + 40 + 58 * row, "examples", size=8.5)
    picture.arrow((104, _TOP + 8), (104, _TOP + 118), ink=EDGES[3])
    below = _TOP + _SIDE
    picture.text(10, below + 22, "model:", bold=True, ink=EDGES[2])
    picture.arrow((_LEFT + 4, below + 8), (_LEFT + _SIDE - 4, below + 8), ink=EDGES[2])
    for column in range(_MODEL):
        x = _LEFT + 34 + 58 * column
        picture.text(x, below + 22, f"half {column} of", size=8.5, align="center")
        picture.text(x, below + 34, "the weights", size=8.5, align="center")
    said = [
        (EDGES[0], "over mpmd: an activation forward, its gradient back, for each microbatch"),
        (EDGES[3], "over data: the gradients are summed, once a step"),
        (EDGES[2], "over model: partial products are summed, in each layer"),
    ]
    picture.text(290, below + 24, "What crosses an axis", size=8.5, bold=True)
    for n, (ink, text) in enumerate(said):
        picture.text(290, below + 42 + 16 * n, text, size=8.5, ink=ink)
    picture.text(
        290,
        below + 92,
        "The code of the model names no axis; the specs of place do.",
        size=8.5,
        ink=GREY,
    )
    picture.save(beside(__file__, "axes.svg"))


if __name__ == "__main__":
    main()
