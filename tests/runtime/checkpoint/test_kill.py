"""A process that saves may be killed at any moment: the last checkpoint stays whole, to the bit."""

import contextlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxpp.runtime.checkpoint import load_state, restore_args, save_state

# A process that has imported everything makes one by fork for each kill, which takes little time.
# No JAX backend starts in it, and TensorStore's threads start in the children.
PARENT = """
import os, signal, sys
import numpy as np
import orbax.checkpoint as ocp
from jaxpp.runtime.checkpoint import save_args, save_state

def tree(step):
    rng = np.random.default_rng(step)
    return {"a": rng.standard_normal((200, 50)), "b": rng.integers(0, 9, 7), "step": step}

def loop(directory, first):
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(os.path.join(directory, "run"), options=options) as manager:
        for step in range(int(first), 10**9):
            manager.save(step, args=save_args(tree(step)))
            save_state(os.path.join(directory, "last"), tree(step), overwrite=True)

def once(path, step, after):
    left = [int(after)]
    def hook(event, args):
        changes = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")
        if changes or event == "open" and (args[2] or 0) & (os.O_WRONLY | os.O_RDWR):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    save_state(path, tree(int(step)), overwrite=True)

for line in sys.stdin:
    name, *arguments = line.split()
    child = os.fork()
    if child == 0:
        try:
            globals()[name](*arguments)
            os._exit(0)
        finally:
            os._exit(1)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def tree(step):
    rng = np.random.default_rng(step)
    return {"a": rng.standard_normal((200, 50)), "b": rng.integers(0, 9, 7), "step": step}


def assert_is_tree_of(loaded, step):
    want = tree(step)
    assert loaded["step"] == step
    assert loaded["a"].tobytes() == want["a"].tobytes()
    assert loaded["b"].tobytes() == want["b"].tobytes()


@pytest.fixture(scope="module")
def saver():
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", PARENT],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip

    def start(*call):
        process.stdin.write(" ".join(map(str, call)) + "\n")
        process.stdin.flush()
        return int(process.stdout.readline())

    yield start, lambda: int(process.stdout.readline())
    process.stdin.close()
    assert process.wait(20) == 0


def manager_of(directory):
    options = ocp.CheckpointManagerOptions(max_to_keep=2, cleanup_tmp_directories=True)
    return ocp.CheckpointManager(directory / "run", options=options)


def steps_in(directory):
    return [int(p.name) for p in (directory / "run").glob("*") if p.name.isdigit()]


def kill_at_random(directory, saver, seed):
    """Lets a loop save for a while, kills it, and checks what is there; gives the last step."""
    start, wait = saver
    before = max(steps_in(directory), default=-1)
    child = start("loop", directory, before + 1)
    limit = time.monotonic() + 40
    while max(steps_in(directory), default=-1) <= before and time.monotonic() < limit:
        time.sleep(0.002)
    time.sleep(random.Random(seed).uniform(0, 0.3))
    os.kill(child, signal.SIGKILL)
    assert wait() == -signal.SIGKILL
    with manager_of(directory) as manager:
        latest = manager.latest_step()
        assert latest is not None and latest > before
        assert_is_tree_of(manager.restore(latest, args=restore_args(tree(0))), latest)
        for step in set(manager.all_steps()) - {latest}:
            # Orbax may have been removing it: then it is an error, and never other numbers.
            with contextlib.suppress(ValueError, FileNotFoundError, KeyError):
                assert_is_tree_of(manager.restore(step, args=restore_args(tree(0))), step)
    last = directory / "last"
    if last.exists():
        loaded = load_state(last, tree(0))
        assert latest - 2 <= loaded["step"] <= latest + 1  # the two are written side by side
        assert_is_tree_of(loaded, loaded["step"])
    return latest


@pytest.mark.more
@pytest.mark.parametrize("kills", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_a_loop_killed_at_random_goes_on_from_its_last_checkpoint(tmp_path, saver, kills):
    for seed in range(kills):
        kill_at_random(tmp_path, saver, seed)
    save_state(tmp_path / "last", tree(0), overwrite=True)
    assert {p.name for p in tmp_path.iterdir()} == {"run", "last"}
    assert [n for n in os.listdir(tmp_path / "run") if not n.isdigit()] == [], "leftovers of kills"


@pytest.mark.more
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_save_killed_before_any_change_to_a_file(tmp_path, saver, overwrite):
    """Each time the checkpoint is the one before or the new one, and the next save goes well."""
    start, wait = saver
    outcomes = []
    for calls in itertools.count(1):
        path = tmp_path / str(calls)
        if overwrite:
            save_state(path, tree(0))
        start("once", path, 1, calls)
        status = wait()
        try:
            step = load_state(path, tree(0))["step"]
            assert_is_tree_of(load_state(path, tree(0)), step)
        except FileNotFoundError:
            assert not overwrite
            step = None
        outcomes.append(step)
        save_state(path, tree(2), overwrite=True)
        assert_is_tree_of(load_state(path, tree(0)), 2)
        assert [p.name for p in tmp_path.iterdir()] == [path.name]
        shutil.rmtree(path)
        if status == 0:
            break
        assert status == -signal.SIGKILL
    before = 0 if overwrite else None
    assert outcomes[0] == before and outcomes[-1] == 1 and set(outcomes) == {before, 1}
