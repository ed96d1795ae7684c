"""Device transfers keep one order on all ranks: nothing waits in a circle, and nothing is lost."""

import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxpp import schedules
from jaxpp._program import Message, Program, Receive, Run, Send
from jaxpp.runtime.arrays import sharding_in
from jaxpp.runtime.executor import Executor, interleave
from jaxpp.runtime.transport import _device, _processes
from jaxpp.runtime.transport._choice import RankDevices, choose_transport
from jaxpp.runtime.transport._device import DeviceTransport
from jaxpp.runtime.transport._errors import Aborted
from jaxpp.runtime.transport._order import transfer_order
from jaxpp.runtime.transport._processes import free_port, rank_homes
from tests.runtime.transport import device_rank
from tests.runtime.transport.ranks import blocked

ROOT = Path(__file__).parents[3]


# ---- programs made of tables, and ranks that meet for each transfer -----------------------------


def programs_of(table):
    """What the ranks of a table run: each task on what its neighbours' tasks have sent.

    A task writes `1 + sum of what it reads + its number` to a slot of its own.
    """
    owner = {(task, rank) for rank, tasks in enumerate(table.ranks) for task in tasks}
    rank_of = {task: rank for task, rank in owner}
    slot_of = {task: n for n, task in enumerate(sorted(rank_of, key=str))}
    instructions = [[] for _ in table.ranks]
    sources = {task: [t for t in _reads(task, table) if t in rank_of] for task in rank_of}
    readers = {task: [t for t in rank_of if task in sources[t]] for task in rank_of}
    messages = {}
    for task, rank in rank_of.items():
        for target in {rank_of[t] for t in readers[task]} - {rank}:
            aval = jax.ShapeDtypeStruct((), np.float32)
            messages[task, target] = Message(
                len(messages), rank, target, (str(task),), ("edge",), (aval,)
            )
    for rank, tasks in enumerate(table.ranks):
        for task in tasks:
            for source in sources[task]:
                found = messages.get((source, rank))
                if found and Receive((slot_of[source],), found) not in instructions[rank]:
                    instructions[rank].append(Receive((slot_of[source],), found))
            reads = tuple(slot_of[t] for t in sources[task])
            instructions[rank].append(Run(slot_of[task], reads, (slot_of[task],), str(task)))
            instructions[rank].extend(
                Send((slot_of[task],), m)
                for (sent, _), m in sorted(messages.items(), key=lambda item: item[1].tag)
                if sent == task
            )
    return [
        Program(rank, (), tuple(own), len(slot_of), (), (), ())
        for rank, own in enumerate(instructions)
    ]


def _reads(task, table):
    kind, stage, m = task.kind, task.stage, task.microbatch
    last = table.num_stages - 1
    if kind == "F":
        return [schedules.Task(schedules.Kind.F, stage - 1, m)]
    if kind == "W":
        return [schedules.Task(schedules.Kind.I, stage, m)]
    after = [schedules.Task(k, stage + 1, m) for k in (schedules.Kind.B, schedules.Kind.I)]
    return [schedules.Task(schedules.Kind.F, stage, m), *(after if stage < last else [])]


def simulate_meetings(programs, order, seed, run_ahead=2):
    """Runs programs whose transfers need both ranks at once, in a random order of events.

    Each rank makes its transfers in the order given for it; gives the number of events.

    Raises:
        RuntimeError: if nothing can go on.
    """
    rng = random.Random(seed)
    at = [0] * len(programs)
    queues = [[m for m in order(r) if r in (m.source, m.target)] for r in range(len(programs))]
    sent, arrived = set(), [set() for _ in programs]
    for events in range(10**6):
        waits = [
            isinstance(i := _instruction(p, at[r]), Receive) and i.message.tag not in arrived[r]
            for r, p in enumerate(programs)
        ]

        steps = [r for r, p in enumerate(programs) if at[r] < len(p.instructions) and not waits[r]]
        ready_tags = [
            _ready(r, queue, sent, len(arrived[r]) < run_ahead or waits[r])
            for r, queue in enumerate(queues)
        ]
        met = [t for t in set(ready_tags) - {None} if ready_tags.count(t) == 2]
        if not steps and not met:
            if any(at[r] < len(p.instructions) for r, p in enumerate(programs)) or any(queues):
                raise RuntimeError("The ranks wait for each other.")
            return events
        choice = rng.randrange(len(steps) + len(met))
        if choice < len(steps):
            rank = steps[choice]
            match _instruction(programs[rank], at[rank]):
                case Send(message=m):
                    sent.add(m.tag)
                case Receive(message=m):
                    arrived[rank].remove(m.tag)
            at[rank] += 1
        else:
            tag = met[choice - len(steps)]
            for rank, queue in enumerate(queues):
                if queue and queue[0].tag == tag:
                    m = queue.pop(0)
                    if m.target == rank:
                        arrived[rank].add(tag)


