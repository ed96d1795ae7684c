"""Steps on the devices of this process: what is compiled, donated, moved and kept."""

import gc
from concurrent.futures import ThreadPoolExecutor

import chex
import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxpp
from jaxpp.runtime.executor import _compile
from jaxpp.runtime.transport import _near

WIDTH, BATCH, MICROBATCHES = 8, 8, 2


def init_params(depth=3):
    return [
        jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5
        for k in jax.random.split(jax.random.key(0), depth)
    ]


def batch(seed=0):
    return jax.random.normal(jax.random.key(100 + seed), (BATCH, WIDTH))


def loss_fn(params, x):
    for i, w in enumerate(params):
        x = jnp.tanh((x if i == 0 else jaxpp.pipeline_enter_stage(x)) @ w)
    return jnp.mean((x - 0.5) ** 2)


def tied_loss(params, x):
    return loss_fn([*params, params[0]], x)


def step_of(loss=loss_fn, schedule=None):
    """A train step over `(parameters, momentum, rate)` and a batch.

    The last stage's loss decides the rate, which every stage reads.
    """
    loop = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss)), MICROBATCHES)
    grad_fn = jaxpp.schedule(loop, schedule or jaxpp.schedules.OneFOneB())

    def step(params, momentum, rate, x):
        value, grads = grad_fn(params, x)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        params = jax.tree.map(lambda p, m: p - rate * m, params, momentum)
        return params, momentum, jnp.where(value > 0.1, 0.9 * rate, rate), value

    return step


def start(params=None):
    params = init_params() if params is None else params
    return params, [jnp.zeros_like(p) for p in params], jnp.float32(0.1)


def meshes(ranks):
    """A mesh of a device each, and one where all ranks share a device."""
    return {
        "apart": jaxpp.MpmdMesh((ranks,)),
        "shared": jaxpp.MpmdMesh((ranks,), devices=jax.devices()[:1] * ranks),
    }


CASES = {
    "plain": (loss_fn, 3, 3, jaxpp.schedules.OneFOneB()),
    "tied": (tied_loss, 3, 4, jaxpp.schedules.OneFOneB()),
    "interleaved": (tied_loss, 3, 2, jaxpp.schedules.Interleaved1F1B(2)),
}


@pytest.fixture(
    scope="module", params=[(c, m) for c in CASES for m in ("apart", "shared")], ids="-".join
)
def placed(request):
    """A placed step that has run once, what it returned, and its arguments of then."""
    case, which = request.param
    loss, depth, ranks, schedule = CASES[case]
    step = jaxpp.place(step_of(loss, schedule), meshes(ranks)[which], donate_argnums=(0, 1, 2))
    given = start(init_params(depth))
    return step, given, step(*given, batch())


def advance(placed):
    """Runs the fixture's step from where it is not donated: from copies."""
    step, _, results = placed
    return step, jax.tree.map(lambda x: jnp.array(x, copy=True), results[:3])


# ---- donation and memory ------------------------------------------------------------------------


def test_donated_arguments_are_deleted(placed):
    _, given, results = placed
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(results))


def test_copies_of_donated_arguments_are_deleted_on_every_rank(placed):
    """Results live on the ranks that read them, and all of it goes with the next call."""
    step, given, results = placed
    new = jax.tree.map(lambda x: x + 0, results[:3])
    shards = [s.data for leaf in jax.tree.leaves(new) for s in leaf.addressable_shards]
    step(*new, batch(1))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(new))
    assert all(s.is_deleted() for s in shards)


def test_memory_does_not_grow(placed):
    step, state = advance(placed)
    x = batch(1)
    counts, sizes = [], []
    for _ in range(20):
        *state, _ = step(*state, x)
        counts.append(len(jax.live_arrays()))
        sizes.append(sum(a.nbytes for a in jax.live_arrays()))
    assert max(counts[2:]) == min(counts[2:])
    assert max(sizes[2:]) == min(sizes[2:])


