"""Changes jaxpp's source in one place after the other, and says what notices.

    python -m tests.mutations [--certify | --own] [WORD ...]

The program that is written down for a mutation is certified by a jaxpp that has it, which compiles
nothing and should refute it. If it does not, tests run in a copy of the repository: those that
should notice the mutation, then a list that is common to all. With words, only the mutations
whose description or file has one of them. It fails if one is not caught and not known to be so, or
fits the source no more.

With `--certify` no test runs; where no program is written down for a mutation of what the
certificate sees, all are tried, until one is refuted. With `--own` the mutation's own tests
run, and nothing else.
"""

import collections
import contextlib
import importlib.machinery
import importlib.util
import os
import pathlib
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.mutations.certify import REFUSED, REFUTED, certify
from tests.mutations.mutation import Mutation
from tests.mutations.mutations import MUTATIONS

ROOT = pathlib.Path(__file__).parents[2]
COPIED = ("jaxpp", "tests", "experiments", "pyproject.toml")
#: Parts of a large file, and what is not in the folder of the transforms.
LAWS = {
    "LAWS": "placed_step or rank_holds or frees or messages or nothing_but",
    "LAW7": "differ_in_one or other_lengths or weak_type or another_config or effect",
}
PLACES = {
    "certify": "tests/certification/test_certify.py",
    "conveniences": "tests/transforms/test_conveniences.py",
    "jaxprs": "tests/jaxprs/test_jaxprs.py",
    "laws": "tests/test_laws.py",
    "mesh": "tests/runtime/local/test_mesh.py",
    "merges": "tests/transforms/microbatch/test_replicas.py",
    "parallelism": "tests/test_parallelism.py",
    "executor": "tests/runtime/executor/test_executor.py",
    "primitives": "tests/jaxprs/test_primitives.py",
    "programs": "tests/programs",
    "replicas": "tests/transforms/inside/test_replicas.py",
    "transforms": "tests/transforms",
}
#: For each mutation that its own tests do not catch.
COMMON = ("programs", "LAW7", "LAWS", "mesh", "transforms")
#: What programs that are certified import, and what tests do.
CERTIFIED = ("jax.numpy", "chex", "equinox", "optax")
TESTED = (*CERTIFIED, "flax.linen", "haiku")
STALE = "stale", "its text is not in the file once"
SECONDS = 900  # that a selection may take; a mutation may make a step wait for ever


def main(words: list[str]) -> int:
    own, by_certificate = "--own" in words, "--certify" in words
    words = [w for w in words if w not in ("--own", "--certify")]
    chosen = list(filter(_choice(words), MUTATIONS))
    results = collections.Counter[str]()
    with tempfile.TemporaryDirectory() as cache:
        prepare(cache, CERTIFIED if by_certificate else TESTED)
        for number, mutation in enumerate(chosen, 1):
            start = time.monotonic()
            verdict, by = judge_by_certificate(mutation) if by_certificate else judge(mutation, own)
            results[verdict] += 1
            seconds = time.monotonic() - start
            print(f"{number:3d} {verdict:10s} {mutation.wrong} ({mutation.file}, {seconds:.0f}s)")
            print(f"    {by}", flush=True)
    print(", ".join(f"{n} {verdict}" for verdict, n in sorted(results.items())))
    return int(results["not caught"] + results["stale"] > 0)


def _choice(words: list[str]) -> Callable[[Mutation], bool]:
    """Tells which mutations words choose: one by its description, or all that have the word."""
    whole = {m.wrong for m in MUTATIONS}.intersection(words)

    def is_chosen(m: Mutation) -> bool:
        text = f"{m.wrong} {m.file}"
        return not words or m.wrong in whole or any(w in text for w in words if w not in whole)

    return is_chosen


def prepare(cache: str, modules: tuple[str, ...]) -> None:
    """Imports modules of others, and keeps what XLA compiles for the next mutation."""
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    for name in modules:
        importlib.import_module(name)
    assert "jaxpp" not in sys.modules


def judge(mutation: Mutation, own: bool) -> tuple[str, str]:
    """Whether a mutation is caught, and by what."""
    if (source := mutated(mutation)) is None:
        return STALE
    program = mutation.refuted_on
    if program and not own and (found := verdict_on(mutation, source, [program])):
        return found
    with copied(mutation, source) as copy:
        common = tuple(t for t in COMMON if t not in mutation.tests)
        for tests in arguments(mutation.tests) + ([] if own else arguments(common)):
            if failed := first_failure(copy, tests):
                return "caught", failed
    return ("known", mutation.known) if mutation.known else ("not caught", "by no test")


