"""Draws `flow.svg`, what the ranks run and send in one step: run `python docs/draw_flow.py`."""

import dataclasses

import jax
import jax.numpy as jnp
from drawing import GREY, PALE, Picture, beside

import jaxpp
from jaxpp._program import Program, Receive, Run, Send
from jaxpp.schedules import Kind, OneFOneB

_LANES, _ROW, _UNIT, _LEFT = (58, 152), 34, 39.0, 56
_TIMES = {"F": 1.0, "B": 1.7}


@dataclasses.dataclass
class _Rank:
    """A rank that the drawing follows: its program, the next instruction, and its clock."""

    program: Program
    at: int = 0
    clock: float = 0.0
    waits_for: tuple[int, ...] = ()


def main() -> None:
    """Draws the programs of a step of two ranks and three microbatches, as they run."""

    def loss(w, x):
        return jnp.mean((jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0])) @ w[1]) ** 2)

    grad = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss)), 3)
    grad = jaxpp.schedule(grad, OneFOneB())

    def step(w, x):
        value, grads = grad(w, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value

    placed = jaxpp.place(step, jaxpp.MpmdMesh((2,), devices=[jax.devices()[0]] * 2))
    programs = placed.lower([jnp.eye(4)] * 2, jnp.ones((6, 4))).programs
    picture = Picture(752, 238)
    picture.text(_LEFT, 16, "one step, as the two programs run it", bold=True)
    picture.text(
        _LEFT,
        34,
        "an arrow is a message; the program behind the boxes is what as_text() shows",
        ink=GREY,
        size=8.5,
    )
    for n, y in enumerate(_LANES):
        picture.text(10, y + _ROW / 2, f"rank {n}")
        picture.box((_LEFT, y, 684, _ROW), fill=PALE, edge=PALE, round_by=0)
    _run(picture, [_Rank(program) for program in programs])
    y = 212
    for n, (kind, text) in enumerate([(Kind.F, "an activation"), (Kind.B, "its gradient")]):
        picture.arrow((_LEFT + 120 * n, y), (_LEFT + 120 * n + 26, y), ink=kind.colours[0])
        picture.text(_LEFT + 120 * n + 32, y, text, size=8.5)
    picture.box((_LEFT + 240, y - 7, 26, 14), round_by=2)
    around = "around the loop: slices of the batch, zeros to add to, the optimizer"
    picture.text(_LEFT + 273, y, around, size=8.5)
    picture.save(beside(__file__, "flow.svg"))


def _run(picture: Picture, ranks: list[_Rank]) -> None:
    """Goes through the programs as the ranks do, and draws each run and each message."""
    sent: dict[int, tuple[float, float]] = {}  # by tag, where and when a message starts
    left = True
    while left:
        left = False
        for n, rank in enumerate(ranks):
            while rank.at < len(rank.program.instructions):
                instruction = rank.program.instructions[rank.at]
                match instruction:
                    case Receive(message=message):
                        if message.tag not in sent:
                            break
                        rank.clock = max(rank.clock, sent[message.tag][0] + 0.55)
                        rank.waits_for += (message.tag,)
                    case Send(message=message):
                        sent[message.tag] = rank.clock, _LANES[n]
                    case Run():
                        _draw(picture, n, rank, instruction, sent)
                rank.at, left = rank.at + 1, True


def _draw(
    picture: Picture, n: int, rank: _Rank, run: Run, sent: dict[int, tuple[float, float]]
) -> None:
    time = _TIMES.get(run.label[0], 1.45)
    x, y, width = _LEFT + _UNIT * rank.clock, _LANES[n], _UNIT * time
    if run.task:
        picture.task((x, y, width, _ROW), run.task.kind, run.label)
    else:
        picture.box((x + 1, y, width - 2, _ROW), run.label, size=8, round_by=2)
    for tag in rank.waits_for:
        start, lane = sent[tag]
        down = lane < y
        ends = (lane + _ROW, y) if down else (lane, y + _ROW)
        kind = Kind.F if down else Kind.B
        picture.arrow((_LEFT + _UNIT * start - 4, ends[0]), (x + 6, ends[1]), ink=kind.colours[0])
    rank.clock, rank.waits_for = rank.clock + time, ()


if __name__ == "__main__":
    main()
