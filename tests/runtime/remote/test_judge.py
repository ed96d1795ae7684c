"""Who has failed first is found out of what is heard of the workers, in whatever order it comes."""

import itertools
from unittest import mock

import pytest

pytest.importorskip("ray")

from jaxpp.runtime.site._failure import Death, Failure, judge  # noqa: E402
from jaxpp.runtime.site._group import Member  # noqa: E402
from jaxpp.runtime.transport import PeerLost, TransportError  # noqa: E402

OWN = Failure.of(KeyError("its own"), 2, 7, "F2.1", where="stage 2")
DEAD = Death("no sign of life for 3.0 s")


def waited(rank, for_rank, task="receive of x"):
    return Failure.of(PeerLost(for_rank, "it is gone"), rank, 7, task, for_rank)


def ended(rank, for_rank=None):
    return Failure.of(TransportError("it was aborted"), rank, 7, "receive of y", for_rank)


def workers(number, processes=1, ranks=1):
    """Workers of one rank or several, or several of a rank."""
    return [
        Member(
            n,
            tuple(range(n // processes * ranks, (n // processes + 1) * ranks)),
            n % processes,
            processes,
            hello=mock.Mock(host="here", address="10.0.0.1", pid=100 + n),
        )
        for n in range(number * processes)
    ]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_failure_of_its_own_counts_before_its_echoes(order):
    heard = [(0, waited(0, 1)), (1, waited(1, 2)), (2, OWN)]
    error = judge(workers(3), dict(heard[n] for n in order))
    assert (error.rank, error.task) == (2, "F2.1")
    assert "Waiting for it: rank 1 in receive of x." in str(error)


def test_the_first_of_two_failures_counts():
    other = Failure.of(ValueError("another"), 0, 7, "F0.1")
    assert judge(workers(3), {2: OWN, 0: other}).rank == 2
    assert judge(workers(3), {0: other, 2: OWN}).rank == 0
    assert judge(workers(3), {0: waited(0, 1), 1: DEAD, 2: OWN}).rank == 1


def test_the_death_of_a_ranks_first_process_explains_that_of_the_others():
    members = workers(2, processes=2)
    found = judge(members, {3: DEAD, 2: waited(1, 0)})
    assert (found.rank, found.process) == (1, 1)
    found = judge(members, {3: DEAD, 2: DEAD})
    assert (found.rank, found.process) == (1, 0)
    assert str(found).startswith("rank 1 (its process 0 of 2, process 102 on here (10.0.0.1)) has")


@pytest.mark.parametrize(
    ("what", "cause", "words", "task"),
    [
        (OWN, KeyError, "in F2.1 (stage 2) of call 7: KeyError: 'its own'.", "F2.1"),
        (DEAD, None, f": {DEAD.reason}.", ""),
        (Death.of(MemoryError("none")), MemoryError, ": MemoryError: none.", ""),
    ],
)
def test_the_error_says_who_where_why_and_who_waits(what, cause, words, task):
    error = judge(workers(3), {0: waited(0, 2, "receive of B1.0"), 2: what, 1: ended(1)})
    start = f"rank 2 (process 102 on here (10.0.0.1)) has failed {words}".replace(" :", ":")
    assert str(error).startswith(start)
    assert "Waiting for it: rank 0 in receive of B1.0. All ranks" in str(error)
    assert (error.rank, error.host, error.task) == (2, "here (10.0.0.1)", task)
    assert type(error.__cause__) is (cause or type(None))


def test_a_death_is_of_all_ranks_of_the_process_and_an_error_of_one():
    members = workers(2, ranks=2)
    error = judge(members, {0: waited(1, 3), 1: DEAD})
    assert str(error).startswith("ranks 2 and 3 (process 101 on here (10.0.0.1)) has failed: no")
    assert error.rank == 2 and "Waiting for it: rank 1 in receive of x." in str(error)
    error = judge(members, {1: Failure.of(KeyError("k"), 3, 7, "F3.0")})
    assert str(error).startswith("rank 3 (process 101") and error.rank == 3


def test_a_dead_process_has_its_last_words():
    output = "loading\nFatal Python error: Segmentation fault\n\n  File 'x.py', line 3 in crash"
    error = judge(workers(1), {0: Death.of(RuntimeError("exit type: X"), output)})
    assert error.reason == "its process has died: Segmentation fault"
    assert str(error).endswith(f"The last lines of its output:\n{output}")


@pytest.mark.parametrize("first", [0, 1])
def test_where_both_ends_of_a_connection_live_the_error_names_the_connection(first):
    """One waits for the other; the other waits for it, or was ended by the driver."""
    members = workers(3)
    for own in (ended(1, 2), waited(1, 0)):
        reports = {0: waited(0, 1), 1: own, 2: ended(2)}
        reports = dict(sorted(reports.items(), key=lambda item: item[0] != first))
        error = judge(members, reports)
        ends = [f"rank {n} (process {100 + n} on here (10.0.0.1))" for n in range(2)]
        assert str(error).startswith(
            f"The connection between {ends[0]} and {ends[1]} broke, but both processes live: in "
            "receive of x, rank 0 found that it is gone."
        )
        assert isinstance(error.__cause__, PeerLost) and error.task == "receive of x"
    dead = judge(members, {0: waited(0, 1), 1: DEAD})
    assert str(dead).startswith("rank 1 (process 101 on here (10.0.0.1)) has failed")


def test_a_third_rank_that_waits_does_not_hide_whose_connection_broke():
    reports = {0: ended(0, 1), 1: waited(1, 2), 2: waited(2, 1, "send of y")}
    error = judge(workers(3), reports)
    assert str(error).startswith("The connection between rank 1 (")
    assert "and rank 2 (" in str(error) and error.rank == 2


def test_of_a_connection_whose_other_end_is_silent_no_more_is_said_than_is_known():
    error = judge(workers(2), {0: waited(0, 1)})
    assert "broke, but neither process has died" in str(error)
    assert judge(workers(2), {0: ended(0)}).rank == 0
