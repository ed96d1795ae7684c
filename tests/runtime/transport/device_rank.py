"""One rank of the tests of `DeviceTransport`: a process of its own, joined with the others.

    python device_rank.py SCENARIO RANK NUM_RANKS COORDINATOR

Prints what it found, as JSON.
"""

import faulthandler
import hashlib
import json
import math
import os
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

import jaxpp
from jaxpp._program import Message, Run
from jaxpp.runtime.arrays._types import to_host
from jaxpp.runtime.executor import Executor
from jaxpp.runtime.remote.calls import Pickled
from jaxpp.runtime.transport._device import DeviceTransport
from jaxpp.runtime.transport._errors import Aborted, PeerLost
from jaxpp.runtime.transport._order import transfer_order
from jaxpp.runtime.transport._processes import join_processes, rank_homes

DTYPES = (
    *("bool", "int2", "int4", "int8", "int16", "int32", "uint2", "uint4", "uint8", "uint32"),
    *("bfloat16", "float16", "float32", "complex64", "float4_e2m1fn", "float8_e3m4"),
    *("float8_e4m3", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e8m0fnu"),
)
SHAPES = ((), (3, 4), (0, 4))


def arrays_of_all_dtypes():
    arrays = [
        jax.device_put((np.arange(math.prod(shape)) % (2 + n % 2) % 2).reshape(shape).astype(dtype))
        for n, dtype in enumerate(DTYPES)
        for shape in SHAPES
    ]
    keys = [jax.random.key(7), jax.random.key(8, impl="rbg")]
    return [*arrays, *keys, np.zeros((2, 3), jax.dtypes.float0)]


def message(arrays, tag, source, target):
    names = tuple(f"x{n}" for n in range(len(arrays)))
    avals = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays)
    return Message(tag, source, target, names, ("edge",) * len(arrays), avals)


def loss(params, x):
    for n, w in enumerate(params):
        x = jnp.tanh(x @ w)
        if n + 1 < len(params):
            x = jaxpp.pipeline_enter_stage(x)
    return jnp.mean(x**2)


def train_step(schedule):
    grad_fn = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss)), 4)
    grad_fn = jaxpp.schedule(grad_fn, schedule)

    def step(params, x):
        value, grads = grad_fn(params, x)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value

    return step


def arguments(num_stages):
    keys = jax.random.split(jax.random.key(0), num_stages + 1)
    return [jax.random.normal(k, (8, 8)) for k in keys[1:]], jax.random.normal(keys[0], (8, 8))


def lower(schedule, num_ranks, num_stages):
    mesh = jaxpp.MpmdMesh((num_ranks,), devices=[jax.local_devices()[0]] * num_ranks)
    return jaxpp.place(train_step(schedule), mesh).lower(*arguments(num_stages))


def digest(array):
    return hashlib.sha256(to_host(array).tobytes()).hexdigest()


def train(transport, program_number, schedule, num_ranks, num_stages, calls):
    """Runs a step several times, without a wait between the calls; gives this rank's results."""
    lowered = lower(schedule, num_ranks, num_stages)
    bundle, device = lowered.bundle, jax.local_devices()[0]
    program = bundle.programs[transport.rank]
    used = {i.computation for i in program.instructions if isinstance(i, Run)}
    executables = [
        Pickled.of(c).compile(device) if n in used else None
        for n, c in enumerate(bundle.computations)
    ]
    executor = Executor(program, executables, transport)
    transport.expect(transfer_order(bundle.programs), program_number)
    flat = jax.tree.leaves(arguments(num_stages))
    outputs = {}
    for call in range(calls):
        transport.begin(1000 * program_number + call, program_number)
        for slot, value in program.constants:
            executor.slots[slot] = jax.device_put(value, device)
        for number, slot in program.inputs:
            value = outputs.get((call - 1, number))
            executor.slots[slot] = flat[number] if value is None else value
        executor.execute(program.instructions)
        outputs |= {(call, n): executor.slots[slot] for n, slot in program.outputs}
    return {f"{call}.{n}": digest(x) for (call, n), x in outputs.items()}


def scenario_all(rank, num_ranks):
    found = {}
    transport = DeviceTransport(rank, rank_homes())
    wanted = arrays_of_all_dtypes()
    messages = [message(wanted, 0, 0, 1), message(wanted, 1, 1, 2), message(wanted[:1], 2, 0, 2)]
    transport.expect(messages, 1)
    before = [message(wanted[3:4], -1, 2, 0), message(wanted[4:5], -2, 0, 1)]
    transport.begin(1, 1, before)
    for m, arrays in zip(
        (*before, *messages), (wanted[3:4], wanted[4:5], wanted, wanted, wanted[:1]), strict=True
    ):
        if m.source == rank:
            transport.send(arrays, m)
        elif m.target == rank:
            got = transport.receive(m)
            wrong = [
                str(n)
                for n, (a, b) in enumerate(zip(got, arrays, strict=True))
                if (a.shape, a.dtype, to_host(a).tobytes())
                != (b.shape, b.dtype, to_host(b).tobytes())
            ]
            found.setdefault("wrong", []).extend(wrong)
            found["messages"] = found.get("messages", 0) + 1
    for number, (name, schedule, num_stages) in enumerate(SCHEDULES, 2):
        found[name] = train(transport, number, schedule, num_ranks, num_stages, calls=2)
    transport.forget(1)
    found["aborted"] = aborted_after(transport, rank)
    transport.close()
    return found


SCHEDULES = (("zb_h1", jaxpp.schedules.ZeroBubbleH1(), 3),)


def aborted_after(transport, rank):
    """How long a receive waits after an abort, where the message before it was never sent."""
    peer = (rank + 1) % 3
    x = [jnp.ones(3)]
    never, awaited = message(x, 0, rank, peer), message(x, 1, peer, rank)
    transport.expect([never, awaited], 99)
    transport.begin(9999, 99)
    at = []

    def abort():
        at.append(time.monotonic())
        transport.abort(RuntimeError("enough"))

    threading.Timer(0.3, abort).start()
    try:
        transport.receive(awaited)
    except Aborted as error:
        assert str(error.__cause__) == "enough"
        return time.monotonic() - at[0]


def scenario_death(rank, num_ranks):
    """The last rank dies while rank 0 waits for it; rank 1 sees nothing of it."""
    transport = DeviceTransport(rank, rank_homes())
    x = [jnp.arange(4.0)]
    messages = [message(x, n, 2, 0) for n in range(4)]
    transport.expect(messages)
    transport.begin(1)
    if rank == 2:
        transport.send(x, messages[0])
        transport.settle([])
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        transport.receive(messages[0])
        start = time.monotonic()
        threading.Timer(2.5, transport.abort, [RuntimeError("the mesh says so")]).start()
        try:
            for m in messages[1:]:
                transport.receive(m)
        except (Aborted, PeerLost) as error:
            return {"error": type(error).__name__, "after": time.monotonic() - start}
    return {}


def main(scenario, rank, num_ranks, coordinator):
    faulthandler.dump_traceback_later(240, exit=True)  # a wait without an end says where
    join_processes(coordinator, num_ranks, rank, host="127.0.0.1")
    found = {"all": scenario_all, "death": scenario_death}[scenario](rank, num_ranks)
    print(json.dumps(found), flush=True)
    sys.stdin.read()  # until the test has seen all
    os._exit(0)  # without JAX's wait for processes that are gone


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