def test_nothing_is_kept_of_a_step(placed):
    """When the caller drops the results, their memory is free.

    But for the last few messages, by which a rank tells how far it runs ahead: here a scalar.
    """
    step, state = advance(placed)
    x = batch(1)

    def live(state):
        """What is live after a step whose results are dropped, and with the results."""
        results = jax.block_until_ready(step(*state, x))
        held = len(jax.live_arrays())
        del results
        gc.collect()
        return len(jax.live_arrays()), held

    live(jax.tree.map(jnp.copy, state))
    dropped, held = live(jax.tree.map(jnp.copy, state))
    assert held - dropped >= len(jax.tree.leaves(state))
    assert dropped == live(jax.tree.map(jnp.copy, state))[0]


@pytest.mark.parametrize("which", ["apart", "shared"])
def test_arguments_that_are_not_donated_stay(which):
    step = jaxpp.place(step_of(tied_loss), meshes(4)[which])
    given = start()
    kept = jax.tree.map(np.array, given)
    for _ in range(2):
        first = step(*given, batch())
        chex.assert_trees_all_equal(jax.tree.map(np.array, given), kept)
        step(*first[:3], batch(1))
        chex.assert_trees_all_equal(first, step(*given, batch()))


def test_a_step_that_failed_leaves_the_next_one_whole(placed):
    """A call that is refused changes nothing."""
    step, state = advance(placed)
    again = jax.tree.map(jnp.copy, state)
    deleted = jnp.ones((BATCH, WIDTH))
    deleted.delete()
    with pytest.raises(ValueError, match=r"args\[3\] was donated to an earlier call"):
        step(*state, deleted)
    chex.assert_trees_all_equal(step(*state, batch(1)), step(*again, batch(1)))


# ---- where results are --------------------------------------------------------------------------


def devices_that_read(step, device_of):
    """For each flat argument, the devices of the ranks that read it."""
    readers = {n: set() for n in range(len(step.bundle.arguments))}
    for program in step.programs:
        for n, _ in program.inputs:
            readers[n].add(device_of(program.rank))
    return readers


def test_results_are_where_the_next_call_needs_them(placed):
    step, _, results = placed
    readers = devices_that_read(step, lambda rank: step.mesh.devices[rank])
    for n, leaf in enumerate(jax.tree.leaves(results[:3])):
        assert leaf.devices() == readers[n]


def test_no_call_moves_state(placed, monkeypatch):
    """From the second call on, what goes to another device is what the programs send."""
    step, state = advance(placed)
    *state, _ = step(*state, batch(1))
    moved = []
    put = jax.device_put

    def counted(x, *args, **kwargs):
        moved.extend((a.shape, a.dtype) for a in jax.tree.leaves(x))
        return put(x, *args, **kwargs)

    x = batch(2)  # on the first device, where the first stage is
    monkeypatch.setattr(jax, "device_put", counted)
    monkeypatch.setattr(_near, "_mover", lambda source, target, *_: lambda x: counted(x, target))
    step(*state, x)
    shared = len(set(step.mesh.devices)) == 1
    sent = [(a.shape, a.dtype) for p in step.programs for s in p.sends for a in s.message.avals]
    assert sorted(map(str, moved)) == ([] if shared else sorted(map(str, sent)))


def test_arguments_may_be_anywhere():
    """On another device, replicated over some, sharded, or in NumPy's memory: the results agree."""
    devices = jax.devices()
    mesh = jax.make_mesh((2,), ("data",), devices=devices[4:6])
    step = jaxpp.place(step_of(), jaxpp.MpmdMesh((3,)))
    given = start()
    expected = step(*given, batch())
    places = [
        devices[7],
        NamedSharding(mesh, PartitionSpec()),
        NamedSharding(mesh, PartitionSpec("data")),
    ]
    for place in places:
        params, momentum = jax.device_put(given[:2], place)
        chex.assert_trees_all_equal(step(params, momentum, given[2], batch()), expected)
        chex.assert_trees_all_equal(step(*given, jax.device_put(batch(), place)), expected)
    chex.assert_trees_all_equal(
        step(*jax.tree.map(np.asarray, given), np.asarray(batch())), expected
    )


