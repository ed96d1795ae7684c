"""The places of tasks in drawings."""

from hypothesis import given
from hypothesis import strategies as st

from jaxpp.schedules import DualPipe, Interleaved1F1B, Kind, Table, Task, Timeline, simulate
from jaxpp.schedules._drawing._styles import is_dark, lay_out, num_slots, shade


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), min_size=1, max_size=12))
def test_tasks_that_share_a_moment_share_the_height(times):
    tasks = tuple(Task(Kind.F, 0, n) for n in range(len(times)))
    starts = tuple(float(start) for start, _ in times)
    ends = tuple(float(start + time) for start, time in times)
    table = Table((tasks,), num_stages=1, num_microbatches=len(times))
    (cells,) = lay_out(Timeline(table, (starts,), (ends,)))
    assert {cell.span.task for cell in cells} == set(tasks)
    for a in cells:
        assert 0 <= a.lane < a.num_lanes
        together = [
            b for b in cells if b.span.start < a.span.end and a.span.start < b.span.end and b != a
        ]
        assert all(b.lane != a.lane and b.num_lanes == a.num_lanes for b in together)
        assert a.num_lanes > 1 or not together


def test_a_task_alone_has_the_whole_height():
    cells = lay_out(simulate(DualPipe().table(4, 8), overlap="none"))
    assert {cell.num_lanes for row in cells for cell in row} == {1}
    cells = lay_out(simulate(DualPipe().table(4, 8)))
    table = DualPipe().table(4, 8)
    halves = [cell for row in cells for cell in row if cell.num_lanes == 2]
    assert len(halves) == 2 * len(table.overlaps)
    assert {cell.span.task for cell in halves if cell.lane == 0} == table.overlaps


def test_stages_and_directions_of_a_rank_have_slots_of_their_own():
    for cells in lay_out(simulate(Interleaved1F1B(4).table(8, 4))):
        assert {(cell.slot, cell.span.task.stage // 2) for cell in cells} == {
            (n, n) for n in range(4)
        }
    table = DualPipe().table(4, 8)
    for cells in lay_out(simulate(table)):
        for cell in cells:
            assert cell.slot == table.direction_of[cell.span.task.microbatch]


def test_shades_differ_and_their_numbers_are_legible():
    for slots in (1, 2, 4):
        colours = [shade(kind, slot, slots) for kind in map(Kind, "FBIWR") for slot in range(slots)]
        assert len(set(colours)) == 5 * slots
        for colour in colours:
            text = 1.0 if is_dark(colour) else 0.0
            light = [_linear(part) for part in colour]
            luminance = 0.2126 * light[0] + 0.7152 * light[1] + 0.0722 * light[2]
            low, high = sorted((luminance, text))
            assert (high + 0.05) / (low + 0.05) > 3.0  # WCAG 2.1, 1.4.3, for large text


def _linear(part):
    return part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4


def test_slots_of_an_empty_timeline():
    empty = Timeline(Table(((), ()), 0, 0), ((), ()), ((), ()))
    assert num_slots(lay_out(empty)) == 1
