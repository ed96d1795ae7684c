"""What is true on a host with a GPU, which this project assumes or would like to use; ten minutes.

    python -m benchmarks.gpu_facts
    python -m benchmarks.gpu_facts --facts=memory,tasks

It prints a table with a fact on each line, or why it was not measured. Each group of facts has a
process of its own, so that an error of CUDA ends no other one. One GPU is enough for all but the
copies between two. It needs JAX, Ray and the driver's library.
"""

import array
import collections
import ctypes
import dataclasses
import functools
import multiprocessing
import os
import signal
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from absl import app, flags

_FACTS = flags.DEFINE_list("facts", [], "Groups of facts, by name; by default all.")

#: A fact: what was asked, and the answer.
Fact = tuple[str, str]
MIB = 1 << 20
SIZES = (1 * MIB, 32 * MIB, 256 * MIB)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise SystemExit(f"unexpected arguments: {argv[1:]}")
    chosen = _FACTS.value or list(GROUPS)
    if unknown := [name for name in chosen if name not in GROUPS]:
        raise SystemExit(f"--facts: there is no {unknown[0]!r}; give some of {', '.join(GROUPS)}")
    for name in chosen:
        for what, answer in ask(GROUPS[name]):
            print(f"{name:9} {what:52} {answer}", flush=True)


@dataclasses.dataclass(frozen=True)
class Group:
    """Facts that one function measures, in a process of its own; it takes no arguments."""

    measure: Callable[[], Iterator[Fact]]
    about: str
    gpus: int = 1
    seconds: float = 120.0


def ask(group: Group) -> list[Fact]:
    """Measures the facts of a group, or says why they were not."""
    if (there := count_gpus()) < group.gpus:
        missing = "no GPU" if not there else f"{group.gpus} GPUs needed, {there} there"
        return [(group.about, f"not measured: {missing}")]
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_measure, args=(group.measure, theirs))
    child.start()
    theirs.close()
    deadline, facts = time.monotonic() + group.seconds, []
    try:
        while ours.poll(max(0.0, deadline - time.monotonic())):
            if (fact := ours.recv()) is None:
                return facts
            facts.append(fact)
        return [*facts, ("the rest", f"not measured: no answer in {group.seconds:.0f} s")]
    except EOFError:
        return [*facts, ("the rest", "not measured: the process has died")]
    finally:
        child.kill()
        child.join()


def _measure(measure: Callable[[], Iterator[Fact]], pipe: Any) -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.3")  # several processes share a GPU
    try:
        for fact in measure():
            pipe.send(fact)
    except Exception as error:
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        pipe.send(("the rest", f"not measured: {text}"))
    pipe.send(None)


def least(act: Callable[[], Any], count: int = 10) -> float:
    """Returns the least seconds that something takes."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        act()
        times.append(time.perf_counter() - start)
    return min(times)


def rate(nbytes: int, seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms, {nbytes / seconds / 1e9:.1f} GB/s"


def filled(nbytes: int, value: int = 3) -> Any:
    import jax
    import jax.numpy as jnp

    return jax.block_until_ready(jnp.full(nbytes // 4, value, jnp.int32))


# ---- the memory of JAX's arrays, by the driver ---------------------------------------------------


class Cuda:
    """Functions of the CUDA driver; each raises where it fails."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self("cuInit", 0)

    def __call__(self, name: str, *args: Any) -> None:
        if code := getattr(self.library, name)(*args):
            text = ctypes.c_char_p()
            self.library.cuGetErrorName(code, ctypes.byref(text))
            raise RuntimeError(f"{name}: {text.value.decode() if text.value else code}")

    def enter(self) -> None:
        """Makes the context that JAX uses on the first GPU that of this thread."""
        context = ctypes.c_void_p()
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self("cuCtxSetCurrent", context)

    def attribute(self, pointer: int, number: int, kind: Any = ctypes.c_uint64) -> int:
        value = kind()
        self("cuPointerGetAttribute", ctypes.byref(value), number, ctypes.c_uint64(pointer))
        return value.value

    def range_of(self, pointer: int) -> tuple[int, int]:
        """The start and the size of the allocation that a pointer lies in."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        at = ctypes.c_uint64(pointer)
        self("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), at)
        return base.value, size.value

    def export(self, pointer: int) -> int:
        """A file descriptor of the allocation that a pointer lies in."""
        handle, descriptor = ctypes.c_uint64(), ctypes.c_int(-1)
        self("cuMemRetainAllocationHandle", ctypes.byref(handle), ctypes.c_void_p(pointer))
        try:
            out = ctypes.byref(descriptor)
            self("cuMemExportToShareableHandle", out, handle, 1, ctypes.c_uint64(0))
        finally:
            self("cuMemRelease", handle)
        return descriptor.value

    def map(self, descriptor: int, size: int) -> int:
        """Maps the allocation of another process, and returns its address."""
        none, length = ctypes.c_uint64(0), ctypes.c_size_t(size)
        handle, at = ctypes.c_uint64(), ctypes.c_uint64()
        given = ctypes.c_void_p(descriptor)
        self("cuMemImportFromShareableHandle", ctypes.byref(handle), given, 1)
        self("cuMemAddressReserve", ctypes.byref(at), length, ctypes.c_size_t(0), none, none)
        self("cuMemMap", at, length, ctypes.c_size_t(0), handle, none)
        access = (ctypes.c_int * 3)(1, 0, 3)  # a device; its number; to read and to write
        self("cuMemSetAccess", at, length, access, ctypes.c_size_t(1))
        return at.value

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copies between two places of the GPU's memory, and waits."""
        stream = ctypes.c_void_p(0)
        places = ctypes.c_uint64(target), ctypes.c_uint64(source)
        self("cuMemcpyDtoDAsync_v2", *places, ctypes.c_size_t(nbytes), stream)
        self("cuStreamSynchronize", stream)


