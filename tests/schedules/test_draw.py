"""Drawings show every task once, where it runs."""

import matplotlib.image
import pytest

from jaxpp.schedules import (
    Interleaved1F1B,
    OneFOneB,
    Table,
    Timeline,
    ZeroBubbleH1,
    plot,
    simulate,
    to_text,
)


@pytest.mark.parametrize("schedule", [OneFOneB(), Interleaved1F1B(2), ZeroBubbleH1()], ids=repr)
def test_text_has_each_task_in_its_column(schedule):
    table = schedule.table(4 * schedule.stages_per_rank, 12)
    lines = to_text(table).splitlines()
    width = max(len(word) for word in lines[0].split("|")[1].split())
    several = schedule.stages_per_rank > 1
    shown = [line.split("| ")[1] for line in lines]
    for span in simulate(table).spans:
        label = str(span.task) if several else f"{span.task.kind}{span.task.microbatch}"
        start = round(span.start) * (width + 1)
        assert shown[span.rank][start : start + width].rstrip() == label
    words = [word for row in shown for word in row.split() if word[0] not in ".="]
    assert len(words) == len(table.tasks)


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


EMPTY = Timeline(Table(((), ()), 0, 0), ((), ()), ((), ()))


@pytest.mark.parametrize("nothing", [{}, EMPTY, {"a": EMPTY}])
def test_plot_refuses_to_draw_nothing(tmp_path, nothing):
    with pytest.raises(ValueError, match="plot needs timelines that have tasks"):
        plot(nothing, tmp_path / "nothing.png")
