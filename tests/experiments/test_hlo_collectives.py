"""The collectives of compiled programs, counted in their text."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp
from experiments.hlo_collectives import collectives, count_collectives

WIDTH, EXAMPLES, MICROBATCHES = 8, 16, 4


def loss_fn(params, x):
    h = jaxpp.pipeline_enter_stage((x @ params[0]) ** 2)
    return jnp.mean((h @ params[1]) ** 2)


def normalized(params, x):
    h = x @ params[0]
    h = jaxpp.pipeline_enter_stage(h - jnp.mean(h, 0))
    return jnp.mean(jnp.tanh(h @ params[1]) ** 2)


def counted(loss_fn, inside=True, replicas=1):
    grad_fn = jaxpp.microbatch(
        jax.value_and_grad(jaxpp.wrap_forward(loss_fn)), MICROBATCHES, replicas=replicas
    )
    mesh = jaxpp.MpmdMesh((2, 2), ("mpmd", "data")) if inside else jaxpp.MpmdMesh((2,))
    specs = (None, P("data")) if inside else None
    step = jaxpp.place(jaxpp.schedule(grad_fn, jaxpp.schedules.OneFOneB()), mesh, in_specs=specs)
    w, x = jnp.ones((WIDTH, WIDTH)), jnp.ones((EXAMPLES, WIDTH))
    return count_collectives(step.lower([w, w], x).compile())


def test_collectives_once_a_step_are_apart_from_those_of_tasks():
    for rank in counted(loss_fn, replicas=2):
        assert rank.once["all-reduce over data"] == 1
        assert rank.in_tasks == {}
        assert rank.all == rank.once
    first, second = counted(normalized)
    assert "all-reduce over data" not in first.once
    assert first.in_tasks.keys() == {"F0", "B0"}
    in_tasks = [own["all-reduce over data"] for own in first.in_tasks.values()]
    assert first.all["all-reduce over data"] == sum(in_tasks) * MICROBATCHES
    assert second.in_tasks.keys() == {"F1", "B1"}


def test_ranks_of_one_device_have_no_collectives():
    for rank in counted(loss_fn, inside=False):
        assert rank.all == rank.once == rank.in_tasks == {}


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1},{2,3}}", "model"),
        ("{{0,2},{1,3}}", "data"),
        ("{}", "data,model"),
        ("[2,2]<=[4]", "model"),
        ("[2,2]<=[2,2]T(1,0)", "data"),
        ("mesh['x'=2,'y'=2] {'x'}", "data"),
        ("mesh['x'=4] {'x':(2)2}", "model"),
        ("mesh['x'=2,'y'=2], device_ids=([2,2]T(1,0)) {'x'}", "model"),
        ("mesh['x'=2,'y'=2], device_ids=(0,2,1,3) {'y'}", "data"),
        ("of a kind not known yet", "?"),
    ],
)
def test_the_axes_of_a_collective(groups, axes):
    line = f"  %r = f32[4]{{0}} all-reduce(%x), channel_id=1, replica_groups={groups}, to_apply=%a"
    assert collectives(line, (2, 2), ("data", "model")) == {("all-reduce", axes): 1}


def test_a_collective_of_single_devices_is_none():
    line = "  %r = f32[4]{0} all-reduce(%x), replica_groups={{0},{1},{2},{3}}, to_apply=%a"
    assert not collectives(line, (2, 2), ("data", "model"))
