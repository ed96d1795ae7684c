"""Launched jobs with a random fault each: does every process end, in time, and name the culprit?

    python -m benchmarks.launched_faults --count=100
    python -m benchmarks.launched_faults --kinds=stop --first=200

Trains in two or three processes with torchrun's variables, of one or two ranks each, while a fault
befalls one of them at a random moment. All others have to end with an exit code that is not 0, and
an error that names the process; the losses until then have to be those of one process, to the bit.
Prints a table of the kinds:

- `seconds`: from the fault, or from the others' wait for a process that does not come, to the end
  of the last process, median and maximum;
- `late`: jobs in which that was more than `LIMIT` after the fault could be known;
- `wrong`: jobs with another error, or none, in some process;
- `hangs`: jobs that were not over after `--limit` seconds, or left a process behind;
- `losses`: jobs with another loss.

It fails if there is one of the last four. Job number n is the same whenever it is made.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import psutil
from absl import app, flags

import jaxpp
from benchmarks import faults, launching

#: The kinds: those of `faults.Fault`; "terminate" is a SIGTERM; "script" is an exception between
#: two calls; with "unequal" a process has another step, with "otherwise" it fetches what the others
#: do not; with "missing" it is never started, and with "early" killed while it starts.
KINDS = (
    "kill", "stop", "raise", "interrupt", "terminate", "unequal", "missing",
    "early", "script", "exit", "link", "feed", "otherwise",
)  # fmt: skip
#: Seconds that all others have to end once the fault can be known, on a busy host.
LIMIT = 20.0
#: The mesh's `heartbeat_timeout`, and its `start_timeout` where a process is missing, and else.
HEARTBEAT, MISSING, START = 2.0, 30.0, 200.0
#: Calls during which faults come.
CALLS = 6

_COUNT = flags.DEFINE_integer("count", 100, "Jobs; the kinds come in turn.", 1)
_FIRST = flags.DEFINE_integer("first", 0, "The number of the first job.", 0)
_KINDS = flags.DEFINE_multi_enum("kinds", KINDS, KINDS, "Only these kinds.")
_LIMIT = flags.DEFINE_float("limit", 120.0, "Seconds after a fault, for a hang.", 1.0)
_JSON = flags.DEFINE_string("json", None, "A file to write all jobs to.")


@dataclasses.dataclass(frozen=True)
class Job:
    """A job, and what befalls it.

    Args:
        number: its number, of which all else follows.
        processes: how many it has.
        ranks: how many each has.
        fault: what happens, to which rank, when.
        fed: whether ranks load the batches.
    """

    number: int
    processes: int
    ranks: int
    fault: faults.Fault
    fed: bool

    @staticmethod
    def random(number: int) -> "Job":
        """The job of a number; all kinds come in turn."""
        chance, kind = random.Random(number), KINDS[number % len(KINDS)]
        processes, ranks = chance.choice([2, 2, 3]), chance.choice([1, 2])
        victim = 0 if kind == "feed" else chance.randrange(processes)
        rank, peer = victim * ranks + chance.randrange(ranks), -1
        if kind == "link":  # between the ranks at which two processes meet
            above = victim + 1 < processes and (victim == 0 or chance.random() < 0.5)
            rank = (victim + 1) * ranks - 1 if above else victim * ranks
            peer = rank + 1 if above else rank - 1
        delay = chance.random() * {"early": 5.0, "raise": 0.0, "link": 0.0}.get(kind, 0.05)
        # Before the first call there is nothing to fetch.
        call, position = chance.randrange(int(kind == "otherwise"), CALLS), chance.random()
        fault = faults.Fault(kind, rank, call, position, delay, peer)
        fed = kind == "feed" or chance.random() < 0.5
        return Job(number, processes, ranks, fault, fed)

    @property
    def victim(self) -> int:
        """The process with the fault."""
        return self.fault.rank // self.ranks

    @property
    def others(self) -> list[int]:
        """The processes that have to hear of it."""
        return [n for n in range(self.processes) if n != self.victim]

    @property
    def unknown(self) -> float:
        """The seconds for which nobody can know of the fault."""
        return {"stop": HEARTBEAT, "missing": MISSING, "early": MISSING}.get(self.fault.kind, 0.0)


# ---- in a process of the job --------------------------------------------------------------------


def train(job: Job, folder: pathlib.Path) -> None:
    """Trains until the fault ends it; writes the losses to a file of the process."""
    kind, me = job.fault.kind, int(os.environ["RANK"])
    struck, chance = me == job.victim, random.Random(job.number)
    start = MISSING if kind in ("missing", "early") else START
    if kind in ("missing", "early") and me == job.others[0]:
        faults.write_note(str(folder / "note"))  # the wait begins
    ranks = job.processes * job.ranks
    mesh = jaxpp.LaunchedMpmdMesh((ranks,), heartbeat_timeout=HEARTBEAT, start_timeout=start)
    with mesh, open(folder / f"losses{me}", "w") as losses:
        feed: Any = {"feed": {3: faults.load_batch}} if job.fed else {}
        if struck and kind == "unequal":
            faults.MICROBATCHES *= 2
            faults.write_note(str(folder / "note"))
        step: Any = jaxpp.place(faults.train_step, mesh, donate_argnums=(0, 1), **feed)
        pids = mesh.apply(faults.pid_of, {rank: () for rank in range(ranks)})
        state = faults.start(ranks)
        if struck:
            faults.arm(None, job.fault, str(folder / "note"), pids)
        for number in itertools.count():
            if struck and number == job.fault.call:
                strike(job.fault, str(folder / "note"), state)
            *state, loss = step(*state, number if job.fed else faults.batch(number))
            if chance.random() < 0.5:  # else several steps are under way
                losses.write(f"{number} {np.asarray(loss).tobytes().hex()}\n")
                losses.flush()


def strike(fault: faults.Fault, note: str, state: Any) -> None:
    """Does what befalls the script, and not its tasks and messages, before a call."""
    match fault.kind:
        case "interrupt":
            faults.interrupt_later(fault.delay, pathlib.Path(note))
        case "terminate":

            def terminate() -> None:
                time.sleep(fault.delay)
                faults.write_note(note)
                os.kill(os.getpid(), signal.SIGTERM)

            threading.Thread(target=terminate, daemon=True).start()
        case "script":
            faults.write_note(note)
            raise faults.TaskError("this script does not work")
        case "otherwise":
            faults.write_note(note)
            jaxpp.gather(state[0][-1])


# ---- around it ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Ended:
    """The end of a job.

    Args:
        pids: the numbers of its processes on the host.
        codes: their exit codes; None where one has not ended.
        outputs: what they have written.
        seconds: from the fault to the end of the last process but the one with the fault.
        left: the processes that they have left behind.
    """

    pids: dict[int, int]
    codes: dict[int, int | None]
    outputs: dict[int, str]
    seconds: float
    left: list[int]


@contextlib.contextmanager
def started(job: Job, folder: pathlib.Path) -> Iterator[dict[int, "subprocess.Popen[str]"]]:
    """Starts the processes of a job; none lives longer."""
    command = [sys.executable, "-m", "benchmarks.launched_faults"]
    command += [f"--job={job.number}", f"--folder={folder}"]
    missing = [job.victim] if job.fault.kind == "missing" else []

    def output(number: int) -> Any:
        return open(folder / f"output{number}", "w")

    processes = launching.launch(
        job.processes, command, missing, stdout=output, stderr=lambda _: subprocess.STDOUT
    )
    try:
        yield processes
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def run(job: Job, folder: pathlib.Path, limit: float) -> Ended:
    """Runs a job to its end, or to so many seconds after its fault."""
    kind, note, ended = job.fault.kind, folder / "note", {}
    before = set(psutil.pids())
    with started(job, folder) as processes:
        began = time.monotonic()
        struck = None
        while len(ended) < len(processes):
            now = time.monotonic()
            for number, process in processes.items():
                if process.poll() is not None:
                    ended.setdefault(number, now)
            if kind == "early" and now - began >= job.fault.delay:
                processes[job.victim].kill()
            if struck is None and note.exists():
                struck = faults.read_note(note)["time"]
            if now - (began + START if struck is None else struck) > limit:
                break
            time.sleep(0.01)
        codes = {n: process.poll() for n, process in processes.items()}
    # It may have been written when all had ended.
    struck = faults.read_note(note)["time"] if struck is None and note.exists() else struck
    last = max((ended[n] for n in job.others if n in ended), default=began)
    seconds = 0.0 if struck is None else last - struck
    pids = {n: process.pid for n, process in processes.items()}
    outputs = {n: (folder / f"output{n}").read_text() for n in processes}
    return Ended(pids, codes, outputs, seconds, left_behind(set(psutil.pids()) - before, folder))


def left_behind(new: set[int], folder: pathlib.Path) -> list[int]:
    """The processes of a job that are still there."""
    found = []
    for pid in new:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if any(str(folder) in word for word in process.cmdline()):
                found.append(pid)
    return found


@functools.cache
def undisturbed(ranks: int) -> list[str]:
    """The losses of the first steps in one process, as they are written."""
    devices = [jax.devices()[n % jax.device_count()] for n in range(ranks)]
    step: Any = jaxpp.place(faults.train_step, jaxpp.MpmdMesh((ranks,), devices=devices))
    state, losses = faults.start(ranks), []
    for number in range(2 * CALLS):
        *state, loss = step(*state, faults.batch(number))
        losses.append(f"{number} {np.asarray(loss).tobytes().hex()}")
    return losses


def patterns(job: Job, pids: Mapping[int, int]) -> list[str]:
    """What the error of each other process has to match: one of them."""
    victim, count = job.victim, job.processes
    absent = r"has not found process 0" if victim == 0 else (
        rf"of {count} processes, \[.*\b{victim}\b.*\] have not come"
    )  # fmt: skip
    failed = rf"RankError: ranks? .*\(process {pids.get(victim)} on .* has failed"
    died = rf"{failed}: its process has ended"
    match job.fault.kind:
        case "kill" | "exit" | "terminate":
            return [died]
        case "stop":  # the process that finds it kills it, so that a third one may hear of that
            return [rf"{failed}: no sign of life .* its process is stopped", died]
        case "raise":
            return [rf"{failed}.*TaskError: this task"]
        case "script":
            return [rf"{failed} in the script: .*TaskError: this script"]
        case "feed":
            told = ".*TaskError: there is no such batch"
            # Of the first batch all ask rank 0 for the types, and so the scripts of all raise it.
            first = [told] * (job.fault.call == 0)
            return [rf"{failed} in the function that feeds {told}", *first]
        case "interrupt":
            return [rf"{failed}.*: KeyboardInterrupt"]
        case "link":
            pair = f"rank {job.fault.rank} .*rank {job.fault.peer} "
            other = f"rank {job.fault.peer} .*rank {job.fault.rank} "
            return [f"RankError: The connection between ({pair}|{other}).* broke"]
        case "unequal":
            if count == 2:
                return ["process 1 differs from process 0 first in"]
            return [rf"process {victim} differs from process \d first in"]
        case "otherwise":
            return ["RankError: .*do not make the same calls", "the processes do not make the same"]
        case "missing":
            return [absent]
    unknown = rf"RankError: ranks? {victim * job.ranks}.*process not known yet .*: its process has"
    return [absent, died, unknown]  # early


def judge(job: Job, ended: Ended, folder: pathlib.Path) -> tuple[str, str]:
    """What went wrong in a job, by the table's columns, and why; two empty texts where nothing."""
    running = [n for n, code in ended.codes.items() if code is None]
    if running or ended.left:
        return "hangs", f"processes {running} have not ended, {ended.left} are left"
    if well := [n for n, code in ended.codes.items() if code == 0]:
        return "wrong", f"processes {well} have ended as if all were well"
    for number in job.others:
        wanted = patterns(job, ended.pids)
        if not any(re.search(pattern, ended.outputs[number]) for pattern in wanted):
            return "wrong", f"process {number} does not say {wanted}"
        written = folder / f"losses{number}"
        for line in written.read_text().splitlines() if written.exists() else ():
            expected = undisturbed(job.processes * job.ranks)
            place = int(line.split()[0])
            if place < len(expected) and line != expected[place]:
                return "losses", f"process {number} has {line}, not {expected[place]}"
    if ended.seconds > job.unknown + LIMIT:
        return "late", f"{ended.seconds:.1f} s from the fault to the end of the others"
    return "", ""


