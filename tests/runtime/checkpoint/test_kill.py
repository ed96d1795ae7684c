"""A process that saves may be killed at any moment: the last checkpoint stays whole, to the bit."""

import itertools
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from jaxpp.runtime.checkpoint import Checkpointer, load_state, save_state

# A process that has imported everything makes one by fork for each kill, which takes little time.
# No JAX backend starts in it, and TensorStore's threads start in the children.
PARENT = """
import os, signal, sys
import numpy as np
import tensorstore
from jaxpp.runtime.checkpoint import Checkpointer, save_state

def tree(step):
    rng = np.random.default_rng(step)
    return {"a": rng.standard_normal((200, 50)), "b": rng.integers(0, 9, 7), "step": step}

def loop(directory, first):
    with Checkpointer(directory, keep=2) as checkpointer:
        for step in range(int(first), 10**9):
            checkpointer.save(step, tree(step))
            save_state(os.path.join(directory, "last"), tree(step), overwrite=True)

def once(path, step, after):
    left = [int(after)]
    def hook(event, args):
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"):
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


def kill_at_random(directory, saver, seed):
    """Lets a loop save for a while, kills it, and checks what is there; gives the last step."""
    start, wait = saver
    checkpointer = Checkpointer(directory, keep=2)
    steps = checkpointer.steps()
    before = max(steps, default=-1)
    child = start("loop", directory, before + 1)
    limit = time.monotonic() + 20
    while checkpointer.latest() in (None, before) and time.monotonic() < limit:
        time.sleep(0.002)
    time.sleep(random.Random(seed).uniform(0, 0.1))
    os.kill(child, signal.SIGKILL)
    assert wait() == -signal.SIGKILL
    latest = checkpointer.latest()
    assert latest is not None and latest > before
    for step in checkpointer.steps():
        assert_is_tree_of(checkpointer.restore(tree(0), step), step)
    last = directory / "last"
    if (last / "manifest.json").exists():
        loaded = load_state(last, tree(0))
        assert latest - 2 <= loaded["step"] <= latest + 1  # the two are written side by side
        assert_is_tree_of(loaded, loaded["step"])
    checkpointer.close()
    return latest


@pytest.mark.more
@pytest.mark.parametrize("kills", [15, pytest.param(200, marks=pytest.mark.slow)])
def test_a_loop_killed_at_random_goes_on_from_its_last_checkpoint(tmp_path, saver, kills):
    latest = [kill_at_random(tmp_path, saver, seed) for seed in range(kills)][-1]
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        checkpointer.save(latest + 1, tree(latest + 1))
    save_state(tmp_path / "last", tree(latest + 1), overwrite=True)
    assert len(list(tmp_path.iterdir())) == 3
    for path in tmp_path.iterdir():
        assert len(list(path.iterdir())) == 2, "what the kills have left is still there"


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
        except (FileNotFoundError, ValueError) as error:
            assert not overwrite
            assert (
                "no checkpoint" in str(error)
                or "half-written" in str(error)
                or ("not a checkpoint" in str(error) and not list(path.iterdir()))
            )
            step = None
        outcomes.append(step)
        save_state(path, tree(2), overwrite=True)
        assert_is_tree_of(load_state(path, tree(0)), 2)
        assert len(list(path.iterdir())) == 2
        if status == 0:
            break
        assert status == -signal.SIGKILL
    # Early on it is not there, at the end it is. In between the number of changes before it is
    # published may vary from save to save.
    before = 0 if overwrite else None
    assert set(outcomes) == {before, 1}
    assert set(outcomes[:8]) == {before} and outcomes[-1] == 1
    assert not overwrite or outcomes.count(1) >= 6
