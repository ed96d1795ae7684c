"""Ray Data feeds a step: the ranks read the batches, and the losses are those of the arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp
from examples.ray_data import DatasetBatches


class Rows:
    """What `ray.data.Dataset` gives, of a list."""

    def __init__(self, count):
        self.count = count

    def iter_batches(self, *, batch_size, drop_last):
        assert drop_last
        for start in range(0, self.count - batch_size + 1, batch_size):
            yield {"x": np.arange(start, start + batch_size)}


def first(batches, number):
    return int(batches(number)[0])


def test_batches_follow_each_other_over_epochs_and_can_be_sought():
    batches = DatasetBatches(Rows(11), 4, lambda columns: columns["x"])
    assert [first(batches, n) for n in range(5)] == [0, 4, 0, 4, 0]
    assert first(batches, 1) == 4  # a run that goes on from a checkpoint
    assert first(batches, 2) == 0
    assert first(batches, 2) == 0
    assert first(batches, 7) == 4


def test_a_dataset_without_a_batch_is_an_error():
    with pytest.raises(ValueError, match="fewer than 4"):
        DatasetBatches(Rows(3), 4, lambda columns: columns)(0)


def loss_fn(params, x):
    h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ params[0]))
    return jnp.mean((h @ params[1] - x) ** 2)


@pytest.mark.slow
def test_the_ranks_read_a_dataset():
    pytest.importorskip("pyarrow")
    ray = pytest.importorskip("ray")
    grad_fn = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss_fn)), 4)
    grad_fn = jaxpp.schedule(grad_fn, jaxpp.schedules.OneFOneB())

    def train_step(params, x):
        loss, grads = grad_fn(params, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss

    rows = np.random.default_rng(0).normal(size=(48, 8)).astype(np.float32)
    start = np.random.default_rng(1).normal(size=(2, 8, 8)).astype(np.float32) / 3
    ray.init(address="local", include_dashboard=False, num_cpus=4, logging_level="warning")
    try:
        with jaxpp.RemoteMpmdMesh((2,)) as mesh:
            dataset = ray.data.from_items([{"x": row} for row in rows])
            feed = DatasetBatches(dataset, 16, lambda columns: np.stack(columns["x"]))
            step = jaxpp.place(train_step, mesh, feed={1: feed})
            params = [jnp.asarray(w) for w in start]
            losses = []
            for number in range(4):
                params, loss = step(params, number)
                losses.append(float(loss))
    finally:
        ray.shutdown()
    expected, params = [], [jnp.asarray(w) for w in start]
    for number in range(4):
        at = 16 * (number % 3)
        params, loss = jax.jit(train_step)(params, rows[at : at + 16])
        expected.append(float(loss))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert len(set(losses)) == 4
