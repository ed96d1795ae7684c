"""What a step is predicted to take, in time and in memory, before it runs."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp
from jaxpp.planning import DEVICES, Beside
from jaxpp.planning._measure import _execute, _loaded, _placed_copies
from jaxpp.runtime.executor import held_bytes, over_time
from jaxpp.schedules import Costs, simulate
from tests.helpers import mesh_of

WIDTH, BATCH, MICROBATCHES, STAGES = 64, 512, 8, 4


def loss_fn(params, x):
    for i, w in enumerate(params):
        x = jnp.tanh((x if i == 0 else jaxpp.pipeline_enter_stage(x)) @ w)
    return jnp.mean(x**2)


def step_on(mesh, schedule=None, policy=None):
    loop = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss_fn, policy=policy)), MICROBATCHES)
    grad_fn = jaxpp.schedule(loop, schedule or jaxpp.schedules.OneFOneB())

    def step(params, x):
        return [w - 0.1 * g for w, g in zip(params, grad_fn(params, x), strict=True)]

    return jaxpp.place(step, mesh, donate_argnums=0)


def arguments():
    keys = jax.random.split(jax.random.key(0), STAGES + 1)
    params = [jax.random.normal(k, (WIDTH, WIDTH)) for k in keys[1:]]
    return params, jax.random.normal(keys[0], (BATCH, WIDTH))


# ---- memory -------------------------------------------------------------------------------------


def live_bytes(devices):
    """The bytes of all arrays of each device; two of them may be one buffer."""
    buffers = {device: {} for device in devices}
    for array in jax.live_arrays():
        if not array.is_deleted() and array.nbytes:
            for shard in array.addressable_shards:
                if shard.device in buffers and not shard.data.is_deleted():
                    own = buffers[shard.device]
                    own[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return [sum(buffers[device].values()) for device in devices]


def measured_peaks(step):
    """The most bytes that each rank's device holds after an instruction of a step."""
    local, arrays = _loaded(step, arguments())
    devices = local.homes
    jax.block_until_ready(local(_placed_copies(local, arrays)))
    jax.clear_caches()
    before = live_bytes(devices)
    peaks = [0] * len(devices)

    def one_by_one():
        for rank, chunk in local.order:
            for instruction in chunk:
                _execute(local, rank, instruction)
                for n, now in enumerate(live_bytes(devices)):
                    peaks[n] = max(peaks[n], now - before[n])

    local(_placed_copies(local, arrays), one_by_one)
    return peaks


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.nothing_saveable])
@pytest.mark.parametrize(
    "schedule",
    [
        jaxpp.schedules.OneFOneB(),
        jaxpp.schedules.GPipe(),
        jaxpp.schedules.ZeroBubbleH1(),
        jaxpp.schedules.Interleaved1F1B(2),
        jaxpp.schedules.Recompute("1f1b"),
        jaxpp.schedules.Recompute("gpipe", stages=[0, 2]),
        jaxpp.schedules.Recompute("zb_h1", microbatches=range(4)),
    ],
    ids=str,
)
def test_the_peak_of_live_bytes_is_what_was_predicted(schedule, policy):
    """Of a step whose instructions run one after the other, as they are dispatched."""
    ranks = STAGES // schedule.stages_per_rank
    step = step_on(mesh_of(ranks), schedule, policy)
    compiled = step.lower(*arguments()).compile()
    held = [h for h in held_bytes(compiled.bundle, compiled.inspect()) if h.kind != "temporary"]
    for rank, peak in enumerate(measured_peaks(step)):
        predicted = max(now.total() for _, now in over_time(h for h in held if h.rank == rank))
        assert predicted - 64 <= peak <= predicted + 64  # the local mesh has its constants before


def test_what_is_there_is_told_by_its_kind():
    step = step_on(mesh_of(STAGES))
    prediction = jaxpp.predict(step, *arguments(), costs=Costs())
    weight, edge = 4 * WIDTH * WIDTH, 4 * WIDTH * BATCH // MICROBATCHES
    for rank, peak in enumerate(prediction.peaks):
        assert peak.bytes["parameters"] == weight
        assert peak.bytes["accumulators"] == weight
        held = STAGES - rank  # microbatches whose forward has run, and whose backward has not
        assert peak.bytes["activations"] >= held * edge
    first, *_, last = prediction.peaks
    assert first.bytes["activations"] > last.bytes["activations"]


def test_a_description_has_the_same_peak():
    step = step_on(mesh_of(STAGES))
    compiled = step.lower(*arguments()).compile()
    prediction = jaxpp.predict(compiled, costs=Costs())
    for rank, peak in zip(compiled.describe().ranks, prediction.peaks, strict=True):
        assert rank.peak_bytes == pytest.approx(peak.total, rel=0.1)
        assert rank.temporary_bytes > 0


def test_shapes_are_enough():
    shapes = jax.eval_shape(arguments)
    step = step_on(mesh_of(STAGES))
    assert jaxpp.predict(step, *shapes, costs="h100") == jaxpp.predict(
        step, *arguments(), costs="h100"
    )