@functools.cache
def count_gpus() -> int:
    """The GPUs that the driver sees; JAX, which would take their memory, is not started."""
    count = ctypes.c_int()
    try:
        Cuda()("cuDeviceGetCount", ctypes.byref(count))
    except (OSError, RuntimeError):
        return 0
    return count.value


def memory() -> Iterator[Fact]:
    """What the memory of a JAX array allows."""
    x, cuda = filled(32 * MIB), Cuda()
    cuda.enter()
    pointer = x.unsafe_buffer_pointer()
    base, size = cuda.range_of(pointer)
    handles = cuda.attribute(pointer, 14)  # CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES
    yield "device", x.device.device_kind
    yield "legacy CUDA IPC", str(bool(cuda.attribute(pointer, 10, ctypes.c_int)))
    yield "exported by descriptor; by a fabric handle", f"{bool(handles & 1)}; {bool(handles & 8)}"
    yield "a NIC may read it (GPUDirect RDMA)", str(bool(cuda.attribute(pointer, 15, ctypes.c_int)))
    yield "allocation", f"{size // MIB} MiB, the array at {(pointer - base) // MIB} MiB"
    os.close(cuda.export(pointer))
    yield "descriptor", "made"
    yield from _mapped(cuda, x.nbytes)


def _mapped(cuda: Cuda, nbytes: int) -> Iterator[Fact]:
    """Copies out of the memory of another process, also once that has been killed."""
    ours, theirs = socket.socketpair()
    other = multiprocessing.get_context("spawn").Process(target=_share, args=(theirs, nbytes))
    other.start()
    try:
        note, data, _, _ = ours.recvmsg(4096, socket.CMSG_SPACE(4))
        size, offset = map(int, note.split())
        source = cuda.map(array.array("i", data[0][2])[0], size) + offset
        target = filled(nbytes, 0)  # nobody else has it: what is written here is what JAX reads
        copy = functools.partial(cuda.copy, target.unsafe_buffer_pointer(), source, nbytes)
        yield "copy from another process, 32 MiB", rate(nbytes, least(copy))
        yield "it has that process's values", str(bool((target == 5).all()))
        assert other.pid is not None
        os.kill(other.pid, signal.SIGKILL)
        other.join()
        yield "copy once that process was killed", rate(nbytes, least(copy))
    finally:
        other.kill()


def _share(pipe: socket.socket, nbytes: int) -> None:
    x, cuda = filled(nbytes, 5), Cuda()
    cuda.enter()
    base, size = cuda.range_of(x.unsafe_buffer_pointer())
    note = f"{size} {x.unsafe_buffer_pointer() - base}".encode()
    descriptor = array.array("i", [cuda.export(base)])
    pipe.sendmsg([note], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptor)])
    time.sleep(600)


# ---- copies by JAX -------------------------------------------------------------------------------


def near(sizes: tuple[int, ...] = SIZES) -> Iterator[Fact]:
    """Copies by device_put, on one device and to a second one."""
    import jax

    for target in jax.devices()[:2]:
        for nbytes in sizes:
            x = filled(nbytes)

            def copy(x=x, target=target):
                jax.block_until_ready(jax.device_put(x, target, may_alias=False))

            yield f"{x.device} to {target}, {nbytes // MIB} MiB", rate(nbytes, least(copy))
    if len(jax.devices()) < 2:
        yield "to a second device", "not measured: there is one"