def _ready(rank, queue, sent, may_receive):
    """The tag of the transfer that a rank is at, if it is ready for it."""
    if not queue:
        return None
    m = queue[0]
    if m.source == rank:
        return m.tag if m.tag in sent else None
    behind = any(n.tag in sent for n in queue if n.source == rank)
    return m.tag if may_receive or behind else None


def _instruction(program, at):
    return program.instructions[at] if at < len(program.instructions) else None


def random_table(seed):
    rng = random.Random(seed)
    makers = (
        lambda: schedules.GPipe(),
        lambda: schedules.OneFOneB(),
        lambda: schedules.Eager1F1B(),
        lambda: schedules.ZeroBubbleH1(),
        lambda: schedules.ZeroBubbleH2(),
        lambda: schedules.ForwardOnly(),
        lambda: schedules.Interleaved1F1B(),
        lambda: schedules.ZeroBubbleV(),
        lambda: schedules.Hanayo(),
    )
    schedule = rng.choice(makers)()
    for num_stages in rng.sample((2, 3, 4, 6, 8), 5):
        try:
            return schedule.table(num_stages, rng.choice((1, 2, 4, 8)))
        except ValueError:
            continue
    raise AssertionError(schedule)


@pytest.mark.parametrize("run_ahead", [1, 2])
def test_ranks_that_keep_to_the_order_never_wait_in_a_circle(run_ahead):
    for seed in range(30):
        programs = programs_of(random_table(seed))
        order = transfer_order(programs)
        simulate_meetings(programs, lambda rank, order=order: order, seed, run_ahead)


def test_ranks_that_keep_to_their_programs_wait_in_a_circle():
    """So the order is needed: what 1F1B sends crosses what it receives."""
    programs = programs_of(schedules.OneFOneB().table(4, 8))

    def own(rank):
        steps = programs[rank].instructions
        return [i.message for i in steps if isinstance(i, Send | Receive)]

    with pytest.raises(RuntimeError, match="wait for each other"):
        simulate_meetings(programs, own, seed=0)


def test_order_has_each_message_once_and_each_send_after_what_its_rank_received():
    lowered = device_rank.lower(schedules.Interleaved1F1B(), 2, 4)
    order = [m.tag for m in transfer_order(lowered.programs)]
    assert sorted(order) == sorted(s.message.tag for p in lowered.programs for s in p.sends)
    for program in lowered.programs:
        received = []
        for instruction in program.instructions:
            if isinstance(instruction, Receive):
                received.append(order.index(instruction.message.tag))
            elif isinstance(instruction, Send):
                assert order.index(instruction.message.tag) > max(received, default=-1)


class Meeting:
    """Where ranks of one process meet: a transfer ends when both of its ranks are at it."""

    def __init__(self):
        self.changed = threading.Condition()
        self.there, self.done = {}, set()

    def meet(self, key, arrays):
        with self.changed:
            if key not in self.there:
                self.there[key] = arrays
                assert self.changed.wait_for(lambda: key in self.done, 20), "nobody came"
                return arrays or self.there[key]
            arrays = arrays or self.there[key]
            self.there[key] = arrays
            self.done.add(key)
            self.changed.notify_all()
            return arrays


class MeetingTransport(DeviceTransport):
    """A `DeviceTransport` between the threads of one process."""

    def __init__(self, rank, num_ranks, meeting):
        self.meeting = meeting
        super().__init__(rank, [jax.devices()[0]] * num_ranks)

    def _put(self, message, arrays) -> Any:
        if self.rank in (message.source, message.target):
            arrays = self.meeting.meet((self._call, message.tag), arrays)
        return arrays


@pytest.mark.parametrize("seed", range(4))
def test_transport_of_ranks_that_meet_gives_what_one_process_gives(seed):
    programs = programs_of(random_table(100 + seed))
    order, meeting = transfer_order(programs), Meeting()
    size = len(programs[0].instructions) and programs[0].num_slots

    def task(number):
        def run(*values):
            time.sleep(random.random() * 1e-3)
            return (jax.device_put(np.float32(number + 1) + sum(np.float32(v) for v in values)),)

        return run

    transports = [MeetingTransport(p.rank, len(programs), meeting) for p in programs]
    executors = []
    for program, transport in zip(programs, transports, strict=True):
        transport.expect(order)
        transport.begin(0)
        executors.append(Executor(program, [task(n) for n in range(size)], transport))
    waits = [blocked(e.execute, p.instructions) for e, p in zip(executors, programs, strict=True)]
    for wait in waits:
        wait(20)
    for transport in transports:
        transport.close()
    wanted = [np.float32(0.0)] * size
    for _, chunk in interleave(programs):
        for instruction in chunk:
            if isinstance(instruction, Run):
                (n,) = instruction.outputs
                wanted[n] = np.float32(n + 1) + sum(wanted[i] for i in instruction.inputs)
    for executor in executors:
        for n, value in enumerate(executor.slots):
            if value is not None:
                assert float(value) == float(wanted[n])


