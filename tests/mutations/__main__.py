"""Changes jaxpp's source in one place after the other, and says which tests notice.

    python -m tests.mutations [--own] [WORD ...]

Each mutation is applied to a copy of the repository, in which the fastest of the tests that concern
it run first, then, but for `--own`, a list that is common to all. With words, only the mutations
whose description or file has one of them. It fails if one is not caught, or fits no more.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

from tests.mutations.mutations import MUTATIONS, Mutation

ROOT = pathlib.Path(__file__).parents[2]
COPIED = ("jaxpp", "tests", "experiments", "pyproject.toml")
#: Parts of large files, by a name.
SELECTIONS = {
    "LAWS": ["tests/test_laws.py", "-k", "placed_step or rank or messages or nothing_but"],
    "LAW7": [
        "tests/test_laws.py",
        "-k",
        "differ_in_one or another_configuration or effect_happens",
    ],
}
#: For each mutation that its own tests do not catch.
COMMON = ("LAWS", "LAW7", "tests/transforms", "tests/programs", "tests/runtime/test_mesh.py")
SECONDS = 900  # that a selection may take; a mutation may make a step wait for ever


def main(words: list[str]) -> int:
    own = "--own" in words
    words = [w for w in words if w != "--own"]
    chosen = [m for m in MUTATIONS if not words or any(w in f"{m.wrong} {m.file}" for w in words)]
    results = {"caught": 0, "not caught": 0, "stale": 0}
    with tempfile.TemporaryDirectory() as cache:
        # What XLA has compiled for one mutation it need not compile for the next.
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache)
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        for number, mutation in enumerate(chosen, 1):
            start = time.monotonic()
            verdict, by = judge(mutation, own)
            results[verdict] += 1
            seconds = time.monotonic() - start
            print(f"{number:3d} {verdict:10s} {mutation.wrong} ({mutation.file}, {seconds:.0f}s)")
            print(f"    {by}", flush=True)
    print(", ".join(f"{n} {verdict}" for verdict, n in results.items()))
    return int(results["caught"] < len(chosen))


def judge(mutation: Mutation, own: bool) -> tuple[str, str]:
    """Whether a mutation is caught, and by which test."""
    source = (ROOT / mutation.file).read_text()
    if source.count(mutation.old) != 1:
        return "stale", f"its text is in the file {source.count(mutation.old)} times, not once"
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pyc*"))
            else:
                shutil.copy(ROOT / name, copy / name)
        (copy / mutation.file).write_text(source.replace(mutation.old, mutation.new))
        files = [t for t in mutation.tests if t not in SELECTIONS]
        parts = [SELECTIONS[t] for t in mutation.tests if t in SELECTIONS]
        common = [SELECTIONS.get(t, [t]) for t in COMMON if t not in mutation.tests]
        for tests in [files, *parts, *([] if own else common)]:
            if failed := first_failure(copy, tests):
                return "caught", failed
    return "not caught", "by no test"


def first_failure(folder: pathlib.Path, tests: list[str]) -> str | None:
    """The first test that fails in a copy of the repository."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-x", "--no-header", "--tb=no"]
    try:
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider", *tests],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"{' '.join(tests)} takes longer than {SECONDS}s"
    if done.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return found[1] if found else f"exit status {done.returncode}: {done.stdout[-300:]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
