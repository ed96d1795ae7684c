"""Drawings in the terminal show every task where it runs, within their width."""

import collections
import io
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpp.schedules import (
    Costs,
    DualPipe,
    Interleaved1F1B,
    OneFOneB,
    Table,
    Timeline,
    ZeroBubbleH1,
    simulate,
    to_text,
)

SCHEDULES = [OneFOneB(), Interleaved1F1B(2), ZeroBubbleH1()]


def plain(text):
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def chart(text):
    """The columns of each line of a rank."""
    return [
        line.split("| ", 1)[1] for line in text.splitlines() if re.match(r"rank +\d|  +\|", line)
    ]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_text_has_each_task_in_its_column(schedule):
    table = schedule.table(4 * schedule.stages_per_rank, 12)
    lines = to_text(table, colour=False, width=1000).splitlines()
    width = max(len(word) for word in lines[0].split("|")[1].split())
    several = schedule.stages_per_rank > 1
    shown = [line.split("| ")[1] for line in lines]
    for span in simulate(table, Costs(per="stage")).spans:
        label = str(span.task) if several else f"{span.task.kind}{span.task.microbatch}"
        start = round(span.start) * (width + 1)
        assert shown[span.rank][start : start + width].rstrip() == label
    words = [word for row in shown for word in row.split() if word[0] not in ".="]
    assert len(words) == len(table.tasks)


@given(
    st.sampled_from([*SCHEDULES, DualPipe()]),
    st.integers(1, 6),
    st.integers(1, 20),
    st.integers(30, 150),
    st.booleans(),
    st.sampled_from([1.0, 0.7, 3.0, 1e-4, 1e5]),
)
def test_no_line_is_wider_than_asked(schedule, half, m, width, colour, forward):
    p, m = (2 * half, 4 * half + 2 * m) if isinstance(schedule, DualPipe) else (half, m)
    timeline = simulate(schedule.table(p * schedule.stages_per_rank, m), Costs(forward=forward))
    lines = plain(to_text(timeline, colour=colour, width=width)).splitlines()
    assert all(len(line) <= width for line in lines)
    assert len(lines) <= 2 * p + 1 + 9  # the legend


@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(1, 12), st.integers(40, 200), st.sampled_from([1.0, 1.3]))
def test_colour_changes_no_column(p, m, width, forward):
    timeline = simulate(ZeroBubbleH1().table(p, m), Costs(forward=forward))
    coloured = to_text(timeline, colour=True, width=width)
    if "▌" in coloured or "a column is" in coloured:
        return  # two columns a character there
    black = to_text(timeline, colour=False, width=width)
    rows = [row.replace("=", " ").replace(".", " ").rstrip() for row in chart(black)]
    assert [row.rstrip() for row in chart(plain(coloured))] == rows


@pytest.mark.parametrize("schedule", [OneFOneB(), ZeroBubbleH1()], ids=repr)
@pytest.mark.parametrize("width", [60, 100, 137])
def test_where_tasks_do_not_fit_each_kind_has_its_share_of_the_columns(schedule, width):
    timeline = simulate(schedule.table(16, 64))
    rows = chart(to_text(timeline, colour=False, width=width))
    columns = len(rows[0])
    assert len(rows) == 16 and columns > width - 12
    for rank, row in enumerate(rows):
        time = collections.defaultdict(float)
        for span in timeline.spans:
            if span.rank == rank:
                time[str(span.task.kind)] += span.end - span.start
        for kind, busy in time.items():
            assert abs(row.count(kind) - busy / timeline.makespan * columns) < 2


def test_halves_of_characters_show_twice_the_columns():
    lines = to_text(OneFOneB().table(16, 64), colour=True, width=130).splitlines()
    assert len(lines) == 18
    assert all(len(plain(line)) <= 130 for line in lines)
    # 237 units of time in 119 characters: rank 15 begins in the 16th half, the right one.
    last = plain(lines[15]).split("| ")[1]
    assert last[:7] == " " * 7 and last[7] == "▐"
    assert "a column" in lines[-1]


def test_a_pair_that_overlaps_is_on_two_lines():
    table = DualPipe().table(4, 8)
    rows = chart(to_text(table, colour=False, width=500))
    assert len(rows) == 8
    for rank, order in enumerate(table.ranks):
        above, below = rows[2 * rank], rows[2 * rank + 1].ljust(len(rows[2 * rank]))
        for first, second in zip(order, order[1:], strict=False):
            if first in table.overlaps:
                assert above.index(str(first)) == below.index(str(second))
        shown = re.findall(r"[FBIW]\d\.\d", above + below)
        assert sorted(shown) == sorted(map(str, order))
    assert len(chart(to_text(simulate(table, overlap="none"), colour=False, width=500))) == 4


def test_timelines_share_one_axis():
    table = ZeroBubbleH1().table(4, 4)
    simulated = simulate(table, Costs(1.5, 1.5, 1.5))
    slow = simulate(table, Costs(3.0, 3.0, 3.0))
    measured = Timeline(table, slow.starts, slow.ends)  # knows no gates
    text = to_text({"measured": measured, "simulated": simulated}, colour=False, width=100)
    rows = chart(text)
    assert "measured: makespan 45, bubble 20.0%" in text
    assert len(rows) == 8
    assert abs(len(rows[0].rstrip(".")) - 2 * len(rows[4].rstrip("."))) <= 2
    assert text.count("time   |") == 1


def test_numbers_of_later_stages_or_lower_case():
    table = Interleaved1F1B(2).table(4, 2)
    assert "F3.1" in to_text(table, colour=False, width=200)
    small = to_text(table, colour=False, width=30)
    assert "lower case: a later stage of the rank" in " ".join(small.split())
    assert sum(row.count("f") for row in chart(small)) == 4


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stdout", "environment", "coloured"),
    [
        (Terminal, {}, True),
        (io.StringIO, {}, False),
        (Terminal, {"NO_COLOR": "1"}, False),
        (Terminal, {"NO_COLOR": ""}, True),
        (io.StringIO, {"FORCE_COLOR": "1"}, True),
        (io.StringIO, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        (Terminal, {"TERM": "dumb"}, False),
    ],
)
def test_colour_where_stdout_is_a_terminal(monkeypatch, stdout, environment, coloured):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", stdout())
    assert ("\x1b[" in to_text(OneFOneB().table(2, 2))) == coloured


def test_the_width_is_that_of_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    lines = to_text(OneFOneB().table(4, 16), colour=False).splitlines()
    assert 40 < max(map(len, lines)) <= 50


def test_an_empty_table_has_empty_lines():
    assert to_text(Table(((), ()), 0, 0), colour=False) == "rank 0 |\nrank 1 |"
    assert to_text({}, colour=False) == ""