def test_all_ranks_ask_jax_for_the_same_transfers(monkeypatch):
    """JAX counts keys in each process, one for each array and device: else three ranks diverge."""
    devices = np.array(jax.devices()[:6]).reshape(3, 2)
    homes = [jax.sharding.Mesh(own, ("data",)) for own in devices]
    specs = ((("data",), ()), ((), ()), ((),))
    sizes = ((4, 3), (2, 2), (0,))  # the last one has no bytes, and stays
    avals = [jax.ShapeDtypeStruct(size, np.float32) for size in sizes]
    names = tuple("abc")
    crossing = [
        Message(n, n % 3, (n + 1 + n // 3) % 3, names, ("edge",) * 3, tuple(avals), specs)
        for n in range(6)
    ]
    asked = {rank: [] for rank in range(3)}
    current = []

    def device_put(arrays, shardings):
        if arrays[0].sharding.device_set != shardings[0].device_set:
            asked[current[0]].append([(a.shape, a.dtype, a.sharding, s)
                                      for a, s in zip(arrays, shardings, strict=True)])  # fmt: skip
        return arrays

    def elsewhere(array_type, sharding):
        shape, dtype = array_type.host_shape, array_type.host_dtype
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    transports = [DeviceTransport(rank, homes) for rank in range(3)]
    monkeypatch.setattr(_device.jax, "device_put", device_put)
    monkeypatch.setattr(_device, "_elsewhere", elsewhere)
    for rank, transport in enumerate(transports):
        transport.close()
        current[:] = [rank]
        for message in crossing:
            shardings = [sharding_in(homes[message.source], spec) for spec in specs]
            own = list(map(elsewhere, map(_device.ArrayType.of, avals[:2]), shardings))
            transport._put(message, own if message.source == rank else None)
    assert len(asked[0]) == 6 and all(len(arrays) == 2 for arrays in asked[0])
    assert asked[0] == asked[1] == asked[2]


def test_devices_of_different_kinds_are_an_error_that_says_why(monkeypatch):
    kinds = ["H100", "H100", "A100"]
    devices = [SimpleNamespace(process_index=n, device_kind=kind) for n, kind in enumerate(kinds)]
    monkeypatch.setattr(jax, "devices", lambda: devices[:2])
    assert rank_homes() == tuple(devices[:2])
    monkeypatch.setattr(jax, "devices", lambda: devices)
    with pytest.raises(ValueError, match=r"one kind.*rank 1 on H100, rank 2 on A100.*'auto'"):
        rank_homes()


# ---- failure ------------------------------------------------------------------------------------


def test_abort_wakes_a_receive_whose_turn_never_comes():
    x = jax.numpy.ones(2)
    never, awaited = (
        device_rank.message([x], tag, *ends) for tag, ends in ((0, (0, 1)), (1, (1, 0)))
    )
    transport = DeviceTransport(0, [jax.devices()[0]] * 2)
    transport.expect([never, awaited])
    transport.begin(1)
    wait = blocked(transport.receive, awaited)
    time.sleep(0.1)
    start = time.monotonic()
    transport.abort(ValueError("enough"))
    with pytest.raises(Aborted) as caught:
        wait(2)
    assert time.monotonic() - start < 1
    assert str(caught.value.__cause__) == "enough"
    with pytest.raises(Aborted):
        transport.send([x], never)
    with pytest.raises(RuntimeError, match="start the processes of the ranks anew"):
        transport.reset(1)
    transport.close()


def test_failure_of_a_transfer_reaches_the_receive_and_is_told():
    class Broken(DeviceTransport):
        def _put(self, message, arrays):
            raise OSError("the wire is cut")

    told = []
    x = jax.numpy.ones(2)
    transport = Broken(0, [jax.devices()[0]] * 2)
    transport.on_failure = told.append
    awaited = device_rank.message([x], 0, 1, 0)
    transport.expect([awaited])
    transport.begin(1)
    with pytest.raises(Aborted) as caught:
        transport.receive(awaited)
    assert "the wire is cut" in str(caught.value.__cause__)
    transport.close()
    assert [str(error) for error in told] == ["the wire is cut"]


# ---- processes joined by JAX --------------------------------------------------------------------


LAUNCHED = """
import jax
from jaxpp.runtime.transport import free_port, join_processes

join_processes(f"127.0.0.1:{free_port()}", 1, 0, host="127.0.0.1")
print(*(jax.config.read(f"jax_{kind}_visible_devices") for kind in ("cuda", "rocm")))
print(jax.process_count())
"""


@pytest.fixture
def kept_ports():
    """Gives up the ports that a test has found."""
    yield _processes._kept_ports
    while _processes._kept_ports:
        _processes._kept_ports.pop().close()


def test_a_free_port_is_kept_for_this_process(kept_ports):
    """JAX listens there (as above, and in all tests of joined processes), and no other program."""
    port = free_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))


