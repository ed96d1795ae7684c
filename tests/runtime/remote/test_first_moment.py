"""What a user gets wrong about a session or a worker is said at once."""

import os

import jax
import jax.numpy as jnp
import psutil
import pytest

import jaxpp
from tests.transforms import two_layers


@pytest.mark.parametrize("address", ["10.0.0.1:6379", "ray://head:10001", "no-such-host.invalid"])
def test_the_address_of_a_session_is_no_address_of_workers(address):
    with pytest.raises(ValueError, match=r"no host at which .* ray\.init\(address=\.\.\.\) before"):
        jaxpp.RemoteMpmdMesh((2,), address=address)


def test_without_gpus_the_error_says_how_ranks_run_on_cpu(ray_session):
    with pytest.raises(ValueError, match="gpus_per_rank=0 lets ranks run on CPU"):
        jaxpp.RemoteMpmdMesh((2,), gpus_per_rank=1)


def pid_of(rank):
    return os.getpid()


def test_a_process_shows_its_rank_and_the_end_of_a_feed_names_the_feed(ray_session):
    def end(number):
        if number > 1:
            raise StopIteration
        return two_layers.X

    with jaxpp.RemoteMpmdMesh((2,)) as mesh:
        pids = mesh.apply(pid_of, {0: (), 1: ()}).values()
        shown = [" ".join(psutil.Process(pid).cmdline()) for pid in pids]
        assert all(f"jaxpp_rank_{rank}" in text for rank, text in enumerate(shown)), shown
        step = jaxpp.place(two_layers.scheduled(), mesh, feed={1: end})
        message = "the function that feeds the step.*StopIteration"
        with pytest.raises(jaxpp.RankError, match=message):
            for number in range(4):
                jax.block_until_ready(step(two_layers.WEIGHTS, jnp.asarray(number)))


def test_a_scalar_prints_its_number_and_an_array_tells_its_devices(ray_session, capsys):
    with jaxpp.RemoteMpmdMesh((2,)) as mesh:
        step = jaxpp.place(two_layers.scheduled(), mesh)
        loss, grads = step(two_layers.WEIGHTS, two_layers.X)
        print(loss)
        assert float(capsys.readouterr().out) == pytest.approx(float(loss))
        assert repr(loss).startswith("RemoteArray(float32[] on rank ")
        assert str(grads[1]) == repr(grads[1]) and "on rank 1" in repr(grads[1])
        (device,) = grads[1].devices()
        assert (device.rank, device.platform) == (1, jax.default_backend())
    assert str(loss) == repr(loss)
