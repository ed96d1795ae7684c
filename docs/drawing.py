"""Boxes, arrows and words in one style, of which the `draw_*.py` draw the pictures of the pages."""

import os
import pathlib
from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from jaxpp.schedules import Kind

INK, GREY, PALE, PAPER = "#222222", "#6b6b6b", "#f1f1f1", "#ffffff"
#: A colour for each stage or rank, told apart by those who do not see red and green, too.
STAGES = ("#dbe7f6", "#fdebc8", "#dff0e0", "#f3dfe8")
EDGES = ("#3b6cb0", "#b9821b", "#3d8b4d", "#a3325f")


class Picture:
    """A page of `width` x `height` points, x to the right and y down from the upper left corner."""

    def __init__(self, width: float, height: float) -> None:
        self._figure = Figure(figsize=(width / 72, height / 72))
        self._axes = self._figure.add_axes((0, 0, 1, 1))
        self._axes.set(xlim=(0, width), ylim=(height, 0))
        self._axes.axis("off")

    def box(
        self,
        at: tuple[float, float, float, float],
        text: str = "",
        *,
        fill: str = PAPER,
        edge: str = GREY,
        ink: str = INK,
        size: float = 9,
        bold: bool = False,
        dashed: bool = False,
        round_by: float = 3,
    ) -> None:
        """Draws a box at x, y with a width and a height, and a text in its middle."""
        x, y, width, height = at
        style = f"round,pad=0,rounding_size={round_by}"
        line = (0, (4, 3)) if dashed else "solid"
        patch = FancyBboxPatch(
            (x, y),
            width,
            height,
            style,
            facecolor=fill,
            edgecolor=edge,
            linestyle=line,
            linewidth=1,
        )
        self._axes.add_patch(patch)
        self.text(
            x + width / 2, y + height / 2, text, size=size, bold=bold, ink=ink, align="center"
        )

    def task(self, at: tuple[float, float, float, float], kind: Kind, text: str) -> None:
        """Draws a task in the colour of its kind."""
        ink = INK if kind is Kind.W else PAPER
        self.box(at, text, fill=kind.colours[0], edge=PAPER, ink=ink, size=8.5, round_by=0)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 9,
        bold: bool = False,
        ink: str = INK,
        align: str = "left",
        code: bool = False,
    ) -> None:
        """Writes a text whose middle is at the height y."""
        weight, family = ("bold" if bold else "normal"), ("DejaVu Sans Mono" if code else None)
        self._axes.text(
            x,
            y,
            text,
            fontsize=size,
            weight=weight,
            family=family,
            color=ink,
            ha=align,
            va="center",
        )

    def arrow(
        self,
        start: tuple[float, float],
        end: tuple[float, float],
        *,
        ink: str = GREY,
        bend: float = 0,
        width: float = 1.1,
        head: float = 7,
    ) -> None:
        """Draws an arrow; `bend` is that of an arc, as a share of its length."""
        arrow = FancyArrowPatch(
            start,
            end,
            arrowstyle=f"-|>,head_length={head / 2},head_width={head / 4}",
            connectionstyle=f"arc3,rad={bend}",
            color=ink,
            linewidth=width,
            shrinkA=0,
            shrinkB=0,
            mutation_scale=1,
        )
        self._axes.add_patch(arrow)

    def line(self, points: Sequence[tuple[float, float]], *, ink: str = GREY) -> None:
        """Draws a thin line through some points."""
        self._axes.plot(*zip(*points, strict=True), color=ink, linewidth=0.8)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the picture as an SVG file."""
        save(self._figure, path)


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Writes a figure as an SVG file, whose bytes are the same each time; texts stay texts."""
    with mpl.rc_context({"svg.hashsalt": "jaxpp", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def beside(script: str, name: str) -> pathlib.Path:
    """Gives the path of a file in the folder of a script."""
    return pathlib.Path(script).with_name(name)
