"""CPU devices for the ranks, before JAX starts, and which tests a plain `pytest` leaves out.

GPU tests skip themselves where there is no GPU.

XLA optimizes little here, and uses its old emitters of kernels where it has them, which take a
quarter of the time: most of the time of the tests goes into that. To test what users run, set
`JAX_DISABLE_MOST_OPTIMIZATIONS=0`.
"""

import collections
import gc
import itertools
import os
import pathlib
import time
import zlib

import hypothesis
import jax
import pytest

from jaxpp.runtime.executor import _compile

jax.config.update("jax_num_cpu_devices", 8)
# In the environment for the processes that tests start.
fewer = os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1") != "0"
jax.config.update("jax_disable_most_optimizations", fewer)
if fewer and jax.__version_info__ < (0, 11):  # later versions have no other emitters
    flags = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"

# How many examples a property is tried on. `--hypothesis-profile=ci` is what CI runs.
hypothesis.settings.register_profile("quick", max_examples=25, deadline=None)
hypothesis.settings.register_profile("ci", max_examples=100, deadline=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "quick")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Uses the cores that are there, if pytest-xdist is installed; `-n 0` is for one process."""
    is_worker = hasattr(config, "workerinput")
    if config.pluginmanager.hasplugin("xdist") and not is_worker:
        options = config.option
        if options.numprocesses is None and not options.tx:
            options.numprocesses, options.dist = "logical", "worksteal"
            options.maxprocesses = options.maxprocesses or 8


@pytest.fixture(scope="module")
def optimized():
    """Tests of a module compile as users do: without optimizations loops may round in another way.

    What compares to the bit a loop with the same tasks compiled one by one needs it.
    """
    before = jax.config.read("jax_disable_most_optimizations")
    forget()  # what others have compiled
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
    forget()


def forget():
    """Drops all that has been compiled."""
    gc.unfreeze()
    _compile.clear_cache()
    jax.clear_caches()
    gc.collect()
    gc.freeze()


#: The folders and files that a plain `pytest` leaves out: trainings of models, products of many
#: options, and tests that start worker processes, of which `test_smoke.py` remains.
MORE = (
    "benchmarks",
    "examples",
    "experiments",
    "programs",
    "runtime/checkpoint/test_inside.py",
    "runtime/checkpoint/test_workers.py",
    "runtime/launched",
    "runtime/remote",
    "runtime/transport/test_pull.py",
    "test_catalogue.py",
    "test_parallelism.py",
)
EVERY_RUN = (
    "runtime/launched/test_parts.py",
    "runtime/launched/test_smoke.py",
    "runtime/remote/test_smoke.py",
)
#: The folder whose tests take milliseconds.
ALL_CASES = ("schedules",)


#: Of what a plain `pytest` leaves out, a run takes one part where this says so, `0/2` or `1/2`: of
#: the further cases and the slow ones some of each test, of the rest some of the files, whose tests
#: share meshes.
NUMBER, _, PARTS = os.environ.get("JAXPP_PART", "0/1").partition("/")
#: When a run is to end, in seconds since 1970: what has not begun by then is skipped.
UNTIL = float(os.environ.get("JAXPP_UNTIL", "inf"))


def pytest_ignore_collect(collection_path, config):
    """Reads no files of `MORE` for a plain `pytest`, which runs none of their tests."""
    if config.args != config.getini("testpaths") or "not more" not in config.option.markexpr:
        return None
    path = str(collection_path.relative_to(config.rootpath / "tests"))
    return (
        True if path.startswith(MORE) and path.endswith(".py") and path not in EVERY_RUN else None
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks as `more` what a plain `pytest` leaves out: `MORE`, and further cases of each test.

    A module may ask for several cases of each of its tests: `pytestmark = pytest.mark.cases(3)`.
    """
    tests, cases = pathlib.Path(__file__).parent, collections.Counter()
    other_parts = set()
    for item in items:
        if not item.path.is_relative_to(tests):
            continue
        if item.get_closest_marker("slow"):
            if str(zlib.crc32(item.nodeid.encode()) % int(PARTS)) != NUMBER:
                other_parts.add(item)
            continue
        path, test = item.path.relative_to(tests).as_posix(), item.nodeid.partition("[")[0]
        cases[test] += 1
        wanted = item.get_closest_marker("cases")
        further = cases[test] > (wanted.args[0] if wanted else 1) and not path.startswith(ALL_CASES)
        if further:
            item.add_marker(pytest.mark.further)
        if (further or path.startswith(MORE)) and not path.startswith(EVERY_RUN):
            item.add_marker(pytest.mark.more)
        part = zlib.crc32((item.nodeid if further else path).encode()) % int(PARTS)
        if item.get_closest_marker("more") and str(part) != NUMBER:
            other_parts.add(item)
    if other_parts:
        config.hook.pytest_deselected(items=list(other_parts))
        items[:] = [item for item in items if item not in other_parts]
    gpu_tests = [item for item in items if "gpu" in item.keywords]
    if gpu_tests and not any(d.platform == "gpu" for d in jax.devices()):
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))


def pytest_collection_finish():
    """A collection of garbage need not look at modules and tests, which stay."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup():
    """Skips what is left when the time of the run is over."""
    if time.time() > UNTIL:
        pytest.skip("the time of this run was over")


#: After so many modules a process of tests forgets what it has compiled, which takes memory.
MODULES_KEPT = 16
finished = itertools.count(1)


@pytest.fixture(scope="module", autouse=True)
def what_a_module_compiles_is_kept_for_others():
    """A fifth of the time of the tests is JAX's own small operations, if each module compiles them.

    A collection of garbage need not look at what is kept, which would take seconds.
    """
    yield
    if next(finished) % MODULES_KEPT == 0:
        forget()
    else:
        gc.collect()
        gc.freeze()