def one_job(number: int, limit: float) -> dict[str, Any]:
    """Makes a job; gives its row, with what went wrong, if something did."""
    job = Job.random(number)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        ended = run(job, folder, limit)
        failed, why = judge(job, ended, folder)
    row = {"number": number, "kind": job.fault.kind, "seconds": ended.seconds}
    return row | ({"failed": failed, "why": why, "outputs": ended.outputs} if failed else {})


def show(rows: list[dict[str, Any]]) -> Counter[str]:
    """Prints the table; gives the numbers of what went wrong."""
    print(f"{'':10} jobs  seconds: median  most   late wrong hangs losses")
    for kind in [*KINDS, "all"]:
        own = [row for row in rows if kind in (row["kind"], "all")]
        if not own:
            continue
        times = [row["seconds"] for row in own]
        bad = Counter(row["failed"] for row in own if "failed" in row)
        print(
            f"{kind:10} {len(own):4} {statistics.median(times):16.1f} {max(times):5.1f}"
            f" {bad['late']:6} {bad['wrong']:5} {bad['hangs']:5} {bad['losses']:6}"
        )
    return Counter(row["failed"] for row in rows if "failed" in row)


_JOB = flags.DEFINE_integer("job", None, "The job of which this is a process.")
_FOLDER = flags.DEFINE_string("folder", "", "The folder of that job.")


def main(_: list[str]) -> None:
    if _JOB.value is not None:
        return train(Job.random(_JOB.value), pathlib.Path(_FOLDER.value))
    # A shell lets what it starts behind `&` ignore the signal, and so would the jobs.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    began, rows = time.monotonic(), []
    for number in range(_FIRST.value, _FIRST.value + _COUNT.value):
        if Job.random(number).fault.kind in _KINDS.value:
            rows.append(one_job(number, _LIMIT.value))
            print({k: v for k, v in rows[-1].items() if k != "outputs"}, flush=True)
            if _JSON.value:
                pathlib.Path(_JSON.value).write_text(json.dumps(rows, indent=1))
    failed = show(rows)
    print(f"{len(rows)} jobs in {time.monotonic() - began:.0f} s")
    if failed:
        raise SystemExit(f"Something went wrong: {dict(failed)}.")


if __name__ == "__main__":
    app.run(main)
