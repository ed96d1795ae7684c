"""What a placed step says of itself, against what is counted by hand or on live arrays."""

import json
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp

WIDTH, EXAMPLES, MICROBATCHES = 8, 16, 4
OPTIMIZER = optax.adam(1e-2)
BYTES = 4  # of a float32


def loss_fn(params, x):
    h = jaxpp.pipeline_enter_stage((x @ params[0]) ** 2)
    return jnp.mean((h @ params[1]) ** 2)


def place(loss_fn, schedule, mesh, replicas=1, **options):
    grad_fn = jax.value_and_grad(jaxpp.wrap_forward(loss_fn))
    grad_fn = jaxpp.microbatch(grad_fn, MICROBATCHES, replicas=replicas)
    grad_fn = jaxpp.schedule(grad_fn, schedule)

    def step(params, state, x):
        loss, grads = grad_fn(params, x)
        updates, state = OPTIMIZER.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    return jaxpp.place(step, mesh, **options)


def arguments():
    keys = jax.random.split(jax.random.key(0))
    params = [jax.random.normal(key, (WIDTH, WIDTH)) for key in keys]
    x = np.random.default_rng(0).normal(size=(EXAMPLES, WIDTH)).astype(np.float32)
    return params, OPTIMIZER.init(params), x


def data_mesh():
    return jaxpp.MpmdMesh((2, 2), ("mpmd", "data"))


SPLIT = (None, None, P("data"))
ONE_F_ONE_B, GPIPE = jaxpp.schedules.OneFOneB(), jaxpp.schedules.GPipe()


def bytes_on(device, tree):
    shards = [s for x in jax.tree.leaves(tree) for s in x.addressable_shards]
    return sum(s.data.nbytes for s in shards if str(s.device) == device)


@pytest.mark.parametrize("zero", [{}, {"zero1": "data"}, {"zero3": "data"}])
def test_state_is_what_live_arrays_take(zero):
    step = place(loss_fn, ONE_F_ONE_B, data_mesh(), replicas=2, in_specs=SPLIT, **zero)
    params, state, _ = step(*arguments())
    for rank in step.describe().ranks:
        assert rank.parameters == WIDTH * WIDTH
        for device in rank.devices:
            assert rank.parameter_bytes == bytes_on(device, params)
            assert rank.optimizer_bytes == bytes_on(device, state)


@pytest.mark.parametrize(("schedule", "kept"), [(ONE_F_ONE_B, (2, 1)), (GPIPE, (4, 4))])
def test_activations_messages_and_accumulators_by_hand(schedule, kept):
    step = place(loss_fn, schedule, data_mesh(), replicas=2, in_specs=SPLIT)
    first, second = step.lower(*arguments()).compile().describe().ranks
    sent = EXAMPLES * WIDTH * BYTES  # by both devices, all microbatches
    one = sent // MICROBATCHES // 2  # of one device, one microbatch
    assert first.sent_bytes == {1: sent} and second.sent_bytes == {0: sent}
    # The first stage keeps what it has squared, the second what it has received and what it has
    # squared; besides there is what is sent, of one microbatch at a time.
    assert first.activation_bytes == one * (kept[0] + 1)
    assert second.activation_bytes == one * (2 * kept[1] + 1)
    weights = WIDTH * WIDTH * BYTES
    assert first.accumulator_bytes == weights  # each device has a row of both
    assert second.accumulator_bytes == weights + BYTES  # and of the loss


def test_the_analyses_of_the_executables_by_rank():
    compiled = place(loss_fn, GPIPE, jaxpp.MpmdMesh((2,))).lower(*arguments()).compile()
    first, second = compiled.cost_analysis()
    products = 2 * EXAMPLES * WIDTH * WIDTH  # of the forward, and as many for each gradient
    assert first["flops"] > 2 * products and second["flops"] > 3 * products
    assert first["bytes accessed"] > EXAMPLES * WIDTH * BYTES
    for own, rank in zip(compiled.memory_analysis(), compiled.describe().ranks, strict=True):
        assert own["peak_memory_in_bytes"] == rank.peak_bytes > rank.parameter_bytes
        assert own["temp_size_in_bytes"] == rank.temporary_bytes


def test_the_table_and_the_json_say_the_same():
    step = place(loss_fn, ONE_F_ONE_B, data_mesh(), replicas=2, in_specs=SPLIT)
    description = step.lower(*arguments()).compile().describe()
    ranks = json.loads(description.as_json())["ranks"]
    assert [rank["devices"] for rank in ranks] == [list(r.devices) for r in description.ranks]
    assert ranks[0]["sent_bytes"] == {"1": description.ranks[0].sent_bytes[1]}
    table = str(description)
    for rank in ranks:
        assert all(device in table for device in rank["devices"])
    shown = " ".join(ElementTree.fromstring(f"<div>{description._repr_html_()}</div>").itertext())
    assert sorted(shown.split()) == sorted(table.split())