def test_results_can_be_used_anywhere(placed):
    """A result is an ordinary array: read, combined and put elsewhere."""
    _, _, (params, momentum, rate, value) = placed
    assert np.isfinite(float(value))
    for leaf in jax.tree.leaves((params, momentum)):
        assert np.asarray(leaf).shape == leaf.shape
        chex.assert_trees_all_close(
            np.asarray(jnp.sum(leaf)), np.asarray(leaf).sum(), rtol=1e-5, atol=1e-5
        )
    assert float(rate) == pytest.approx(0.09)


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_on_any_devices(case):
    loss, depth, ranks, schedule = CASES[case]
    results = []
    for mesh in (*meshes(ranks).values(), jaxpp.MpmdMesh((ranks,), devices=jax.devices()[-ranks:])):
        step = jaxpp.place(step_of(loss, schedule), mesh, donate_argnums=(0, 1, 2))
        state = start(init_params(depth))
        for i in range(3):
            *state, value = step(*state, batch(i))
        results.append(jax.tree.map(np.asarray, (state, value)))
    chex.assert_trees_all_equal(*results)


# ---- compilation --------------------------------------------------------------------------------


def compilations(run):
    """How often XLA compiles in a call."""
    count = []

    def listen(event, *_, **__):
        if event == "/jax/core/compile/backend_compile_duration":
            count.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        run()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return len(count)


@pytest.mark.more
def test_equal_computations_compile_once():
    """Eight equal middle stages compile as often as two, whatever the number of devices."""

    def compile_step(depth, devices=None):
        mesh = jaxpp.MpmdMesh((depth,), devices=devices)
        lowered = jaxpp.place(step_of(), mesh).lower(*start(init_params(depth)), batch())
        jax.clear_caches()
        _compile.clear_cache()
        return compilations(lowered.compile), len(lowered.bundle.computations)

    few, computations = compile_step(4)
    assert few == computations
    assert compile_step(8) == (few, computations)
    assert compile_step(8, jax.devices()[:1] * 8) == (few, computations)


def test_the_second_call_compiles_nothing(placed):
    step, state = advance(placed)
    x = batch(1)
    *state, _ = step(*state, x)
    assert compilations(lambda: step(*state, x)) == 0


def test_another_schedule_of_the_same_tasks_compiles_nothing_new():
    state = start(init_params(4))
    lowered = [
        jaxpp.place(step_of(schedule=schedule), jaxpp.MpmdMesh((4,))).lower(*state, batch())
        for schedule in (jaxpp.schedules.OneFOneB(), jaxpp.schedules.GPipe())
    ]
    _compile.clear_cache()
    assert compilations(lowered[0].compile) > 0
    assert compilations(lowered[1].compile) == 0


def test_another_setting_of_jax_compiles_anew():
    lowered = jaxpp.place(step_of(), jaxpp.MpmdMesh((3,))).lower(*start(init_params()), batch())
    lowered.compile()
    assert compilations(lowered.compile) == 0
    with jax.default_matmul_precision("highest"):
        assert compilations(lowered.compile) > 0


# ---- threads ------------------------------------------------------------------------------------


@pytest.mark.parametrize("traced", [False, True])
def test_threads_that_share_a_step_do_not_mix_their_data(tmp_path, traced):
    """Also two steps of one mesh, and a trace of them."""
    mesh = jaxpp.MpmdMesh((2,), devices=jax.devices()[:1] * 2)
    loop = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss_fn)), MICROBATCHES)
    loop = jaxpp.schedule(loop, jaxpp.schedules.OneFOneB())
    placed = [
        jaxpp.place(loop, mesh),
        jaxpp.place(lambda w, x: jax.tree.map(jnp.negative, loop(w, x)), mesh),
    ]
    params, data = init_params(2), [batch(n) for n in range(8)]
    expected = [[step(params, x) for x in data] for step in placed]
    if traced:
        mesh.start_trace(tmp_path / "trace")

    def run(number):
        step = placed[number % 2]
        return [(n, step(params, x)) for _ in range(5) for n, x in enumerate(data)]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(run, range(4)))
    for number, results in enumerate(found):
        for n, result in results:
            chex.assert_trees_all_equal(result, expected[number % 2][n])
    if traced:
        trace = mesh.stop_trace()
        assert len(trace.calls) == 4 * 5 * len(data) and not trace.errors
        assert repr(trace).startswith("Trace(160 calls of 2 ranks: ") and len(repr(trace)) < 300