def staging(sizes: tuple[int, ...] = SIZES) -> Iterator[Fact]:
    """Copies to memory of the host and back, pinned and not."""
    import jax
    import numpy as np

    device = jax.devices()[0]
    pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    back = jax.sharding.SingleDeviceSharding(device, memory_kind="device")
    for nbytes in sizes:
        x, size = filled(nbytes), f"{nbytes // MIB} MiB"
        host, own = jax.block_until_ready(jax.device_put(x, pinned)), np.ones(nbytes // 4, np.int32)
        to = lambda a, where: jax.block_until_ready(jax.device_put(a, where))  # noqa: E731
        yield f"to pinned_host, {size}", rate(nbytes, least(functools.partial(to, x, pinned)))
        yield f"from pinned_host, {size}", rate(nbytes, least(functools.partial(to, host, back)))
        yield f"from NumPy, {size}", rate(nbytes, least(functools.partial(to, own, device)))
        yield f"to NumPy, {size}", rate(nbytes, least(lambda x=x: np.array(x + 0)))


# ---- steps ---------------------------------------------------------------------------------------


def placed(mesh: Any, schedule: Any = None, width: int = 1024) -> tuple[Any, Any, Any]:
    """A step of two stages with 8 microbatches, and its arguments."""
    import jax
    import jax.numpy as jnp

    import jaxpp

    def loss_fn(weights, x):
        for i, w in enumerate(weights):
            x = jaxpp.pipeline_enter_stage(x) if i == 4 else x
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    grad = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss_fn)), 8)
    step = jaxpp.place(jaxpp.schedule(grad, schedule or jaxpp.schedules.OneFOneB()), mesh)
    return step, [jnp.eye(width)] * 8, jnp.ones((8 * width, width))


def shared() -> list[Any]:
    """The devices of two ranks that share the first one."""
    import jax

    return jax.devices()[:1] * 2


def step_seconds(mesh: Any) -> str:
    step, weights, x = placed(mesh)

    def call() -> None:
        float(step(weights, x)[0])

    call()
    return f"{1e3 * least(call):.2f} ms"


def local() -> Iterator[Fact]:
    import jaxpp

    yield "a step, both ranks in this process", step_seconds(jaxpp.MpmdMesh((2,), devices=shared()))


def remote(per_process: int) -> Iterator[Fact]:
    import jaxpp

    options: Any = {"ranks_per_process": per_process} if per_process > 1 else {}
    with jaxpp.RemoteMpmdMesh((2,), gpus_per_rank=0.5, **options) as mesh:
        yield f"a step, ranks of a worker process: {per_process}", step_seconds(mesh)


def offload(offloaded: bool) -> Iterator[Fact]:
    """The peak of the device, with activations in memory of the host or not."""
    import jax

    import jaxpp

    schedule = jaxpp.schedules.GPipe()  # which keeps all microbatches
    schedule = jaxpp.schedules.Offload(schedule) if offloaded else schedule
    step, weights, x = placed(jaxpp.MpmdMesh((2,), devices=shared()), schedule)
    jax.block_until_ready(step(weights, x))
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    how = "in pinned_host" if offloaded else "on the device"
    text = "the device does not tell" if peak is None else f"{peak / MIB:.0f} MiB at most"
    yield f"activations {how}", text


# ---- tasks in JAX's profile ----------------------------------------------------------------------


def tasks(width: int = 1024) -> Iterator[Fact]:
    """Whether the profile has each run of each task, as traces on CPU read it."""
    import jax

    import jaxpp
    from jaxpp._program import Run
    from jaxpp.runtime.trace._profile import events_of, read_profile

    mesh, calls = jaxpp.MpmdMesh((2,), devices=shared()), 3
    step, weights, x = placed(mesh, width=width)
    jax.block_until_ready(step(weights, x))
    with tempfile.TemporaryDirectory() as folder:
        mesh.start_trace(folder, times="waits")
        for _ in range(calls):
            jax.block_until_ready(step(weights, x))
        trace = mesh.stop_trace()
        profile = trace.profile_paths[0]
        found = collections.defaultdict(list)
        for (module, _), runs in read_profile(profile).items():
            found[module] += [(end - start) / 1e6 for start, end in runs.values()]
        stats = (stats for _, stats, *_ in events_of(profile) if "hlo_module" in stats)
        keys = sorted({key for own in stats for key in own})
    yield "attributes of operations", ", ".join(keys) or "no operation names its module"
    waited = collections.defaultdict(list)
    for run in trace.runs:
        waited[run.label.partition(".")[0]].append(1e3 * (run.end - run.start))
    runs = [i for p in step.programs for i in p.instructions if isinstance(i, Run) and i.task]
    counted = collections.Counter(run.label.partition(".")[0] for run in runs)
    for name, count in sorted(counted.items()):
        seen, there = found[f"jit_{name}"], statistics.median(waited[name])
        median = f", median {statistics.median(seen):.3f} ms" if seen else ""
        yield f"runs of {name} in the profile", f"{len(seen)} of {calls * count}{median}"
        yield f"runs of {name} by threads that wait", f"{len(waited[name])}, median {there:.3f} ms"


GROUPS = {
    "memory": Group(memory, "what the memory of an array allows"),
    "near": Group(near, "device_put on a GPU, and to a second one if there is"),
    "staging": Group(staging, "copies to memory of the host and back"),
    "local": Group(local, "a step in one process"),
    "worker": Group(functools.partial(remote, 2), "a step of two ranks in a worker process"),
    "workers": Group(functools.partial(remote, 1), "a step of two worker processes"),
    "kept": Group(functools.partial(offload, False), "peak with activations on the device"),
    "offload": Group(functools.partial(offload, True), "peak with activations in pinned_host"),
    "tasks": Group(tasks, "runs of tasks in JAX's profile"),
}


if __name__ == "__main__":
    app.run(main)
