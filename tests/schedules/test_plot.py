"""Pictures show every task once, where it runs."""

import random
import re
import subprocess
import sys
from typing import Any

import matplotlib.image
import pytest
from matplotlib.figure import Figure

from jaxpp.schedules import (
    Costs,
    DualPipe,
    Interleaved1F1B,
    Machine,
    OneFOneB,
    Table,
    Timeline,
    ZeroBubbleH1,
    plot,
    simulate,
    to_text,
    to_trace,
)
from jaxpp.schedules._drawing._styles import lay_out, num_slots, shade


def bars(path):
    """The (left, top, width, height, colour) of each rectangle of a task in an SVG."""
    found = re.findall(
        r'<path d="M ([\d.]+) ([\d.]+) \nL ([\d.]+) [\d.]+ \nL [\d.]+ ([\d.]+) \nL [^"]*z\n"'
        r'[^>]*style="fill: (#\w{6}); stroke: #ffffff',
        path.read_text(),
    )
    corners = [(*map(float, numbers), colour) for *numbers, colour in found]
    return [
        (min(x0, x1), min(y0, y1), abs(x1 - x0), abs(y1 - y0), colour)
        for x0, y0, x1, y1, colour in corners
    ]


@pytest.mark.parametrize(
    "timeline",
    [
        simulate(OneFOneB().table(4, 6), Costs(1.5, 2.0, 0.7)),
        simulate(Interleaved1F1B(2).table(6, 5)),
        simulate(DualPipe().table(4, 8)),
    ],
    ids=["1F1B", "interleaved", "DualPipe"],
)
def test_each_task_is_a_bar_of_its_colour_where_it_runs(tmp_path, timeline):
    plot(timeline, tmp_path / "chart.svg")
    drawn = bars(tmp_path / "chart.svg")
    rows = lay_out(timeline)
    cells = [(rank, cell) for rank, row in enumerate(rows) for cell in row]
    assert len(drawn) == len(cells)
    end = max(left + width for left, _, width, _, _ in drawn)
    begin = min(left for left, _, _, _, _ in drawn)
    unit = (end - begin) / timeline.makespan
    full = max(height for _, _, _, height, _ in drawn)
    row_of = sorted({round(top) for _, top, _, height, _ in drawn if height > 0.9 * full})
    for (rank, cell), (left, top, width, height, colour) in zip(cells, drawn, strict=True):
        assert left == pytest.approx(begin + unit * cell.span.start, abs=0.1)
        assert width == pytest.approx(unit * (cell.span.end - cell.span.start), abs=0.1)
        assert height == pytest.approx(full / cell.num_lanes, abs=0.1)
        assert top == pytest.approx(row_of[rank] + cell.lane * full / cell.num_lanes, abs=0.6)
        red, green, blue = shade(cell.span.task.kind, cell.slot, num_slots(rows))
        code = f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"
        assert colour == code


@pytest.mark.parametrize(("p", "m"), [(1, 1), (4, 8)])
def test_plot_writes_a_picture_with_colours(tmp_path, p, m):
    timelines = {
        repr(schedule): simulate(schedule.table(p * schedule.stages_per_rank, m))
        for schedule in (OneFOneB(), Interleaved1F1B(2), ZeroBubbleH1())
    }
    plot(timelines, tmp_path / "three.png")
    plot(timelines["OneFOneB()"], str(tmp_path / "one.png"))
    three = matplotlib.image.imread(tmp_path / "three.png")
    one = matplotlib.image.imread(tmp_path / "one.png")
    assert three.shape[0] > one.shape[0]
    assert three[..., :3].std() > 0.1


@pytest.mark.more
def test_memory_is_under_its_chart_and_timelines_may_be_side_by_side(tmp_path):
    table = ZeroBubbleH1().table(2, 4)
    simulated = simulate(table)
    measured = Timeline(table, simulated.starts, simulated.ends)  # knows no gates
    timelines = {"measured": measured, "simulated": simulated}
    sizes = {}
    for memory in (False, True):
        for beside in (False, True):
            path = tmp_path / f"{memory}{beside}.png"
            plot(timelines, path, memory=memory, side_by_side=beside, unit="ms")
            sizes[memory, beside] = matplotlib.image.imread(path).shape
    assert sizes[True, False][0] > sizes[False, False][0]
    assert sizes[True, True][0] > sizes[False, True][0]
    assert sizes[False, True][0] < sizes[False, False][0]
    plot(timelines, tmp_path / "chart.svg", side_by_side=True)
    lefts = [left for left, *_ in bars(tmp_path / "chart.svg")]
    one, other = lefts[: len(table.tasks)], lefts[len(table.tasks) :]
    assert max(one) < min(other)
    shift = other[0] - one[0]
    assert other == pytest.approx([left + shift for left in one], abs=0.1)  # one scale


EMPTY = Timeline(Table(((), ()), 0, 0), ((), ()), ((), ()))


@pytest.mark.parametrize("nothing", [{}, EMPTY, {"a": EMPTY}])
def test_plot_refuses_to_draw_nothing(tmp_path, nothing):
    with pytest.raises(ValueError, match="plot needs timelines that have tasks"):
        plot(nothing, tmp_path / "nothing.png")


