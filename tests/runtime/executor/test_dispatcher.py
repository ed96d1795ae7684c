"""Processes of several ranks each run a step as one process of all ranks does."""

import contextlib
import itertools
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp
from jaxpp._program import Free, Message, Program, Receive, Run, Send
from jaxpp.planning._measure import _loaded
from jaxpp.runtime.executor import Dispatcher, Executor, turns_of
from jaxpp.runtime.executor._executor import chunks
from jaxpp.runtime.transport import SocketTransport
from tests.helpers import assert_same
from tests.runtime.local.test_mesh import batch, init_params, start, step_of
from tests.runtime.transport.ranks import SECRET, blocked

#: The ranks of each process.
SPLITS = [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0,), (1, 2, 3)), ((0, 1, 2, 3),)]
SCHEDULES = [
    jaxpp.schedules.OneFOneB(),
    jaxpp.schedules.ZeroBubbleH1(),
    jaxpp.schedules.Interleaved1F1B(2),
]


class Sites:
    """The ranks of a local step, shared out to transports and dispatchers of a few of them each.

    Each of these has a thread where a real one has a process.
    """

    def __init__(self, local, split):
        self.local = local
        turns, own = turns_of(local.bundle.programs), local.executors
        known = local.bundle.computations
        self.transports = [SocketTransport({r: local.homes[r] for r in s}, SECRET) for s in split]
        addresses = {r: t.addresses for t in self.transports for r in t.homes}
        for transport in self.transports:
            transport.connect(addresses)
        self.dispatchers = []
        for transport, ranks in zip(self.transports, split, strict=True):
            parts = [
                Executor(own[r].program, own[r].executables, transport, computations=known)
                for r in ranks
            ]
            self.dispatchers.append(Dispatcher(parts, turns))
            found = self.dispatchers[-1]
            transport.expect(found.messages, 7, found.late)
        self.calls = itertools.count(1)

    def dispatch(self):
        """Stands for the dispatch of the local step."""
        number = next(self.calls)
        executors = {r: e for d in self.dispatchers for r, e in d.executors.items()}
        for rank, executor in executors.items():
            executor.slots[:] = self.local.executors[rank].slots

        def run(transport, dispatcher):
            transport.begin(number, 7)
            dispatcher.run()
            transport.flush()

        pairs = zip(self.transports, self.dispatchers, strict=True)
        for wait in [blocked(run, *pair) for pair in pairs]:
            wait(60)
        for rank, executor in executors.items():
            self.local.executors[rank].slots[:] = executor.slots
            executor.slots[:] = [None] * len(executor.slots)


@contextlib.contextmanager
def sites(local, split):
    found = Sites(local, split)
    try:
        yield found
    finally:
        for transport in found.transports:
            transport.close()


def check(schedule, mesh, split, **how):
    """Two calls by a process of all ranks and by several processes give the same bits."""
    stages = 8 if isinstance(schedule, jaxpp.schedules.Interleaved1F1B) else 4
    placed = jaxpp.place(step_of(schedule=schedule), mesh, donate_argnums=(0, 1), **how)
    args = *start(init_params(stages)), batch()
    local, arrays = _loaded(placed, args)
    with sites(local, split) as found:
        for n in range(2):
            own = [*arrays[:-1], batch(n)]
            wanted, got = (local(list(map(jnp.copy, own)), d) for d in (None, found.dispatch))
            assert_same(got, wanted)


@pytest.mark.cases(3)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_processes_of_several_ranks_compute_what_one_of_all_ranks_does(split, schedule):
    check(schedule, jaxpp.MpmdMesh((4,)), split)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_ranks_of_a_process_may_share_a_device(schedule):
    devices = [jax.devices()[n] for n in (0, 0, 1, 1)]
    check(schedule, jaxpp.MpmdMesh((4,), devices=devices), SPLITS[0])


@pytest.mark.parametrize("split", SPLITS[:2], ids=str)
def test_ranks_of_two_devices_send_each_other_shards(split):
    mesh = jaxpp.MpmdMesh((4, 2), ("mpmd", "data"))
    check(SCHEDULES[0], mesh, split, in_specs=(None, None, None, P("data")))


# ---- the dispatcher alone -----------------------------------------------------------------------


def message(tag, source, target):
    x = jax.ShapeDtypeStruct((), "float32")
    return Message(tag, source, target, ("x",), ("edge",), (x,))


class Mail:
    """A transport that notes which messages were sent."""

    def __init__(self):
        self.sent = {}

    def send(self, arrays, message):
        self.sent[message.tag] = list(arrays)

    def receive(self, message):
        return self.sent.pop(message.tag)


def two_ranks(second, transport):
    """Rank 0 sends what it computes to rank 1, which computes something by `second`."""
    there = message(0, 0, 1)
    programs = [
        Program(
            0,
            (0,),
            (Run(0, (0,), (1,), "F0"), Send((1,), there), Free((1,))),
            3,
            ((0, 0),),
            (),
            ((2, 5.0),),
        ),
        Program(1, (1,), (Receive((0,), there), Run(1, (0,), (1,), "F1")), 2, (), ((0, 1),), ()),
    ]
    calls = [lambda x: [x + 1], second]
    parts = [
        Executor(programs[r], [c if n == r else None for n, c in enumerate(calls)], transport)
        for r in range(2)
    ]
    return Dispatcher(parts, turns_of(programs))


def test_an_error_tells_the_rank_and_the_instruction():
    def fail(x):
        raise ValueError("no such luck")

    found = two_ranks(fail, Mail())
    assert found.at is None
    found.executors[0].slots[:] = [1, None, None]
    with pytest.raises(ValueError, match="no such luck") as caught:
        found.run()
    assert caught.value.__notes__ == ["in F1 on rank 1"]
    rank, instruction = found.at or (None, None)
    assert rank == 1 and isinstance(instruction, Run) and instruction.label == "F1"


def test_pieces_run_in_the_order_of_all_ranks_and_together_where_they_follow_each_other():
    found, pieces = two_ranks(lambda x: [2 * x], Mail()), []
    found.executors[0].slots[0] = 1

    def execute(executor, chunk):
        pieces.append((executor.program.rank, len(chunk)))
        executor.execute(chunk)

    found.run(execute)
    assert pieces == [(0, 3), (1, 2)] and found.executors[1].slots[1] == 4
    assert found.at is None


def test_what_is_sent_and_then_donated_is_told():
    there = message(3, 0, 1)
    sends = Send((0,), there)
    donates, keeps = Run(0, (0,), (1,), "F"), Run(1, (0,), (1,), "F")
    known: Any = [types.SimpleNamespace(donated=(0,)), None]
    for instructions, late in (
        ((sends, donates), {3}),
        ((sends, keeps), set()),
        ((donates, sends), set()),
        ((sends, Receive((0,), message(4, 1, 0)), donates), set()),
    ):
        program = Program(0, (0,), instructions, 2, (), (), ())
        part = Executor(program, [None, None], Mail(), computations=known)
        turns = [0] * len(chunks(program))
        assert Dispatcher([part], turns).late == late
