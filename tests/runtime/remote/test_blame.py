"""Who has failed first is found out of what is heard of the workers, in whatever order it comes."""

import itertools
from unittest import mock

import pytest

pytest.importorskip("ray")

from jaxpp.runtime.remote.calls._failure import Failure  # noqa: E402
from jaxpp.runtime.remote.group._blame import culprit, explain, suspect  # noqa: E402
from jaxpp.runtime.remote.group._member import Member  # noqa: E402
from jaxpp.runtime.transport import PeerLost, TransportError  # noqa: E402

OWN = Failure.of(KeyError("its own"), 2, 7, "F2.1")
DEAD = "no sign of life for 3.0 s"


def waited(rank, for_rank, task="receive of x"):
    return Failure.of(PeerLost(for_rank, "it is gone"), rank, 7, task, for_rank)


def ranks(number, processes=1):
    return [
        Member(
            n,
            n // processes,
            n % processes,
            processes,
            hello=mock.Mock(host="here", address="10.0.0.1", pid=100 + n),
        )
        for n in range(number * processes)
    ]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_failure_of_its_own_counts_before_those_that_follow(order):
    heard = [(0, waited(0, 1)), (1, waited(1, 2)), (2, OWN)]
    assert culprit(ranks(3), dict(heard[n] for n in order)) == 2


def test_while_all_wait_for_another_it_is_not_known():
    reports = {0: waited(0, 1), 1: waited(1, 2)}
    assert culprit(ranks(3), reports) is None
    assert culprit(ranks(3), reports, settled=True) is None
    # Of those that were waited for the first that is heard of.
    assert suspect(ranks(3), reports) == 1
    assert suspect(ranks(3), {2: Failure.of(PeerLost(0, "gone"), 2, 7, "")}) is None


def test_a_dead_worker_counts_as_soon_as_it_is_heard_of():
    assert culprit(ranks(3), {0: waited(0, 1), 1: DEAD}) == 1


def test_the_death_of_a_ranks_first_process_explains_that_of_the_others():
    members = ranks(2, processes=2)
    assert culprit(members, {3: DEAD}) is None  # the first may be dead, too
    assert culprit(members, {3: DEAD}, settled=True) == 3
    assert culprit(members, {3: DEAD, 2: DEAD}) == 2
    assert culprit(members, {3: DEAD, 2: waited(1, 0)}) == 3
    # Processes wait for those of their own number.
    assert suspect(members, {1: waited(0, 1)}) == 3


@pytest.mark.parametrize(
    ("what", "cause", "words", "task"),
    [
        (OWN, KeyError, "in F2.1 of stage 2 of call 7: KeyError: 'its own'.", "F2.1"),
        (DEAD, None, f"in B1.0 of stage 1 of call 5: {DEAD}.", "B1.0"),
        (MemoryError("none"), MemoryError, "in B1.0 of stage 1 of call 5: MemoryError", "B1.0"),
        (None, None, "in B1.0 of stage 1 of call 5: ", "B1.0"),
    ],
)
def test_the_error_says_who_where_why_and_who_waits(what, cause, words, task):
    members = ranks(3)
    members[1].at = (5, "B1.0")
    reports = {0: waited(0, 1, "receive of B1.0"), 2: waited(2, 0)}
    reports |= {} if what is None else {1: what}
    error = explain(members, reports, 1, lambda call, task: f" of stage {task[1]}")
    assert str(error).startswith(f"rank 1 (process 101 on here (10.0.0.1)) has failed {words}")
    assert "Waiting for it: rank 0 in receive of B1.0." in str(error)
    assert (error.rank, error.host, error.task) == (1, "here (10.0.0.1)", task)
    assert type(error.__cause__) is (cause or type(None))


@pytest.mark.parametrize("first", [0, 1])
def test_where_both_ends_of_a_connection_live_the_error_names_the_connection(first):
    """One waits for the other; the other waits for it, or was ended by the driver."""
    members = ranks(3)
    ended = Failure.of(TransportError("it was aborted"), 1, 7, "receive of y", 2)
    for own in (ended, waited(1, 0)):
        reports = {0: waited(0, 1), 1: own, 2: ended}
        reports = dict(sorted(reports.items(), key=lambda item: item[0] != first))
        error = explain(members, reports, 1, lambda call, task: "")
        ends = [f"rank {n} (process {100 + n} on here (10.0.0.1))" for n in range(2)]
        assert str(error).startswith(
            f"The connection between {ends[0]} and {ends[1]} broke, but both processes live: in "
            "receive of x, rank 0 found that it is gone."
        )
        assert isinstance(error.__cause__, PeerLost) and error.task == "receive of x"
    dead = explain(members, {0: waited(0, 1), 1: DEAD}, 1, lambda call, task: "")
    assert str(dead).startswith("rank 1 (process 101 on here (10.0.0.1)) has failed")


def test_a_third_rank_that_waits_does_not_hide_whose_connection_broke():
    members = ranks(3)
    ended = Failure.of(TransportError("rank 2 has failed"), 0, 7, "receive of x", 1)
    reports = {0: ended, 1: waited(1, 2), 2: Failure.of(PeerLost(1, "gone"), 2, 7, "send of y", 1)}
    for worker in (1, 2):
        error = explain(members, reports, worker, lambda call, task: "")
        assert str(error).startswith("The connection between rank 1 (")
        assert "and rank 2 (" in str(error) and error.rank == 2
