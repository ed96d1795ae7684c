"""Draws `words.svg`, what the words of the field mean: run `python docs/draw_words.py`."""

from drawing import EDGES, GREY, PALE, STAGES, Picture, beside

from jaxpp.schedules import Kind, OneFOneB, simulate

_RANKS, _MICROBATCHES, _LAYERS = 4, 4, 2
_TOP, _ROW = 118, 42  # of the rows of the ranks
_START, _UNIT = 330, 25.4  # of the time


def main() -> None:
    """Draws a batch, a model in stages, the ranks that run them, and the tasks of each rank."""
    picture = Picture(752, 336)
    _draw_batch(picture)
    _draw_stages(picture)
    _draw_tasks(picture)
    picture.save(beside(__file__, "words.svg"))


def _draw_batch(picture: Picture) -> None:
    picture.text(16, 16, "a batch of 64 examples, in 4 microbatches", bold=True)
    for n in range(_MICROBATCHES):
        box = (16 + 106 * n, 28, 100, 24)
        picture.box(box, f"{n}: rows {16 * n} to {16 * n + 15}", fill=PALE, size=8.5)
    picture.text(446, 40, "each goes through all stages, one after the other", ink=GREY, size=8.5)


def _draw_stages(picture: Picture) -> None:
    picture.text(16, 82, "a model, in 4 stages", bold=True)
    picture.text(188, 82, "4 ranks", bold=True)
    picture.text(16, 98, "a slice of its layers each", ink=GREY, size=8.5)
    picture.text(188, 98, "a program and its device", ink=GREY, size=8.5)
    for n in range(_RANKS):
        y = _TOP + _ROW * n
        picture.box((16, y, 134, _ROW - 8), fill=STAGES[n], edge=EDGES[n])
        picture.text(24, y + 17, f"stage {n}", size=8.5)
        for layer in range(_LAYERS):
            box = (68 + 40 * layer, y + 6, 36, _ROW - 20)
            picture.box(box, f"layer {_LAYERS * n + layer}", edge=EDGES[n], size=7)
        picture.arrow((153, y + 17), (185, y + 17))
        picture.box((188, y, 116, _ROW - 8), f"rank {n}: device {n}", fill=STAGES[n], edge=EDGES[n])
        if n:
            picture.arrow((42, y - 8), (42, y), ink=EDGES[n - 1])


def _draw_tasks(picture: Picture) -> None:
    picture.text(_START, 82, "each rank's tasks", bold=True)
    picture.text(_START, 98, "time runs to the right; a number is a microbatch", ink=GREY, size=8.5)
    timeline = simulate(OneFOneB().table(_RANKS, _MICROBATCHES))
    end = _START + _UNIT * timeline.makespan / 1.3
    unit = (end - _START) / timeline.makespan
    for n in range(_RANKS):
        y = _TOP + _ROW * n
        picture.box((_START, y, end - _START, _ROW - 8), fill=PALE, edge=PALE, round_by=0)
    at = {}
    for span in timeline.spans:
        task = span.task
        x, y = _START + unit * span.start, _TOP + _ROW * span.rank
        box = (x, y, unit * (span.end - span.start), _ROW - 8)
        picture.task(box, task.kind, str(task.microbatch))
        at[str(task)] = (x + box[2] / 2, y, y + _ROW - 8)
    _explain(picture, at, unit)


def _explain(picture: Picture, at: dict[str, tuple[float, float, float]], unit: float) -> None:
    """Names some tasks, and the bubble, under the rows."""
    below = _TOP + _ROW * _RANKS
    idle = _START + 1.5 * unit, _TOP + _ROW * 3 + 17
    said = [
        (idle, (_START + 4, below + 20), "the bubble: a rank waits", "for its first input"),
        (
            (at["F3.1"][0], at["F3.1"][2]),
            (_START + 158, below + 20),
            "a task: the forward of",
            "stage 3 for microbatch 1",
        ),
        (
            (at["B3.3"][0], at["B3.3"][2]),
            (_START + 400, below + 20),
            "a task: its backward,",
            "for microbatch 3",
        ),
    ]
    for (x, y), (text_x, text_y), *lines in said:
        picture.line([(x, y), (x, text_y - 9)])
        for n, line in enumerate(lines):
            picture.text(min(text_x, x), text_y + 12 * n, line, size=8.5)
    for n, (kind, text) in enumerate([(Kind.F, "forward"), (Kind.B, "backward")]):
        y = below + 14 + 18 * n
        picture.box((16, y, 22, 11), fill=kind.colours[0], edge=kind.colours[0], round_by=0)
        picture.text(44, y + 6, text, size=8.5)
    picture.box((126, below + 14, 22, 11), fill=PALE, edge=GREY, round_by=0)
    picture.text(154, below + 20, "idle: the rank waits", size=8.5)


if __name__ == "__main__":
    main()