# ---- time ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1f1b", "jaxpp.schedules:Recompute()"])
def test_a_measurement_predicts_its_own_step(name):
    step = step_on(mesh_of(STAGES), jaxpp.schedules.by_name(name))
    measured = jaxpp.measure(step, *arguments(), repeats=1)
    prediction = jaxpp.predict(step, *arguments(), costs=measured)
    assert prediction.timeline.makespan + max(measured.before) == pytest.approx(
        measured.predict() - max(measured.after)
    )
    assert prediction.seconds <= measured.predict() * (1 + 1e-9)
    assert prediction.start == pytest.approx(max(measured.before))


@pytest.mark.more
def test_a_prediction_stands_beside_what_was_measured(tmp_path):
    step = step_on(mesh_of(STAGES))
    measured = jaxpp.measure(step, *arguments(), repeats=1)
    beside = jaxpp.predict(step, *arguments(), costs=measured).beside(measured)
    names = [name for name, *_ in beside.rows]
    assert names[:2] == ["step", "tasks"] and names[2:4] == ["B0", "B1"]
    assert len(names) == 2 + 2 * STAGES
    assert beside.rows[0][2] == measured.step
    lines = str(beside).splitlines()
    assert lines[len(names) + 1].startswith("tasks: from the start of the")
    # On a machine with more to do a line more says so.
    assert lines[len(names) + 2 :] == beside.note.splitlines()[1:] and len(lines) < len(names) + 4
    assert "<table>" in beside._repr_html_()
    beside.plot(tmp_path / "beside.png")
    assert (tmp_path / "beside.png").stat().st_size > 10_000
    guess = jaxpp.predict(step, *arguments(), costs=Costs(forward=7.0, backward=11.0))
    for name, predicted, found in guess.beside(measured).rows[2:]:
        assert predicted == pytest.approx({"F": 7.0, "B": 11.0}[name[0]]) and found < 5.0


def test_tasks_that_take_longer_than_predicted_are_said_to_share_cores():
    timeline = simulate(jaxpp.schedules.OneFOneB().table(2, 2))
    for slower, says in ((1.2, False), (4.0, True)):
        rows = (("step", 1.0, 9.0), ("tasks", 1.0, 9.0), ("F0", 0.1, 0.1 * slower))
        rows += (("B0", 0.2, 0.2 * slower), ("W0", 0.0, 1.0))
        beside = Beside(rows, {"predicted": timeline, "measured": timeline})
        assert ("A task takes 4.0 times as long" in str(beside)) == says
        assert ("share cores" in beside._repr_html_()) == says
        assert ("9.0 times as long together as predicted, and 1.2 times" in str(beside)) != says
    rows = (("tasks", 1.0, 1.3), ("F0", 0.1, 0.12))
    assert "cores" not in str(Beside(rows, {}))


def test_a_measurement_predicts_another_schedule_of_the_same_stages():
    measured = jaxpp.measure(step_on(mesh_of(STAGES)), *arguments(), repeats=1)
    gpipe_table = jaxpp.schedules.GPipe().table(STAGES, MICROBATCHES)
    gpipe = step_on(mesh_of(STAGES), jaxpp.schedules.GPipe())
    prediction = jaxpp.predict(gpipe, *arguments(), costs=measured)
    assert prediction.timeline.table.ranks == gpipe_table.ranks
    recomputed = jaxpp.predict(
        step_on(mesh_of(STAGES), jaxpp.schedules.Recompute("1f1b")), *arguments(), costs=measured
    )
    for span in recomputed.timeline.spans:  # what was not measured takes the time of its forward
        kind = "F" if span.task.kind == "R" else span.task.kind
        time = measured.costs.of(dataclasses.replace(span.task, kind=jaxpp.schedules.Kind(kind)))
        assert span.end - span.start == pytest.approx(time)
    with pytest.raises(ValueError, match="no times of I1, I2, I3, W0, .* same cut"):
        halves = step_on(mesh_of(STAGES), jaxpp.schedules.ZeroBubbleH1())
        jaxpp.predict(halves, *arguments(), costs=measured)


def test_a_device_bounds_the_times_of_what_xla_counts():
    step = step_on(mesh_of(STAGES))
    device = jaxpp.Device(flops=1e9, bandwidth=1e30)
    slow = jaxpp.predict(step, *arguments(), costs=device)
    forward = slow.timeline.spans[0]
    products = 2 * WIDTH * WIDTH * BATCH // MICROBATCHES / device.flops
    assert products <= forward.end - forward.start <= 2 * products
    fast = jaxpp.predict(step, *arguments(), costs=dataclasses.replace(device, flops=1e12))
    assert slow.seconds == pytest.approx(1000 * fast.seconds)
    later = jaxpp.predict(step, *arguments(), costs=device, latency=1.0)
    assert later.seconds >= slow.seconds + 2 * (STAGES - 1)