def judge_by_certificate(mutation: Mutation) -> tuple[str, str]:
    """Whether a mutation is refuted, and on which program."""
    if mutation.unseen or mutation.kept:
        return ("unseen", mutation.unseen) if mutation.unseen else ("kept", mutation.kept)
    if (source := mutated(mutation)) is None:
        return STALE
    program = mutation.refuted_on
    found = verdict_on(mutation, source, [program] if program else None)
    return found or ("not caught", f"on {program or 'any program'}")


def verdict_on(
    mutation: Mutation, source: str, programs: list[str] | None
) -> tuple[str, str] | None:
    """The verdict on the first of some programs (of all, if None) that fails, and why it does.

    It is `"refused"` where the program cannot be lowered. `source` is that of the mutated file.
    """

    def run() -> int:
        sys.meta_path.insert(0, _Mutated(mutation.file, source))
        return certify(programs)

    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "log"
        status, said = forked(run, ROOT, log), log.read_text()
    verdicts = {0: None, REFUTED: ("refuted", said[:300]), REFUSED: ("refused", said[:300])}
    if status not in verdicts:
        raise RuntimeError(f"certifying ended with {status}:\n{said}")
    return verdicts[status]


class _Mutated(importlib.machinery.SourceFileLoader):
    """Finds and loads the module of a file, whose source is another one."""

    def __init__(self, file: str, source: str):
        name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        super().__init__(name, str(ROOT / file))
        self.source = source

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        return importlib.util.spec_from_file_location(name, self.path, loader=self)

    def get_code(self, fullname: str) -> Any:
        return compile(self.source, self.path, "exec")


def mutated(mutation: Mutation) -> str | None:
    """The source of a mutation's file with it; None if it does not fit."""
    source = (ROOT / mutation.file).read_text()
    return source.replace(mutation.old, mutation.new) if source.count(mutation.old) == 1 else None


@contextlib.contextmanager
def copied(mutation: Mutation, source: str) -> Iterator[pathlib.Path]:
    """A copy of the repository in which the mutation's file has a source."""
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pyc*"))
            else:
                shutil.copy(ROOT / name, copy / name)
        (copy / mutation.file).write_text(source)
        yield copy


def arguments(tests: tuple[str, ...]) -> list[list[str]]:
    """The arguments of the runs of pytest that run some tests, as mutations name them."""
    nodes = []
    for name in tests:
        if name not in LAWS:
            file, _, test = name.partition("::")
            path = PLACES.get(file) or _find(file)
            nodes.append(f"{path}::test_{test}" if test else path)
    laws = [["tests/test_laws.py", "-k", LAWS[name]] for name in tests if name in LAWS]
    return [nodes, *laws] if nodes else laws


def _find(file: str) -> str:
    """The path of a file of tests of the transforms."""
    (path,) = ROOT.glob(f"tests/transforms/**/test_{file}.py")
    return str(path.relative_to(ROOT))


def first_failure(folder: pathlib.Path, tests: list[str]) -> str | None:
    """The first test that fails in a copy of the repository."""
    log = folder / "log"
    status = forked(lambda: _run_tests(tests), folder, log)
    if status is None:
        return f"{' '.join(tests)} takes longer than {SECONDS}s"
    if status == 0:
        return None
    if status in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise ValueError(f"there are no tests {' '.join(tests)}:\n{log.read_text()}")
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", log.read_text(), re.MULTILINE)
    return found[1] if found else f"exit status {status}: {log.read_text()[-300:]}"


def forked(run: Callable[[], int], folder: pathlib.Path, log: pathlib.Path) -> int | None:
    """The exit status of a function that runs in a folder of the repository; None if it hangs.

    In a fork of this process, which has imported what does not change; it knows nothing of jaxpp.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            _enter(folder, log)
            status = run()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status if status < 128 else 1)
    until = time.monotonic() + SECONDS
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.02)
    return os.waitstatus_to_exitcode(ended[1])


def _enter(folder: pathlib.Path, log: pathlib.Path) -> None:
    os.chdir(folder)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.path[:] = [str(folder), *(p for p in sys.path if p and pathlib.Path(p).resolve() != ROOT)]
    for name in [n for n in sys.modules if n.split(".")[0] == "tests"]:
        del sys.modules[name]


def _run_tests(tests: list[str]) -> int:
    options = ["-n", "0", "-q", "-x", "--no-header", "--tb=no", "-p", "no:cacheprovider"]
    options += ["-m", "not slow and not faults"]
    return int(pytest.main([*options, *tests]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