def test_threads_that_call_a_step_first_compile_it_once():
    traces = []

    def step(w, x):
        traces.append(1)
        return step_of()(w, [w_ * 0 for w_ in w], jnp.float32(0.1), x)

    placed = jaxpp.place(step, jaxpp.MpmdMesh((3,)))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: placed(init_params(), batch(n)), range(8)))
    assert len(traces) == 1


def test_a_step_without_a_mesh_works_in_a_thread():
    """Placed, called first, and certified there, with the mesh that `place` makes."""
    args = *start(init_params()), batch()
    expected = jaxpp.place(step_of(), jaxpp.MpmdMesh((3,)))(*args)

    def run(step):
        return step(*args), step.lower(*args).certify()

    with ThreadPoolExecutor(1) as pool:
        for step in (jaxpp.place(step_of()), pool.submit(jaxpp.place, step_of()).result()):
            result, certificate = pool.submit(run, step).result()
            chex.assert_trees_all_equal(result, expected)
            assert certificate.ranks == 3 and not certificate.undecided


# ---- the mesh itself ----------------------------------------------------------------------------


def test_mesh():
    mesh = jaxpp.MpmdMesh((1, 3), ("data", "mpmd"))
    assert mesh.num_ranks == 3
    assert mesh.devices == tuple(jax.devices()[:3])
    assert repr(mesh) == "MpmdMesh((1, 3), ('data', 'mpmd'))"


def test_a_mesh_is_a_context_manager():
    with jaxpp.MpmdMesh((3,)) as mesh:
        step = jaxpp.place(step_of(), mesh)
        step(*start(init_params()), batch())
    step(*start(init_params()), batch())


def test_mesh_takes_an_array_of_devices():
    devices = np.array(jax.devices()[:2], object).reshape(2, 1)
    assert jaxpp.MpmdMesh((2, 1), ("mpmd", "data"), devices).devices == tuple(jax.devices()[:2])


@pytest.mark.parametrize(
    "args, message",
    [
        (((2,), ("mpmd", "data")), r"a name of its own for each axis, got shape \(2,\) and names"),
        (((2, 2), ("mpmd", "mpmd")), "a name of its own for each axis"),
        (((2,), ("data",)), "needs an axis named 'mpmd'"),
        (((0,), ("mpmd",)), "needs axes of size 1 at least"),
        ((4,), r"MpmdMesh needs the size of each axis, as in .*\), got 4\.$"),
        ((jax.make_mesh((1,), ("mpmd",)), "mpmd"), r"got Mesh.*pass mesh\.devices\.shape"),
        (
            ((99,), ("mpmd",)),
            r"a device for each entry of its axes {.mpmd.: 99}, 99 in all, got \d+. To share some",
        ),
    ],
)
def test_bad_meshes(args, message):
    with pytest.raises(ValueError, match=message):
        jaxpp.MpmdMesh(*args)


@pytest.mark.parametrize("types", [jax.sharding.AxisType.Auto, ("auto",), 5])
def test_types_of_axes_that_are_none(types):
    with pytest.raises(
        ValueError, match=r"a type for each of its axes \('mpmd',\), a jax.sharding"
    ):
        jaxpp.MpmdMesh((2,), axis_types=types)


@pytest.mark.parametrize("number", [1, 3])
def test_mesh_with_another_number_of_devices(number):
    with pytest.raises(
        ValueError, match=f"a device for each entry of its axes .*, 2 in all, got {number}"
    ):
        jaxpp.MpmdMesh((2,), devices=jax.devices()[:number])