def test_plot_returns_its_figure_and_draws_into_axes_of_ones_own(tmp_path):
    timeline = simulate(OneFOneB().table(2, 4))
    figure = plot(timeline)
    assert len(figure.axes) == 1 and not list(tmp_path.iterdir())
    assert figure._repr_svg_().startswith("<?xml")  # pyright: ignore[reportAttributeAccessIssue]
    own = Figure()
    left, right = own.subplots(1, 2)
    assert plot(timeline, ax=right) is own
    assert right.get_xlim() == (0, timeline.makespan) and not left.collections
    assert len(right.collections[0].get_paths()) == 8  # the tasks of a rank
    updated = simulate(OneFOneB().table(2, 4), machine=Machine(optimizer=2.0))
    plot(updated, ax=left)
    assert [bar.get_x() for bar in left.patches] == [ends[-1] for ends in updated.ends]
    assert {bar.get_width() for bar in left.patches} == {2.0}
    machine = Machine(gradient_bytes=6.0, reduction_bandwidth=2.0, optimizer=2.0)
    reduced = plot(simulate(OneFOneB().table(2, 4), machine=machine))
    bars: list[Any] = list(reduced.axes[0].patches)
    assert [bar.get_width() for bar in bars] == [3.0, 3.0, 2.0, 2.0]
    assert [bar.get_x() for bar in bars[2:]] == [bar.get_x() + 3.0 for bar in bars[:2]]
    (legend,) = reduced.legends
    assert {"reduction", "optimizer"} <= {text.get_text() for text in legend.texts}
    with pytest.raises(ValueError, match="one timeline without its memory into ax=, got 2"):
        plot({"a": timeline, "b": timeline}, ax=left)
    with pytest.raises(ValueError, match="got 1 and memory=True"):
        plot(timeline, ax=left, memory=True)


def test_tables_and_timelines_are_short_in_a_notebook():
    table = ZeroBubbleH1().table(8, 64)
    assert repr(table) == "Table(8 ranks, 8 stages, 64 microbatches)"
    timeline = simulate(table)
    assert repr(timeline) == (
        f"Timeline(Table(8 ranks, 8 stages, 64 microbatches), makespan={timeline.makespan:g})"
    )


@pytest.mark.more
def test_matplotlib_is_imported_by_who_draws_and_never_pyplot(tmp_path):
    program = (
        "import sys; from jaxpp.schedules import *; assert 'matplotlib' not in sys.modules;"
        "to_text(OneFOneB().table(2, 2)); assert 'matplotlib' not in sys.modules;"
        f"plot(simulate(OneFOneB().table(2, 2)), {str(tmp_path / 'x.png')!r}, memory=True);"
        "assert 'matplotlib' in sys.modules and 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_timelines_come_alone_or_by_title(tmp_path):
    timeline = simulate(OneFOneB().table(2, 2))
    mistakes: list[Any] = [[timeline], {"1F1B": timeline.table}, timeline.table]
    for wrong in mistakes:
        for draw in (plot, lambda given: to_trace(given, tmp_path / "timeline.json")):
            with pytest.raises(TypeError, match=r"several by title: .*simulate\(table\) makes"):
                draw(wrong)
    with pytest.raises(TypeError, match=r"several by title: .*got list"):  # it takes tables, too
        to_text(mistakes[0])


def axis(figure):
    """The label of the axis of time, and its last tick."""
    figure.canvas.draw()
    return figure.axes[-1].get_xlabel(), figure.axes[-1].get_xticklabels()[-1].get_text()


def test_a_picture_names_the_unit_of_time_and_takes_one_that_suits():
    table = OneFOneB().table(2, 4)
    assert axis(plot(simulate(table)))[0] == "time (unit of the costs)"
    assert axis(plot(simulate(table), unit="hours"))[0] == "time (hours)"
    milliseconds = simulate(table, Costs(1e-3, 1e-3, 1e-3, unit="s"))
    figure = plot({"measured": milliseconds})
    assert axis(figure) == ("time (ms)", "16")
    assert figure.axes[0].get_title("left") == "measured: makespan 15 ms, bubble 20.0%"
    assert "time s" in to_text(simulate(table, Costs(1.5e-6, unit="s")), colour=False)


def test_times_in_two_units_do_not_share_an_axis():
    table = OneFOneB().table(2, 4)
    both = {"of costs": simulate(table), "measured": simulate(table, Costs(1e-3, unit="s"))}
    message = "'of costs' is without a unit, 'measured' is in s; simulate with costs in the same"
    for draw in (plot, to_text, lambda both: to_trace(both, "x.json")):
        with pytest.raises(ValueError, match=message):
            draw(both)
    plot(both, unit="s")  # one who knows better says so


def test_a_picture_of_measured_times_is_no_wider_than_a_page(tmp_path):
    """A few tasks that take next to no time do not make all others wide."""
    draw = random.Random(0)
    times = {(kind, s, m): draw.choice([1e-6, *[2e-3] * 9]) for kind in "FB" for s in range(4)
             for m in range(16)}  # fmt: skip

    def time(task):
        return times[str(task.kind), task.stage, task.microbatch]

    timeline = simulate(OneFOneB().table(4, 16), Costs(forward=time, backward=time, unit="s"))
    plot({"measured": timeline}, tmp_path / "x.png")
    assert matplotlib.image.imread(tmp_path / "x.png").shape[1] <= 2300
