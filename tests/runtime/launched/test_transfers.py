"""The transfers between processes have one order, in which none waits for a later one."""

import itertools

import pytest

from jaxpp._program import Receive, Send
from jaxpp.runtime.executor import interleave
from jaxpp.runtime.launched import _puts
from jaxpp.runtime.launched._puts import Puts
from jaxpp.runtime.launched._transfers import check_transfers, transfers_of
from jaxpp.runtime.transport import TransportError
from tests.runtime.executor.test_executor import message, pipeline, program, run


def exchange():
    """Two ranks that send to each other before either receives, and then once more."""
    to, back = [[message(n + k, n, 1 - n) for n in range(2)] for k in (0, 2)]
    return [
        program(
            n,
            run(0, (0,), (1,)),
            Send((1,), to[n]),
            Receive((2,), to[1 - n]),
            run(0, (2,), (1,)),
            Send((1,), back[n]),
            Receive((3,), back[1 - n]),
        )
        for n in range(2)
    ]


class Issued:
    """A transfer that is noted where it is issued, and moves nothing."""

    log: list[int] = []

    def __init__(self, message, homes, here):
        self.message = message

    def issue(self, arrays=()):
        if self.message.names != ("",):  # by which two processes meet
            self.log.append(self.message.tag)
        return []


def issued(transfers, programs, process_of, process, monkeypatch):
    """The tags of the transfers that a process issues in two steps, in its own order."""
    log: list[int] = []
    monkeypatch.setattr(_puts, "Put", type("Noted", (Issued,), {"log": log}))
    here = [rank for rank, own in process_of.items() if own == process]
    puts = Puts(dict.fromkeys(process_of), here, lambda number: None)  # pyright: ignore
    puts.expect(transfers, 0)
    for _ in range(2):
        puts.begin(0)
        for rank, chunk in interleave(programs):
            for instruction in chunk if rank in here else ():
                if isinstance(instruction, Send | Receive) and puts.carries(instruction.message):
                    if isinstance(instruction, Send):
                        puts.send([], instruction.message)
                    else:
                        puts.receive(instruction.message, lambda: None)
    puts.begin(0)
    return log


CASES = {
    "exchange": (exchange(), {0: 0, 1: 1}),
    "pipeline": (pipeline(3, 2), {0: 0, 1: 1, 2: 2}),
    "shared": (pipeline(4, 2), {0: 0, 1: 0, 2: 1, 3: 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_an_order_is_accepted_just_where_all_processes_can_issue_it(case, monkeypatch):
    programs, process_of = CASES[case]
    right, accepted = transfers_of(programs, process_of), 0
    for order in itertools.permutations(right):
        try:
            for process in set(process_of.values()):
                found = issued(order, programs, process_of, process, monkeypatch)
                assert found == [m.tag for m in order] * 2
        except TransportError:
            with pytest.raises(ValueError, match="The order of transfers has "):
                check_transfers(order, programs, process_of)
            assert order != right
        else:
            check_transfers(order, programs, process_of)
            accepted += 1
    assert 0 < accepted


def test_ranks_of_one_process_have_no_transfers():
    assert transfers_of(pipeline(3, 2), {0: 0, 1: 0, 2: 0}) == ()


def test_an_order_has_each_message_between_processes_once():
    programs, process_of = CASES["pipeline"]
    right = transfers_of(programs, process_of)
    with pytest.raises(ValueError, match="lacks x from rank "):
        check_transfers(right[:-1], programs, process_of)
    with pytest.raises(ValueError, match="has 5 messages, and the ranks send 4"):
        check_transfers((*right, message(99, 0, 1)), programs, process_of)
