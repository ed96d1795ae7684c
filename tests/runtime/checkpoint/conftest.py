"""A remote mesh without processes: the ranks are threads, each with a device and its arrays."""

import os
import pickle
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp.runtime.site._array import RemoteArray
from jaxpp.runtime.site._failure import RankError


class Calls:
    def __init__(self, futures):
        self.futures = futures

    def wait(self):
        wait(self.futures.values())

    def __call__(self):
        found = {}
        for rank, future in self.futures.items():
            if error := future.exception():
                error.add_note(f"on rank {rank}")
                raise error
            found[rank] = [pickle.loads(future.result())]
        return found


class Process(types.SimpleNamespace):
    """As much of a rank's process as the functions of a checkpoint may use."""

    def __init__(self, rank):
        super().__init__(rank=rank, process=0, home=jax.devices()[rank], arrays={})

    def keep(self, arrays):
        self.arrays.update(arrays)

    def wait_for(self, numbers):
        return [self.arrays[number] for number in numbers]


class ThreadMesh:
    """As much of `RemoteMpmdMesh` as saving and loading need; what crosses it is pickled."""

    incarnation = 0

    def __init__(self, num_ranks):
        self.num_ranks = num_ranks
        self.inside = None
        self.processes = [Process(rank) for rank in range(num_ranks)]
        self.dead, self.saves = set(), set()
        self._ordered, self.beside = (
            [ThreadPoolExecutor(1) for _ in range(num_ranks)] for _ in range(2)
        )
        self._next = 0

    def new_array(self, aval, ranks, spec=()):
        self._next += 1
        arrays: Any = self
        return RemoteArray(arrays, self._next, aval, ranks, spec)

    def check_array(self, array):
        assert not array.is_deleted()

    # What an array asks of the `Arrays` that made it.

    @property
    def mesh(self):
        return self

    def note(self, array):
        pass

    def forget(self, array):
        pass

    def release(self, array):
        for process in self.processes:
            process.arrays.pop(array.id, None)

    def lead(self, what, function):
        return function()

    def apply_everywhere(self, function, arguments, *, ordered=True):
        pools = self._ordered if ordered else self.beside
        return Calls(
            {
                rank: pools[rank].submit(self._run, rank, pickle.dumps((function, own)))
                for rank, own in arguments.items()
            }
        )

    def _run(self, rank, call):
        function, arguments = pickle.loads(call)
        result = pickle.dumps(function(self.processes[rank], *arguments))
        if rank in self.dead:
            raise RankError("The worker has died.", rank=rank)
        return result

    def close(self):
        for pool in (*self._ordered, *self.beside):
            pool.shutdown()

    # ---- for tests ------------------------------------------------------------------------------

    def put(self, value, *ranks):
        """An array on some ranks."""
        aval = jax.ShapeDtypeStruct(
            value.shape, value.dtype, weak_type=getattr(value, "weak_type", False)
        )
        array = self.new_array(aval, ranks)
        for rank in ranks:
            copied = jax.device_put(value, self.processes[rank].home)
            self.processes[rank].arrays[array.id] = copied
        return array

    def value(self, array, rank):
        """What a rank has of an array."""
        return self.processes[rank].arrays[array.id]


PLAIN = """
import sys
sys.modules["jaxpp"] = None  # an import of it is an error
import jax, numpy as np, orbax.checkpoint as ocp
with ocp.PyTreeCheckpointer() as checkpointer:
    leaves = jax.tree_util.tree_leaves_with_path(checkpointer.restore(sys.argv[1]))
np.savez(sys.argv[2], **{jax.tree_util.keystr(path): leaf for path, leaf in leaves})
"""


@pytest.fixture
def read_plainly(tmp_path):
    """Reads a checkpoint by Orbax alone in a process without jaxpp; gives its arrays by path."""

    def read(path):
        arguments = [sys.executable, "-c", PLAIN, path, tmp_path / "plain.npz"]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        subprocess.run(arguments, check=True, timeout=100, env=environment, cwd=tmp_path)
        return dict(np.load(tmp_path / "plain.npz"))

    return read


@pytest.fixture
def thread_mesh():
    meshes = []

    def make(num_ranks):
        meshes.append(ThreadMesh(num_ranks))
        return meshes[-1]

    yield make
    for mesh in meshes:
        mesh.close()


@pytest.fixture
def assert_same():
    """Checks that two trees are equal to the bit, in types and in where their arrays are."""

    def check(got, want, where=True):
        if isinstance(want, jax.Array):
            assert isinstance(got, jax.Array)
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
            assert got.aval.weak_type == want.aval.weak_type
            if where:
                assert got.sharding == want.sharding
            if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
                got, want = jax.random.key_data(got), jax.random.key_data(want)
            assert jax.device_get(got).tobytes() == jax.device_get(want).tobytes()
        elif hasattr(want, "dtype"):
            assert type(got) is type(want)
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
            assert got.tobytes() == want.tobytes()
        else:
            assert type(got) is type(want)
            assert repr(got) == repr(want)

    def check_trees(got, want, where=True):
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            check(a, b, where)

    return check_trees
