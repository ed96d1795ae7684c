"""Programs run in an order in which nothing waits for what has not been sent."""

import numpy as np
import pytest

from jaxpp._program import Free, Message, Program, Receive, Run, Send
from jaxpp.runtime.executor import _executor


class Mail:
    """A transport that insists that a message is sent before it is received, and received once."""

    def __init__(self):
        self.sent = {}

    def send(self, arrays, message):
        assert message.tag not in self.sent
        self.sent[message.tag] = list(arrays)

    def receive(self, message):
        return self.sent.pop(message.tag)


def message(tag, source, target):
    return Message(tag, source, target, ("x",), ("edge",), (np.zeros(()),))


def program(rank, *instructions, num_slots=4, inputs=(), outputs=(), constants=()):
    return Program(rank, (rank,), instructions, num_slots, inputs, outputs, constants)


def run(number, inputs, outputs):
    return Run(number, inputs, outputs, f"run {number}")


def positions(order):
    """Where each send and each receive is in an order, by tag."""
    sent, received = {}, {}
    flat = [i for _, chunk in order for i in chunk]
    for n, instruction in enumerate(flat):
        if isinstance(instruction, Send):
            sent[instruction.message.tag] = n
        elif isinstance(instruction, Receive):
            received[instruction.message.tag] = n
    return sent, received


def pipeline(ranks, microbatches):
    """Each rank adds one to what the rank before it made, for each microbatch."""
    programs = []
    for rank in range(ranks):
        instructions = []
        for m in range(microbatches):
            tag = m * ranks + rank
            if rank:
                instructions.append(Receive((0,), message(tag - 1, rank - 1, rank)))
            instructions.append(run(0, (0,), (1,)))
            if rank < ranks - 1:
                instructions.append(Send((1,), message(tag, rank, rank + 1)))
            instructions.append(Free((1,) if rank < ranks - 1 else ()))
        programs.append(program(rank, *instructions))
    return programs


def execute(programs, executables, feeds):
    mail = Mail()
    executors = [_executor.Executor(p, executables, mail) for p in programs]
    for executor, values in zip(executors, feeds, strict=True):
        for slot, value in values.items():
            executor.slots[slot] = value
    for rank, chunk in _executor.interleave(programs):
        executors[rank].execute(chunk)
    assert not mail.sent
    return executors


def test_worker_runs_each_instruction():
    calls = []

    def two_results(x, y):
        calls.append((x, y))
        return x + y, x - y

    p = program(
        0,
        Receive((2,), message(7, 1, 0)),
        run(1, (2, 0), (1, 3)),
        Free((2,)),
        Send((3, 1), message(8, 0, 1)),
    )
    mail = Mail()
    mail.sent[7] = [10]
    executor = _executor.Executor(p, [None, two_results], mail)
    executor.slots[0] = 4
    executor.execute(p.instructions)
    assert calls == [(10, 4)]
    assert executor.slots == [4, 14, None, 6]
    assert mail.sent == {8: [6, 14]}


def test_an_error_says_where_it_was():
    def fails(x):
        raise ZeroDivisionError("of no use")

    executor = _executor.Executor(program(3, run(0, (0,), (1,))), [fails], Mail())
    with pytest.raises(ZeroDivisionError, match="of no use") as caught:
        executor.execute((run(0, (0,), (1,)),))
    assert caught.value.__notes__ == ["in run 0 on rank 3"]


def test_a_run_may_write_where_it_reads():
    p = program(0, run(0, (0, 1), (1, 0)), num_slots=2)
    executor = _executor.Executor(p, [lambda x, y: (x + y, x * y)], Mail())
    executor.slots[:] = [3, 5]
    executor.execute(p.instructions)
    assert executor.slots == [15, 8]


def test_a_message_fits_its_slots():
    """A receive of another number of arrays is an error, not a shift."""
    p = program(0, Receive((0, 1), message(0, 1, 0)))
    mail = Mail()
    mail.sent[0] = [1]
    with pytest.raises(ValueError):
        _executor.Executor(p, [], mail).execute(p.instructions)


