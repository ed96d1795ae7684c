"""The simulator: a second one agrees with it, and what it reports is what its spans say."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpp.schedules import (
    Costs,
    GPipe,
    Kind,
    Memory,
    OneFOneB,
    Recompute,
    ScheduleError,
    Table,
    Task,
    Timeline,
    ZeroBubbleH1,
    check,
    simulate,
)
from tests.schedules import naive
from tests.schedules.catalogue import tables

MODES = st.sampled_from(["atomic", "free", "none"])


def task(text: str) -> Task:
    stage, microbatch = text[1:].split(".")
    return Task(Kind(text[0]), int(stage), int(microbatch))


def table(*ranks: str, stages: int = 2, microbatches: int = 1, overlaps: str = "") -> Table:
    return Table(
        tuple(tuple(task(word) for word in rank.split()) for rank in ranks),
        stages,
        microbatches,
        overlaps=frozenset(map(task, overlaps.split())),
    )


@st.composite
def with_overlaps(draw) -> Table:
    """Tables in which tasks overlap that no schedule of the catalogue would put together."""
    sound = draw(tables(max_microbatches=8))
    pairs = [pair for order in sound.ranks for pair in zip(order, order[1:], strict=False)]
    chosen = draw(st.lists(st.sampled_from(pairs), max_size=6)) if pairs else []
    for first, _ in chosen:
        more = dataclasses.replace(sound, overlaps=sound.overlaps | {first})
        try:
            check(more)
        except ScheduleError:
            continue
        sound = more
    return sound


def some_costs(draw_times: st.DataObject, own: Table) -> Costs:
    """Whole numbers, so that sums are exact, for each task and for each link."""
    random = draw_times.draw(st.randoms(use_true_random=False))
    times = {task: float(random.randint(1, 9)) for task in sorted(own.tasks, key=str)}
    ranks = range(own.num_ranks)
    latency = {(a, b): float(random.randint(0, 5)) for a in ranks for b in ranks}
    bandwidth = {(a, b): random.choice([0.5, 1.0, 2.0]) for a in ranks for b in ranks}
    size = {task: float(random.randint(0, 5)) for task in times}
    return Costs(
        forward=times.__getitem__,
        input_grad=times.__getitem__,
        weight_grad=times.__getitem__,
        backward=times.__getitem__,
        recompute=times.__getitem__,
        latency=lambda a, b: latency[a, b],
        bandwidth=lambda a, b: bandwidth[a, b],
        edge_bytes=size.__getitem__,
    )


@given(with_overlaps(), MODES, st.data())
def test_a_second_simulator_agrees(own, overlap, data):
    costs = some_costs(data, own)
    timeline = simulate(own, costs, overlap=overlap)
    expected = naive.simulate(own, costs.of, costs.transfer, overlap=overlap)
    assert {span.task: (span.start, span.end) for span in timeline.spans} == expected


@given(with_overlaps(), MODES, st.data())
def test_the_critical_path_makes_up_the_makespan(own, overlap, data):
    costs = some_costs(data, own)
    timeline = simulate(own, costs, overlap=overlap)
    path = timeline.critical_path
    assert path[0].start == 0
    assert path[-1].end == timeline.makespan
    total = sum(span.end - span.start for span in path)
    for a, b in zip(path, path[1:], strict=False):
        if a.rank == b.rank:
            assert a.end == b.start
            continue
        # Where a overlaps, what is read may be of the other one, which ends with a.
        order = own.ranks[a.rank]
        at = order.index(a.task)
        sent = [a.task]
        if overlap == "free":
            sent += [*order[at - 1 : at], *order[at + 1 : at + 2]]
        assert b.start - a.end in {costs.transfer(one, a.rank, b.rank) for one in sent}
        total += b.start - a.end
    assert total == timeline.makespan


@given(with_overlaps(), MODES, st.data())
def test_what_makes_a_critical_task_longer_makes_the_step_longer(own, overlap, data):
    costs = some_costs(data, own)
    before = simulate(own, costs, overlap=overlap)
    longer = data.draw(st.sampled_from(before.critical_path)).task

    def time(task: Task) -> float:
        return costs.of(task) + (task == longer)

    after = simulate(own, dataclasses.replace(costs, **dict.fromkeys(KINDS, time)), overlap=overlap)
    assert after.makespan == before.makespan + 1


KINDS = ("forward", "input_grad", "weight_grad", "backward", "recompute")


@given(with_overlaps(), MODES, st.data())
def test_memory_over_time_reaches_the_peak(own, overlap, data):
    memory = Memory(
        forward=lambda task: float(3 + task.microbatch % 3),
        input_grad=lambda task: -float(1 + task.microbatch % 2),
        weight_grad=lambda task: float(1 + task.microbatch % 2 - 3 - task.microbatch % 3),
    )
    timeline = simulate(own, some_costs(data, own), memory=memory, overlap=overlap)
    for rank, order in enumerate(own.ranks):
        held = timeline.memory_over_time(rank)
        times = [time for time, _ in held]
        assert times == sorted(set(times))
        assert max(amount for _, amount in held) == timeline.peak_memory[rank]
        assert held[-1] == (max(timeline.ends[rank]), 0.0)
        assert timeline.peak_memory[rank] >= max(memory.of(t) for t in order)


@given(tables(), st.data())
def test_bubbles_and_utilisation_follow_from_the_spans(own, data):
    timeline = simulate(own, some_costs(data, own), overlap="none")
    of_rank = [[s for s in timeline.spans if s.rank == r] for r in range(own.num_ranks)]
    busy = [sum(span.end - span.start for span in spans) for spans in of_rank]
    longest = max(max(s.end for s in own) - min(s.start for s in own) for own in of_rank)
    assert list(timeline.busy) == busy
    assert timeline.makespan == max(span.end for span in timeline.spans)
    assert timeline.longest_span == longest
    assert timeline.utilisation == tuple(part / timeline.makespan for part in busy)
    assert timeline.bubble_fraction == pytest.approx(1 - sum(timeline.utilisation) / len(busy))
    assert timeline.span_bubble_fraction == pytest.approx(1 - sum(busy) / (len(busy) * longest))
    assert timeline.span_bubble_fraction <= timeline.bubble_fraction
    starts = [(span.start, span.rank) for span in timeline.spans]
    assert starts == sorted(starts)


# ---- by hand ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("links", "there", "back"),
    [
        ({"latency": 3}, 3, 3),
        ({"latency": lambda a, b: 3.0 if (a, b) == (0, 1) else 5.0}, 3, 5),
        ({"bandwidth": 2, "edge_bytes": 8}, 4, 4),
        ({"latency": 1, "bandwidth": 2, "edge_bytes": (8, 2)}, 5, 2),  # stage 0 sends more
        ({"bandwidth": lambda a, b: 4.0 if a else 2.0, "edge_bytes": 8}, 4, 2),
        ({"edge_bytes": lambda t: 6.0 if t.kind is Kind.F else 7.0, "bandwidth": 1}, 6, 7),
        ({"edge_bytes": 8}, 0, 0),  # without a bandwidth, bytes cost nothing
    ],
)
def test_a_transfer_takes_its_latency_and_its_bytes(links, there, back):
    timeline = simulate(OneFOneB().table(2, 1), Costs(1, 1, 1, **links))
    assert [span.start for span in timeline.spans] == [0, 1 + there, 2 + there, 4 + there + back]


def test_nothing_is_sent_where_two_stages_are_on_one_rank():
    folded = table("F0.0 F3.0 B3.0 B0.0", "F1.0 F2.0 B2.0 B1.0", stages=4)
    # Sent: F0, F2, B3, B1.
    assert simulate(folded, Costs(latency=10)).makespan == 12 / 2 + 4 * 10


def test_ranks_do_not_wait_for_what_they_send():
    spans = simulate(GPipe().table(2, 2), Costs(latency=10)).spans
    assert [s.start for s in spans if s.task.kind is Kind.F] == [0, 1, 11, 12]


# Rank 0 runs B0.0 and F0.2 together. F0.2 could start at once; B0.0 must wait for rank 1.
PAIR = table(
    "F0.0 F0.1 F0.2 B0.0 B0.1 B0.2",
    "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2",
    microbatches=3,
    overlaps="F0.2",
)


@pytest.mark.parametrize(
    ("overlap", "together", "times"),
    [
        ("none", None, [(2, 3), (4, 6)]),  # rank 1 ends B1.0 at 4
        ("atomic", None, [(4, 7), (4, 7)]),
        ("atomic", lambda a, b: 2.5, [(4, 6.5), (4, 6.5)]),
        ("free", None, [(2, 6), (4, 6)]),  # B0.0 is still running when the two have had their 3
        ("free", lambda a, b: 10.0, [(2, 12), (4, 12)]),
    ],
)
def test_what_overlap_means(overlap, together, times):
    timeline = simulate(PAIR, Costs(overlapped=together), overlap=overlap)
    spans = {span.task: (span.start, span.end) for span in timeline.spans}
    assert [spans[task("F0.2")], spans[task("B0.0")]] == times


def test_the_time_of_a_pair_is_told_its_tasks_in_order():
    asked = []

    def together(first: Task, second: Task) -> float:
        asked.append((str(first), str(second)))
        return 1.0

    simulate(PAIR, Costs(overlapped=together))
    assert asked == [("F0.2", "B0.0")]


def test_two_that_overlap_keep_a_rank_busy_once():
    timeline = simulate(PAIR, Costs(overlapped=lambda a, b: 2.0))
    assert timeline.busy == (1 + 1 + 2 + 2 + 2, 9)


def test_a_path_goes_through_the_one_of_a_pair_that_makes_it_late():
    """F1.2 reads F0.2, which has started long before, but ends with B0.0."""
    timeline = simulate(PAIR, Costs(latency=4), overlap="free")
    path = " ".join(str(span.task) for span in timeline.critical_path)
    assert path == "F0.0 F1.0 B1.0 B0.0 F1.2 B1.2 B0.2"


def test_a_half_may_free_what_it_no_longer_needs():
    halves = table("F0.0 F0.1 I0.0 W0.0 I0.1 W0.1", stages=1, microbatches=2)
    memory = Memory(forward=5, input_grad=-3, weight_grad=-2)
    timeline = simulate(halves, memory=memory)
    assert timeline.memory_over_time(0) == [(0, 5), (1, 10), (3, 7), (4, 5), (5, 2), (6, 0)]
    assert timeline.peak_memory == (10,)
    grows = Memory(forward=1, input_grad=4, weight_grad=-5)
    assert simulate(halves, memory=grows).memory_over_time(0) == [
        (0, 1), (1, 2), (2, 6), (4, 5), (6, 0),
    ]  # fmt: skip


def test_a_forward_only_table_holds_a_result_no_longer_than_its_task():
    timeline = simulate(table("F0.0 F0.1", "F1.0 F1.1", microbatches=2), Costs(forward=2))
    assert timeline.peak_memory == (1, 1)
    assert timeline.memory_over_time(0) == [(0, 1), (2, 1), (4, 0)]


def test_a_step_with_a_barrier_takes_longer_than_the_longest_span():
    timeline = simulate(table("F0.0", "F1.0"), Costs(forward=(3, 5)))
    assert (timeline.makespan, timeline.longest_span) == (8, 5)
    assert timeline.utilisation == (3 / 8, 5 / 8)
    assert timeline.bubble_fraction == 0.5
    assert timeline.span_bubble_fraction == pytest.approx(1 - 8 / 10)


def test_a_rank_without_tasks_only_adds_to_the_bubble():
    timeline = simulate(table("F0.0 B0.0", "", stages=1))
    assert timeline.busy == (3, 0)
    assert timeline.bubble_fraction == timeline.span_bubble_fraction == 0.5
    assert timeline.peak_memory == (1, 0)
    assert timeline.memory_over_time(1) == []


def test_an_empty_table_takes_no_time():
    timeline = simulate(Table(((), ()), 0, 0))
    assert (timeline.makespan, timeline.longest_span, timeline.bubble_fraction) == (0, 0, 0)
    assert timeline.spans == timeline.critical_path == ()


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("cost", [*KINDS, "edge_bytes"])
def test_a_cost_is_finite_and_not_negative(cost, bad):
    own = (ZeroBubbleH1() if cost in ("input_grad", "weight_grad") else Recompute()).table(2, 2)
    with pytest.raises(
        ValueError, match=f"{cost} of [FBIWR].* is {bad}; a cost is a finite number"
    ):
        simulate(own, Costs(**{cost: bad}, latency=1))
    with pytest.raises(ValueError, match="overlapped of .* finite"):
        simulate(PAIR, Costs(overlapped=lambda a, b: bad))
    with pytest.raises(ValueError, match="a link needs a latency of at least 0"):
        simulate(own, Costs(latency=bad))


def test_unknown_ways_to_overlap_are_named():
    with pytest.raises(ValueError, match="'atomic', 'free' or 'none', got 'both'"):
        simulate(PAIR, overlap="both")  # pyright: ignore


def test_a_table_with_a_task_twice_is_not_simulated():
    with pytest.raises(ValueError, match=r"F\[stage 0, microbatch 0\] is there twice, or"):
        simulate(table("F0.0 F0.0 B0.0", "F1.0 B1.0"))
    with pytest.raises(ValueError, match=r"or is of a microbatch that .* check\(table\)"):
        simulate(table("F0.0 F0.1 B0.0", "F1.0 B1.0"))


def test_a_measured_timeline_has_all_but_a_critical_path():
    own = table("F0.0 B0.0", "F1.0 B1.0")
    measured = Timeline(own, ((0.5, 4.0), (1.5, 2.5)), ((1.0, 5.0), (2.5, 4.0)))
    assert (measured.makespan, measured.busy) == (5.0, (1.5, 2.5))
    assert measured.peak_memory == (1, 1)
    with pytest.raises(ValueError, match="a measured timeline has no critical path"):
        measured.critical_path  # noqa: B018
