"""Notebooks show values of schedules: a picture, or a table."""

import sys
from xml.etree import ElementTree

import pytest

from jaxpp.schedules import (
    Costs,
    DualPipe,
    GPipe,
    Kind,
    OneFOneB,
    Table,
    Task,
    compare,
    simulate,
    synthesize,
)

TABLE = OneFOneB().table(2, 3)
SHOWN = {
    "table": TABLE,
    "timeline": simulate(TABLE),
    "synthesis": synthesize(Costs(), (0, 1), 3, split_backward=False),
}


@pytest.mark.parametrize("value", SHOWN.values(), ids=SHOWN)
def test_a_notebook_shows_a_picture_with_each_task(value):
    paths = ElementTree.fromstring(value._repr_svg_()).iter("{http://www.w3.org/2000/svg}path")
    filled = [path for path in paths if "stroke: #ffffff" in path.get("style", "")]
    assert len(filled) == len(TABLE.tasks)


WRONG = Table(((Task(Kind.B, 0, 0), Task(Kind.F, 0, 0)),), 1, 1)


@pytest.mark.parametrize("table", [Table((), 0, 0), WRONG, GPipe().table(8, 64)])
def test_it_shows_the_text_of_a_table_with_no_task_or_no_end_or_too_many_tasks(table):
    assert table._repr_svg_() is None and len(repr(table)) < 80


def test_it_shows_the_text_without_matplotlib(monkeypatch):
    from jaxpp.schedules._drawing import _plot

    _plot._picture.cache_clear()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert SHOWN["timeline"]._repr_svg_() is None


def test_a_comparison_is_a_table_of_what_is_known():
    rows = compare({"1f1b": OneFOneB(), "<dual>": DualPipe()}, 2, 3)
    table = ElementTree.fromstring(rows._repr_html_())
    header, *cells = ([cell.text for cell in row] for row in table)
    assert header[:4] == ["schedule", "ranks", "microbatches", "reason"]
    assert header[-1] == "peak memory" and len(header) == 10
    assert [row[0] for row in cells] == ["1f1b", "<dual>"]
    assert cells[0][header.index("makespan")] == f"{simulate(TABLE).makespan:.4g}"
    assert cells[1][3] == rows[1].reason and cells[1][-1] is None
    assert "reason" not in compare({"1f1b": OneFOneB()}, 2, 3)._repr_html_()