def test_chunks_are_the_program_in_order():
    """Each piece runs one computation at most, and waits at its start if at all."""
    for p in pipeline(3, 4):
        pieces = _executor.chunks(p)
        assert tuple(i for piece in pieces for i in piece) == p.instructions
        for piece in pieces:
            assert piece
            assert sum(isinstance(i, Run) for i in piece) <= 1
            first = next((n for n, i in enumerate(piece) if not isinstance(i, Receive)), len(piece))
            assert not any(isinstance(i, Receive) for i in piece[first:])


def test_an_empty_program_has_no_chunks():
    assert _executor.chunks(program(0)) == []
    assert _executor.interleave([program(0), program(1)]) == []


@pytest.mark.parametrize("ranks, microbatches", [(1, 3), (2, 1), (3, 4), (4, 8)])
def test_interleaved_order(ranks, microbatches):
    """It holds each rank's program in order, and every send before its receive."""
    programs = pipeline(ranks, microbatches)
    order = _executor.interleave(programs)
    for rank, p in enumerate(programs):
        assert tuple(i for r, chunk in order if r == rank for i in chunk) == p.instructions
    sent, received = positions(order)
    assert sent.keys() == received.keys()
    assert all(sent[tag] < received[tag] for tag in received)


def test_interleaved_programs_compute():
    executors = execute(pipeline(3, 2), [lambda x: (x + 1,)], [{0: 5}, {}, {}])
    assert executors[-1].slots[1] == 8


def test_ranks_start_as_early_as_they_can():
    """Runs are dispatched in the order in which equal tasks would start, none later than it can."""
    clock, available, starts = [0] * 3, {}, []
    for rank, chunk in _executor.interleave(pipeline(3, 4)):
        needed = [available[i.message.tag] for i in chunk if isinstance(i, Receive)]
        start = max([clock[rank], *needed])
        runs = any(isinstance(i, Run) for i in chunk)
        clock[rank] = start + runs
        available.update((i.message.tag, clock[rank]) for i in chunk if isinstance(i, Send))
        starts.extend([(start, rank)] if runs else [])
    assert [start for start, _ in starts] == sorted(start for start, _ in starts)
    assert sorted(starts) == sorted((rank + m, rank) for rank in range(3) for m in range(4))


def test_programs_that_exchange():
    """Two ranks that send to each other before either receives."""
    programs = [
        program(
            r,
            run(0, (0,), (1,)),
            Send((1,), message(r, r, 1 - r)),
            Receive((2,), message(1 - r, 1 - r, r)),
            run(1, (1, 2), (3,)),
        )
        for r in range(2)
    ]
    executors = execute(programs, [lambda x: (x * 10,), lambda x, y: (x - y,)], [{0: 1}, {0: 4}])
    assert [w.slots[3] for w in executors] == [-30, 30]


def test_programs_that_wait_for_each_other():
    programs = [
        program(r, Receive((0,), message(1 - r, 1 - r, r)), Send((1,), message(r, r, 1 - r)))
        for r in range(2)
    ]
    with pytest.raises(RuntimeError, match="wait for each other"):
        _executor.interleave(programs)


def test_a_ring_of_three_that_waits():
    programs = [
        program(
            r,
            run(0, (0,), (1,)),
            Receive((2,), message((r + 2) % 3, (r + 2) % 3, r)),
            Send((1,), message(r, r, (r + 1) % 3)),
        )
        for r in range(3)
    ]
    with pytest.raises(RuntimeError, match="wait for each other"):
        _executor.interleave(programs)


def test_a_message_that_nobody_sends():
    programs = [program(0, run(0, (0,), (1,))), program(1, Receive((0,), message(0, 0, 1)))]
    with pytest.raises(RuntimeError, match="wait for each other"):
        _executor.interleave(programs)
