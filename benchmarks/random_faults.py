"""Runs of a training with a random fault each: does each end with the right error, and go on?

    python -m benchmarks.random_faults --count=300
    python -m benchmarks.random_faults --count=300 --transport=jax

Trains on worker processes while one of nine kinds of faults befalls the run at a random moment
(see `faults.py`). In each run the error has to come in time and name the rank; then the mesh is
restarted, the last checkpoint loaded, and the training has to end with the bits of an undisturbed
one. Prints a table of the kinds:

- `error ms`: from the fault to its error, median and maximum;
- `restart s`: how long `mesh.restart()` took, median and maximum;
- `wrong`: runs with another error than the right one, or one that named another rank;
- `hangs`: runs that were not over after `--limit` seconds;
- `losses`: runs that could not go on from the last checkpoint to the same end.

It fails if there is one of the last three. Run number n is the same whenever it is made.
"""

import contextlib
import json
import pathlib
import statistics
import tempfile
import time
import traceback
from collections import Counter
from typing import Any

import psutil
from absl import app, flags

import jaxpp
from benchmarks import faults

_COUNT = flags.DEFINE_integer("count", 300, "Runs; the nine kinds come in turn.", 1)
_FIRST = flags.DEFINE_integer("first", 0, "The number of the first run.", 0)
_KINDS = flags.DEFINE_multi_enum("kinds", faults.KINDS, faults.KINDS, "Only these kinds.")
_RANKS = flags.DEFINE_integer("ranks", 3, "Worker processes.", 2)
_TRANSPORT = flags.DEFINE_string("transport", "auto", "That of the mesh.")
_LIMIT = flags.DEFINE_float("limit", 60.0, "Seconds after which a run counts as a hang.", 1.0)
_JSON = flags.DEFINE_string("json", None, "A file to write all runs to.")


def one_run(bench: faults.Bench, number: int) -> dict[str, Any]:
    """Makes a run; gives its row, with what went wrong, if something did."""
    fault = faults.Fault.random(number, bench.mesh.num_ranks)
    row: dict[str, Any] = {"number": number, "kind": fault.kind, "rank": fault.rank}
    try:
        # After Ctrl-C in the `close` of a manager its save goes on, as in Orbax, and makes files.
        kept = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        with kept as folder, faults.deadline(_LIMIT.value):
            found = faults.run_with_fault(bench, fault, pathlib.Path(folder), number)
    except faults.Hang as error:
        return row | {"failed": "hangs", "why": str(error)}
    except (Exception, KeyboardInterrupt) as error:
        traceback.print_exc()
        own = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        wrong = "check_error" in own or "_train_until_error" in own
        return row | {"failed": "wrong" if wrong else "losses", "why": repr(error)}
    return row | {"error": found.detection, "restart": found.restart, "message": found.message}


def fresh_bench(stack: contextlib.ExitStack) -> faults.Bench:
    """Makes a mesh with the step, instead of the one there was."""
    with contextlib.suppress(Exception):  # what a failed run has left may not shut down well
        stack.close()
    # Workers that start too slowly, on a busy host, are the mesh's own error, and no hang.
    how = {"transport": _TRANSPORT.value, "start_timeout": 0.8 * _LIMIT.value}
    mesh = jaxpp.RemoteMpmdMesh((_RANKS.value,), ("mpmd",), **how)
    return faults.Bench.on(stack.enter_context(mesh))


def runs() -> list[dict[str, Any]]:
    rows = []
    with contextlib.ExitStack() as stack:
        bench = fresh_bench(stack)
        before = held()
        for number in range(_FIRST.value, _FIRST.value + _COUNT.value):
            if faults.Fault.random(number, _RANKS.value).kind not in _KINDS.value:
                continue
            rows.append(one_run(bench, number))
            if "failed" in rows[-1]:
                print({k: v for k, v in rows[-1].items() if k != "message"}, flush=True)
                bench = fresh_bench(stack)
            elif len(rows) % 20 == 0:
                print(f"{len(rows)} runs", flush=True)
        print(f"threads and files of the driver: {before} before the runs, {held()} after")
    return rows


def held() -> tuple[int, int]:
    return psutil.Process().num_threads(), psutil.Process().num_fds()


def show(rows: list[dict[str, Any]]) -> Counter[str]:
    """Prints the table; gives the numbers of what went wrong."""
    failed: Counter[str] = Counter(row["failed"] for row in rows if "failed" in row)
    print(f"{'':10} runs  error ms: median    most  restart s: median  most  wrong hangs losses")
    for kind in [*faults.KINDS, "all"]:
        own = [row for row in rows if kind in (row["kind"], "all")]
        well = [row for row in own if "error" in row]
        if not own:
            continue
        cells = [""] * 4
        if well:
            times = [1e3 * row["error"] for row in well]
            restarts = [row["restart"] for row in well]
            cells = [f"{f(t):.{n}f}" for t, n in ((times, 0), (restarts, 2))
                     for f in (statistics.median, max)]  # fmt: skip
        bad = Counter(row["failed"] for row in own if "failed" in row)
        print(
            f"{kind:10} {len(own):4} {cells[0]:>17} {cells[1]:>7} {cells[2]:>18} {cells[3]:>5}"
            f" {bad['wrong']:6} {bad['hangs']:5} {bad['losses']:6}"
        )
    return failed


def main(_: list[str]) -> None:
    began = time.monotonic()
    rows = runs()
    failed = show(rows)
    print(f"{len(rows)} runs in {time.monotonic() - began:.0f} s")
    if _JSON.value:
        pathlib.Path(_JSON.value).write_text(json.dumps(rows, indent=1))
    if failed:
        raise SystemExit(f"Something went wrong: {dict(failed)}.")


if __name__ == "__main__":
    app.run(main)