def test_copies_take_the_time_of_their_bytes_over_the_link_to_the_host():
    step = step_on(mesh_of(STAGES), jaxpp.schedules.Offload("gpipe", stages=[1]))
    device = jaxpp.Device(flops=1e9, bandwidth=1e30, host_bandwidth=1e6)
    found = jaxpp.predict(step, *arguments(), costs=device)
    copied = [s.end - s.start for s in found.timeline.spans if s.task.kind.lane == "copy"]
    held = [moment.bytes.get("host", 0) for moment in found.memory[1]]
    one = min(filter(None, held))
    assert one >= 4 * WIDTH * BATCH // MICROBATCHES and {n % one for n in held} == {0}
    assert copied == pytest.approx([one / 1e6] * 2 * MICROBATCHES)
    with pytest.raises(ValueError, match=r"O\[stage 1, .* has no host_bandwidth; give the bytes"):
        jaxpp.predict(step, *arguments(), costs=dataclasses.replace(device, host_bandwidth=0.0))


@pytest.mark.parametrize("zero1", [(), pytest.param("data", marks=pytest.mark.more)])
def test_the_reduction_over_replicas_takes_its_time(zero1):
    """A device of two sends as many bytes as gradients have, half as many where they scatter."""
    loop = jax.value_and_grad(jaxpp.wrap_forward(loss_fn))
    grad_fn = jaxpp.schedule(jaxpp.microbatch(loop, 2, replicas=2), jaxpp.schedules.OneFOneB())

    def step(params, momentum, x):
        loss, grads = grad_fn(params, x)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        return jax.tree.map(jnp.subtract, params, momentum), momentum, loss

    mesh = jaxpp.MpmdMesh((STAGES, 2), ("mpmd", "data"))
    params, x = arguments()
    args = params, jax.tree.map(jnp.zeros_like, params), x
    placed = jaxpp.place(step, mesh, in_specs=(None, None, P("data")), zero1=zero1)
    compiled = placed.lower(*args).compile()
    free = jaxpp.predict(compiled, *args, costs=Costs())
    found = jaxpp.predict(compiled, *args, costs=Costs(), reduction_bandwidth=100.0)
    gradient = 4 * WIDTH**2 * (0.5 if zero1 else 1)
    assert found.seconds == pytest.approx(free.seconds + gradient / 100)
    for rank in found.memory:
        assert "reduce" in {moment.running for moment in rank}


# ---- bad input ----------------------------------------------------------------------------------


def test_a_rank_that_needs_more_than_its_limit_is_an_error_before_the_run():
    step = step_on(mesh_of(STAGES))
    peaks = [p.total for p in jaxpp.predict(step, *arguments(), costs=Costs()).peaks]
    jaxpp.predict(step, *arguments(), costs=Costs(), memory_limit=peaks)
    with pytest.raises(ValueError, match=r"rank 2 needs .* in B2\.\d, .* policy.*schedule.*zero1"):
        limits = [*peaks[:2], peaks[2] - 1, peaks[3]]
        jaxpp.predict(step, *arguments(), costs=Costs(), memory_limit=limits)
    with pytest.raises(ValueError, match="optimizer state alone exceed it"):
        jaxpp.predict(step, *arguments(), costs=Costs(), memory_limit=WIDTH)
    with pytest.raises(ValueError, match="rank 0 needs"):
        jaxpp.predict(step, *arguments(), costs=jaxpp.Device(1e9, 1e9, memory=1e4))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(costs="h1000"), ValueError, "no device named 'h1000'; use one of a100, .*Device"),
        (dict(costs=Costs(), memory_limit=[1e9]), ValueError, "one for each of the 4 ranks"),
        (dict(costs=Costs(), memory_limit=-1), ValueError, "a positive number of bytes"),
        (dict(costs=Costs(forward=-1.0)), ValueError, "a cost is a finite number"),
        (dict(costs=Costs(forward=math.nan)), ValueError, "a cost is a finite number"),
    ],
)
def test_bad_input_is_named(options, error, message):
    with pytest.raises(error, match=message):
        jaxpp.predict(step_on(mesh_of(STAGES)), *arguments(), **options)


def test_what_place_did_not_make_is_not_predicted():
    with pytest.raises(TypeError, match="needs a step that place made"):
        jaxpp.predict(jax.jit(loss_fn), *arguments(), costs=Costs())
    with pytest.raises(ValueError, match="no scheduled loop"):
        jaxpp.predict(jaxpp.place(lambda x: x + 1), jnp.ones(2), costs=Costs())


@pytest.mark.parametrize(
    "figures",
    [
        dict(flops=0),
        dict(bandwidth=-1),
        dict(memory=math.nan),
        dict(overhead=-1e-6),
        dict(host_bandwidth=math.inf),
    ],
)
def test_a_device_has_finite_positive_figures(figures):
    with pytest.raises(ValueError, match=f"Device: {next(iter(figures))} is"):
        jaxpp.Device(**dict(flops=1e12, bandwidth=1e12) | figures)


def test_known_devices_have_memory():
    assert all(math.isfinite(device.memory) for device in DEVICES.values())
