"""Runs many random programs, makes those that fail smaller, and prints a table of the faults.

    python -m tests.programs.search --count=10000 --start=0

Programs run in a process of their own, which is started anew after a number of them, or where one
hangs or ends it. With `--seed` one program is printed and run.
"""

import argparse
import collections
import dataclasses
import json
import os
import queue
import subprocess
import sys
import threading
import time

SECONDS = 240  # that one program, or making it smaller, may take
BATCH = 60  # programs that one process runs
COMMAND = [sys.executable, "-m", "tests.programs.search"]


def prepare() -> None:
    """Makes devices, and leaves most of XLA's optimizations out, before JAX starts."""
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    fewer = os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] != "0"
    jax.config.update("jax_disable_most_optimizations", fewer)


def leave_out(names: list[str]) -> None:
    """Draws no programs with some operations, such as those of a fault that is known."""
    from tests.programs import operations

    for name in names:
        del operations.RULES[name]


def run_seeds(seeds: list[int]) -> None:
    """Runs programs and prints a line of JSON for each: what a process does."""
    import gc

    import jax

    from jaxpp.runtime.executor import _compile
    from tests.programs import draw, run

    for seed in seeds:
        outcome = run.run(draw.draw(seed))
        line = {"seed": seed, **dataclasses.asdict(outcome)}
        print("OUTCOME " + json.dumps(line), file=sys.__stdout__, flush=True)
        _compile.clear_cache()
        jax.clear_caches()
        gc.collect()


def _same(one, other) -> bool:
    return (one.verdict, one.kind) == (other.verdict, other.kind)


def outcomes(seeds: list[int], options: list[str]):
    """Runs programs in processes, and gives the outcome of each."""
    left = list(seeds)
    while left:
        process = subprocess.Popen(
            [*COMMAND, *options, "--worker", *map(str, left[:BATCH])],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        lines: queue.Queue = queue.Queue()
        threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
        for seed in left[:BATCH]:
            try:
                line = lines.get(timeout=SECONDS)
            except queue.Empty:
                line = "hangs"
            left.remove(seed)
            if line is not None and line != "hangs":
                yield json.loads(line)
                continue
            process.kill()
            kind = "hangs" if line else f"ends the process ({process.wait()})"
            yield {"seed": seed, "verdict": "failed", "kind": kind, "message": ""}
            break
        process.wait()


def _read(stream, lines) -> None:
    for line in stream:
        if line.startswith("OUTCOME "):
            lines.put(line.removeprefix("OUTCOME "))
    lines.put(None)


def search(seeds: list[int], options: list[str], shrunk: bool, log: str | None) -> None:
    """Runs programs, and says what came of them."""
    verdicts: collections.Counter = collections.Counter()
    faults: dict[str, list[dict]] = {}
    for outcome in outcomes(seeds, options):
        verdicts[outcome["verdict"]] += 1
        if outcome["verdict"] != "ok":
            key = f"{outcome['verdict']}: {outcome['kind']}"
            faults.setdefault(key, []).append(outcome)
        if log:
            with open(log, "a") as file:
                file.write(json.dumps(outcome) + "\n")
        if sum(verdicts.values()) % 50 == 0:
            print(dict(verdicts), flush=True)
    print(f"\n{dict(verdicts)} of {len(seeds)} programs\n")
    for kind, found in sorted(faults.items(), key=lambda item: -len(item[1])):
        print(f"{len(found):5d}  {kind}: seeds {', '.join(str(o['seed']) for o in found[:8])}")
        print(f"       {found[0]['message'][:300]}")
    if shrunk:
        for kind, found in faults.items():
            if kind.startswith("failed"):
                seed = min((o["seed"] for o in found), key=_size)
                print(f"\n---- {kind}", flush=True)
                command = [*COMMAND, *options, f"--seed={seed}", "--shrink"]
                subprocess.run(command, check=False, stderr=subprocess.DEVNULL)


def _size(seed: int) -> int:
    from tests.programs import draw

    return len(draw.draw(seed).operations())


def show(seed: int, shrunk: bool) -> None:
    """Prints one program, made smaller where it fails, and what came of it."""
    from tests.programs import draw, run, shrink

    program = draw.draw(seed)
    outcome = run.run(program)
    if shrunk and outcome.verdict != "ok":
        until = time.monotonic() + SECONDS

        def fails(smaller):
            other = run.run(smaller) if time.monotonic() < until else None
            same = (outcome.verdict, outcome.kind)
            return other is not None and (other.verdict, other.kind) == same

        program = shrink.shrink(program, fails)
        outcome = run.run(program)
    print(program.text())
    print(f"{outcome.verdict}: {outcome.kind}\n{outcome.message}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=300, help="how many programs")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="print and run this program alone")
    parser.add_argument("--shrink", action="store_true", help="make a failure of each kind smaller")
    parser.add_argument("--log", help="a file for a line of JSON about each program")
    parser.add_argument("--without", nargs="*", default=[], help="operations to leave out")
    parser.add_argument("--worker", type=int, nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is None and args.seed is None:
        seeds = list(range(args.start, args.start + args.count))
        search(seeds, ["--without", *args.without], args.shrink, args.log)
        return
    prepare()
    leave_out(args.without)
    if args.worker is not None:
        run_seeds(args.worker)
    else:
        show(args.seed, args.shrink)


if __name__ == "__main__":
    main()