def test_a_launcher_does_not_choose_among_the_devices_that_a_worker_sees():
    """Under Slurm JAX would take the GPU of the number of the process that has started Ray."""
    slurm = {"JOB_ID": 7, "STEP_NODELIST": "a", "NTASKS": 8, "PROCID": 3, "LOCALID": 3}
    launched = {f"SLURM_{name}": str(value) for name, value in slurm.items()}
    launched |= {"JAX_LOCAL_DEVICE_IDS": "2", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", LAUNCHED]
    found = subprocess.run(
        command, env=os.environ | launched, capture_output=True, text=True, timeout=60
    )
    assert found.stdout.split() == ["all", "all", "1"], found.stderr


def run_ranks(scenario, num_ranks, alive=lambda rank: True):
    """Starts the processes of a scenario, and gives what those that live to tell have printed."""
    coordinator = f"127.0.0.1:{free_port()}"
    _processes._kept_ports.pop().close()  # another process is going to listen there
    environment = dict(os.environ, JAX_PLATFORMS="cpu", NPROC="1", PYTHONPATH=str(ROOT))
    command = [sys.executable, device_rank.__file__, scenario]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(num_ranks), coordinator],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        return {r: json.loads(p.stdout.readline()) for r, p in enumerate(processes) if alive(r)}
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


@pytest.fixture(scope="module")
def found():
    return run_ranks("all", 3)


def test_arrays_of_every_dtype_arrive_as_they_were(found):
    assert [found[rank]["wrong"] for rank in range(3)] == [[], [], []]
    assert [found[rank]["messages"] for rank in range(3)] == [1, 2, 2]


@pytest.mark.parametrize("name, schedule, num_stages", device_rank.SCHEDULES)
def test_step_of_processes_is_bitwise_that_of_one_process(found, name, schedule, num_stages):
    lowered = device_rank.lower(schedule, 3, num_stages)
    step = lowered.compile()
    params, x = device_rank.arguments(num_stages)
    got = {}
    for rank in range(3):
        got |= found[rank][name]
    for call in range(2):
        params, value = step(params, x)
        for n, leaf in enumerate(jax.tree.leaves((params, value))):
            assert got[f"{call}.{n}"] == device_rank.digest(leaf)


def test_abort_wakes_a_process_that_waits_for_another(found):
    assert all(found[rank]["aborted"] < 1 for rank in range(3))


def test_death_of_a_rank_ends_the_wait_of_another():
    found = run_ranks("death", 3, alive=lambda rank: rank != 2)
    assert found[0]["error"] in ("Aborted", "PeerLost")
    assert found[0]["after"] < 4


# ---- the choice ---------------------------------------------------------------------------------


def gpu(device, host="a"):
    return RankDevices("gpu", host, (device,))


@pytest.mark.parametrize(
    "ranks, flag, wanted",
    [
        ([gpu("0"), gpu("1")], "auto", "socket"),
        ([RankDevices("cpu", "a", ("0",))] * 2, "auto", "socket"),
        ([RankDevices("cpu", "a", ("0",))] * 2, "device", "device"),
        ([gpu("0"), gpu("0", "b")], "device", "device"),
        ([gpu("0"), gpu("1")], "socket", "socket"),
        ([gpu("0"), gpu("1")], "tcp", "socket"),
        ([gpu("0"), gpu("1")], "unix", "socket"),
        ([gpu("0"), gpu("1")], "device", "device"),
    ],
)
def test_sockets_are_the_transport_unless_devices_are_asked_for(ranks, flag, wanted):
    assert choose_transport(ranks, flag) == wanted


def test_devices_that_cannot_reach_each_other_are_an_error_that_says_why():
    with pytest.raises(ValueError, match=r"ranks 1 and 2 share device 7 of host a"):
        choose_transport([gpu("0"), gpu("7"), gpu("7")], "device")
    with pytest.raises(ValueError, match=r"rank 0 on gpu, rank 1 on cpu"):
        choose_transport([gpu("0"), RankDevices("cpu", "a", ("0",))], "device")
    with pytest.raises(ValueError, match=r"rank 1 on host a are not known"):
        choose_transport([gpu("0"), RankDevices("gpu", "a", ())], "device")
    with pytest.raises(ValueError, match=r"'nccl' is not known; it is one of auto, socket"):
        choose_transport([gpu("0"), gpu("1")], "nccl")  # pyright: ignore[reportArgumentType]
