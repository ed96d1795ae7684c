"""Draws `transforms_*.svg`, a function before and after: run `python docs/draw_transforms.py`."""

import collections
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from drawing import EDGES, GREY, PALE, STAGES, Picture, beside

import jaxpp
from jaxpp.schedules import Kind, OneFOneB

_BOX, _GAP = 19, 11  # the height of an equation's box, and that of the arrow to the next
_WIDTH = 150
#: What an equation is called in a picture.
_NAMES = {"dot_general": "x @ w", "integer_pow": "square", "reduce_sum": "sum", "div": "/ count"}
_TOP = 62


def loss(w: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    """The function that is transformed: two layers."""
    return jnp.mean((jnp.tanh(x @ w[0]) @ w[1]) ** 2)


def main() -> None:
    """Draws what each transform makes of a function, from the jaxprs that they give."""
    args = [jnp.eye(4)] * 2, jnp.ones((8, 4))
    staged = jaxpp.split_stages(loss, num_stages=2)
    wrapped = jaxpp.wrap_forward(staged)
    grad = jax.grad(wrapped)
    looped = jaxpp.microbatch(grad, 2)
    scheduled = jaxpp.schedule(looped, OneFOneB())
    jaxpr = {f: jax.make_jaxpr(f)(*args).jaxpr for f in (loss, staged, wrapped, grad, looped)}
    _draw_split_stages(jaxpr[loss], jaxpr[staged])
    _draw_wrap_forward(jaxpr[staged], jaxpr[wrapped], jaxpr[grad])
    _draw_microbatch(jaxpr[grad], jaxpr[looped])
    _draw_schedule(jaxpr[looped], jax.make_jaxpr(scheduled)(*args).jaxpr)


def _name(eqn: Any) -> str:
    return _NAMES.get(eqn.primitive.name, eqn.primitive.name)


def _chain(
    picture: Picture, x: float, y: float, eqns: Sequence[Any], stage: int | None = None
) -> float:
    """Draws equations one below the other, and gives the height of the last one's end."""
    for n, eqn in enumerate(eqns):
        mark = eqn.primitive.name == "pipeline_enter_stage"
        if n:
            picture.arrow((x + _WIDTH / 2, y - _GAP), (x + _WIDTH / 2, y))
        fill, edge = (STAGES[1], EDGES[1]) if mark else (PALE, GREY)
        if stage is not None:
            fill, edge = "#ffffff", EDGES[stage]
        text = f"enter stage {eqn.params['stage']}" if mark else _name(eqn)
        picture.box((x, y, _WIDTH, _BOX), text, fill=fill, edge=edge, dashed=mark, bold=mark)
        y += _BOX + _GAP
    return y - _GAP


def _heading(picture: Picture, x: float, width: float, title: str, below: str) -> None:
    picture.text(x + width / 2, 18, title, bold=True, align="center", code=True, size=9)
    picture.text(x + width / 2, 36, below, ink=GREY, align="center", size=8.5)


def _draw_split_stages(before: Any, after: Any) -> None:
    picture = Picture(520, 290)
    _heading(picture, 40, _WIDTH, "f", "equations")
    _chain(picture, 40, _TOP, before.eqns)
    picture.arrow((225, 150), (295, 150), width=2, head=10)
    _heading(picture, 330, _WIDTH, "split_stages(f, 2)", "the same, with a mark at the cut")
    _chain(picture, 330, _TOP, after.eqns)
    picture.save(beside(__file__, "transforms_split_stages.svg"))


def _calls(jaxpr: Any) -> Iterator[tuple[int, bool, list[Any]]]:
    """Gives for each call of a stage its number, whether it is a backward, and its equations."""
    seen: collections.Counter[str] = collections.Counter()
    for eqn in jaxpr.eqns:
        name = eqn.params.get("name", "")
        if not name.startswith("pipeline_stage"):
            continue
        own = [e for e in eqn.params["jaxpr"].eqns if e.primitive.name != "stage_edge"]
        yield int(name.split("_")[2]), bool(seen[name]), own
        seen[name] += 1


def _draw_wrap_forward(before: Any, after: Any, grad: Any) -> None:
    picture = Picture(752, 352)
    _heading(picture, 20, _WIDTH, "split_stages(f, 2)", "equations and a mark")
    _chain(picture, 20, _TOP, before.eqns)
    picture.arrow((182, 150), (218, 150), width=2, head=10)
    _heading(picture, 230, _WIDTH + 20, "wrap_forward(...)", "a call for each stage")
    y = float(_TOP)
    for stage, _, eqns in _calls(after):
        y = _call(picture, 230, y, stage, f"forward of stage {stage}", eqns)
    picture.arrow((412, 150), (448, 150), width=2, head=10)
    picture.text(430, 134, "grad", align="center", code=True, size=8.5)
    _heading(picture, 460, 280, "grad(wrap_forward(...))", "a forward and a backward call for each")
    tops, heights = {}, {}
    for stage, backward, eqns in _calls(grad):
        x, y = (610 if backward else 460), _TOP if (stage == 0) else _TOP + 150
        kind = Kind.B if backward else Kind.F
        picture.box((x, y, 126, 96), fill=STAGES[stage], edge=EDGES[stage])
        box = (x + 8, y + 8, 110, 20)
        picture.task(box, kind, f"{'backward' if backward else 'forward'} of {stage}")
        names = dict.fromkeys(_name(e) for e in eqns if e.primitive.name != "transpose")
        shown = [n for n in names if n in ("x @ w", "tanh", "square", "mul")]
        picture.text(x + 63, y + 70, ", ".join(shown), align="center", size=8)
        tops[stage, backward], heights[stage, backward] = (x, y), 96
    first, last = tops[0, False], tops[1, False]
    back_last, back_first = tops[1, True], tops[0, True]
    picture.arrow((first[0] + 63, first[1] + 96), (last[0] + 63, last[1]), ink=EDGES[0])
    picture.text(first[0] + 70, first[1] + 123, "activation", size=8)
    picture.arrow((back_last[0] + 63, back_last[1]), (back_first[0] + 63, back_first[1] + 96))
    picture.text(back_last[0] + 70, back_last[1] - 27, "its gradient", size=8)
    for stage in (0, 1):
        (x, y), (to, _) = tops[stage, False], tops[stage, True]
        picture.arrow((x + 126, y + 48), (to, y + 48), ink=EDGES[stage])
    picture.text(
        600,
        _TOP + 96 + 150 + 22,
        "across: the residuals, which the backward reads",
        ink=GREY,
        align="center",
        size=8.5,
    )
    picture.save(beside(__file__, "transforms_wrap_forward.svg"))


def _call(
    picture: Picture, x: float, y: float, stage: int, title: str, eqns: Sequence[Any]
) -> float:
    """Draws a call of a stage around its equations, and gives the height of the next call."""
    height = 30 + len(eqns) * (_BOX + _GAP)
    if stage:
        picture.arrow((x + _WIDTH / 2 + 10, y - 14), (x + _WIDTH / 2 + 10, y))
    picture.box((x, y, _WIDTH + 20, height), fill=STAGES[stage], edge=EDGES[stage])
    picture.text(x + 10, y + 13, title, size=8.5, bold=True)
    _chain(picture, x + 10, y + 26, eqns, stage)
    return y + height + 14


def _tasks(picture: Picture, x: float, y: float, jaxpr: Any, suffix: str = "") -> None:
    """Draws the calls of the stages as a row of tasks."""
    for n, (stage, backward, _) in enumerate(_calls(jaxpr)):
        kind = Kind.B if backward else Kind.F
        box = (x + 46 * n, y, 40, 26)
        picture.task(box, kind, f"{kind}{stage}{suffix}")
        if n:
            picture.arrow((x + 46 * n - 6, y + 13), (x + 46 * n, y + 13), head=5)


def _body(jaxpr: Any) -> Any:
    """Finds the jaxpr with the calls of the stages inside the loop of microbatch."""
    (scan,) = (e for e in jaxpr.eqns if e.primitive.name == "scan")
    body = scan.params["jaxpr"].jaxpr
    (remat,) = (
        e for e in body.eqns if "remat" in e.primitive.name or e.primitive.name == "checkpoint"
    )
    return remat.params["jaxpr"]


def _draw_microbatch(before: Any, after: Any) -> None:
    picture = Picture(620, 210)
    _heading(picture, 20, 190, "g = grad(...)", "the whole batch at once")
    picture.box((20, 92, 190, 44), fill=PALE)
    _tasks(picture, 26, 101, before)
    picture.text(115, 152, "8 rows", ink=GREY, align="center", size=8.5)
    picture.arrow((225, 114), (275, 114), width=2, head=10)
    _heading(picture, 290, 310, "microbatch(g, 2)", "a loop over slices of the batch")
    picture.box((290, 58, 310, 120), fill=PALE)
    (scan,) = (e for e in after.eqns if e.primitive.name == "scan")
    picture.text(300, 72, f"{scan.primitive.name}, {scan.params['length']} times:", size=8.5)
    picture.text(300, 90, "4 rows", ink=GREY, size=8.5)
    _tasks(picture, 300, 101, _body(after))
    picture.box((500, 101, 90, 26), "add to sums", size=8.5)
    picture.arrow((478, 114), (500, 114))
    picture.line([(545, 127), (545, 152), (320, 152)])
    picture.arrow((320, 152), (320, 127))
    picture.text(432, 163, "the next slice, in the same memory", ink=GREY, align="center", size=8.5)
    picture.text(445, 192, "after the loop: the mean", ink=GREY, align="center", size=8.5)
    picture.save(beside(__file__, "transforms_microbatch.svg"))


def _draw_schedule(before: Any, after: Any) -> None:
    picture = Picture(720, 226)
    _heading(picture, 20, 210, "microbatch(g, 2)", "a loop; its body in order")
    picture.box((20, 78, 210, 60), fill=PALE)
    picture.text(30, 90, "scan:", size=8.5)
    _tasks(picture, 36, 102, _body(before))
    picture.arrow((245, 108), (295, 108), width=2, head=10)
    _heading(
        picture,
        320,
        380,
        "schedule(..., OneFOneB())",
        "a loop of tasks, and a table of their order",
    )
    (loop,) = (e for e in after.eqns if e.primitive.name == "pipeline_loop")
    table = OneFOneB().table(2, 2)
    picture.box((320, 58, 380, 134), fill=PALE)
    picture.text(330, 72, f"{loop.primitive.name}:", size=8.5)
    for row, order in enumerate(table.ranks):
        y = 92 + 46 * row
        picture.text(330, y + 13, f"rank {row}", size=8.5)
        for n, task in enumerate(order):
            picture.task((380 + 62 * n + 20 * row, y, 52, 26), task.kind, str(task))
            if n:
                at = 380 + 62 * n + 20 * row
                picture.arrow((at - 10, y + 13), (at, y + 13), head=5)
    picture.text(
        510,
        208,
        "F1.0: the forward of stage 1 for microbatch 0",
        ink=GREY,
        align="center",
        size=8.5,
    )
    picture.save(beside(__file__, "transforms_schedule.svg"))


if __name__ == "__main__":
    main()
