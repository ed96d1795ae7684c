"""Steps on worker processes: the same results as in this process, and what stays where."""

import gc
import os
import resource
import signal
from typing import Any

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from benchmarks import faults
from experiments.models import gpt
from jaxpp._program import Run
from tests.helpers import assert_same
from tests.runtime.local.test_mesh import batch, init_params, start, step_of, tied_loss
from tests.transforms.place import test_fuse


@pytest.fixture(scope="module")
def mesh(ray_session):
    with jaxpp.RemoteMpmdMesh((3, 1), ("mpmd", "data")) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def mesh_of_four(ray_session):
    with jaxpp.RemoteMpmdMesh((4,)) as mesh:
        yield mesh


def local(ranks):
    return jaxpp.MpmdMesh((ranks,), devices=[jax.devices()[0]] * ranks)


def held(mesh):
    """How many arrays each rank holds."""
    return mesh.apply(number_of_arrays, {rank: () for rank in range(mesh.num_ranks)})


def number_of_arrays(process):
    return len(process.arrays)


# ---- the law: the same results on any mesh ------------------------------------------------------


def train(mesh, schedule, ranks, steps=3):
    model = gpt.GPT(
        layers=2, width=16, heads=2, context=8, dropout=0.0, tied=True, key=jax.random.key(0)
    )
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    stages = ranks * schedule.stages_per_rank
    staged = jaxpp.wrap_forward(jaxpp.split_stages(gpt.loss_fn, num_stages=stages))
    grad_fn = jaxpp.microbatch(eqx.filter_value_and_grad(staged), 4)
    grad_fn = jaxpp.schedule(grad_fn, schedule)

    def train_step(model, opt_state, tokens):
        loss, grads = grad_fn(model, tokens)
        updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    step = jaxpp.place(train_step, mesh, donate_argnums=(0, 1))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_array))
    losses = []
    for number in range(steps):
        tokens = jax.random.randint(jax.random.key(number), (8, 9), 0, gpt.NUM_BYTES)
        model, opt_state, loss = step(model, opt_state, tokens)
        losses.append(loss)
    return jax.device_get((eqx.filter((model, opt_state), eqx.is_array), losses))


SCHEDULES = {
    "1f1b": jaxpp.schedules.OneFOneB(),
    "interleaved": jaxpp.schedules.Interleaved1F1B(),
    "zb_h1": jaxpp.schedules.ZeroBubbleH1(),
}


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("1f1b", 2),
        *(
            pytest.param(name, ranks, marks=pytest.mark.slow)
            for name in SCHEDULES
            for ranks in (2, 4)
            if (name, ranks) != ("1f1b", 2)
        ),
    ],
)
def test_three_steps_are_bitwise_those_of_the_local_mesh(name, ranks, ray_session, request):
    schedule = SCHEDULES[name]
    expected = train(local(ranks), schedule, ranks)
    if ranks == 4:
        actual = train(request.getfixturevalue("mesh_of_four"), schedule, ranks)
    else:
        with jaxpp.RemoteMpmdMesh((ranks,)) as mesh:
            actual = train(mesh, schedule, ranks)
    chex.assert_trees_all_equal(actual, expected, strict=True)
    other = train(local(ranks), schedule, ranks, steps=2)
    with pytest.raises(AssertionError):
        chex.assert_trees_all_equal(actual[0], other[0], strict=True)


def test_recomputations_change_no_bit(mesh_of_four):
    schedule = jaxpp.schedules.Recompute("zb_h1", microbatches=[0, 2, 3])
    actual = train(mesh_of_four, schedule, 4)
    chex.assert_trees_all_equal(actual, train(local(4), SCHEDULES["zb_h1"], 4), strict=True)


def test_a_tied_parameter_is_updated_alike_on_its_ranks(mesh_of_four):
    args: Any = start()
    expected = start()
    remote = jaxpp.place(step_of(tied_loss), mesh_of_four, donate_argnums=(0, 1))
    here = jaxpp.place(step_of(tied_loss), local(4), donate_argnums=(0, 1))
    for number in range(3):
        *args, loss = remote(*args, batch(number))
        *expected, expected_loss = here(*expected, batch(number))
    assert args[0][0].ranks == (0, 3)
    chex.assert_trees_all_equal(jax.device_get(args), jax.device_get(expected), strict=True)
    assert float(loss) == float(expected_loss)


# ---- what comes back ----------------------------------------------------------------------------


def test_results_are_arrays_that_stay_with_their_ranks(mesh):
    step = jaxpp.place(step_of(), mesh)
    params, momentum, rate, loss = step(*start(), batch())
    assert [p.ranks for p in params] == [(0,), (1,), (2,)]
    assert isinstance(loss, jaxpp.RemoteArray) and eqx.is_array(loss)
    assert (loss.shape, loss.dtype, loss.ndim, loss.size) == ((), jnp.float32, 0, 1)
    assert loss.sharding == jaxpp.RemoteSharding(mesh, (2,))
    assert params[0].nbytes == 4 * 8 * 8 and len(params[0]) == 8
    assert len(eqx.filter([params, momentum, rate], eqx.is_inexact_array)[0]) == 3
    assert "on rank 1" in repr(params[1])
    here = jaxpp.place(step_of(), local(3))(*start(), batch())
    assert float(loss) == float(here[-1]) == loss.item() and f"{loss:.3f}" == f"{here[-1]:.3f}"
    chex.assert_trees_all_equal(np.asarray(params[1]), np.asarray(here[0][1]), strict=True)
    chex.assert_trees_all_equal(jnp.asarray(params[1]), here[0][1], strict=True)
    assert jax.block_until_ready(loss) is loss


def with_noise(params, momentum, rate, x):
    """A step with random numbers, numbers of the default type, and one that a caller may spoil."""
    *_, loss = step_of()(params, momentum, rate, x)
    return loss, jax.random.normal(jax.random.key(0), (4,)), jnp.arange(3.0), jnp.sqrt(rate)


@pytest.mark.parametrize(
    "setting",
    [
        lambda: jax.threefry_partitionable(False),
        lambda: jax.enable_x64(True),
        lambda: jax.default_matmul_precision("highest"),
    ],
    ids=["threefry", "x64", "precision"],
)
def test_settings_of_a_call_are_those_of_the_driver(mesh, setting):
    steps = [jaxpp.place(with_noise, where) for where in (mesh, local(3))]
    plain = [jax.device_get(step(*start(), batch())) for step in steps]
    with setting():
        params, momentum, _ = start()
        args = jax.tree.map(lambda x: jnp.asarray(x, float), (params, momentum)), 0.1, batch()
        found = [jax.device_get(step(*args[0], *args[1:])) for step in steps]
    for remote, here in (plain, found, [jax.device_get(step(*start(), batch())) for step in steps]):
        chex.assert_trees_all_equal(remote, here, strict=True)


def test_nans_are_found_where_they_are_asked_for(ray_session):
    with jaxpp.RemoteMpmdMesh((3,)) as mesh:
        step = jaxpp.place(with_noise, mesh)
        assert np.isnan(step(*start()[:2], -1.0, batch())[-1])
        with jax.debug_nans(True), pytest.raises(jaxpp.RankError, match="FloatingPoint.*nan"):
            np.asarray(step(*start()[:2], -1.0, batch())[-1])
        mesh.restart()
        assert np.isnan(step(*start()[:2], -1.0, batch())[-1])


def test_arrays_that_nobody_holds_are_dropped_by_their_ranks(mesh):
    step = jaxpp.place(step_of(), mesh)
    empty = held(mesh)
    state = step(*start(), batch())
    full = held(mesh)
    assert all(full[rank] > empty[rank] for rank in full)
    for number in range(5):
        state = step(*state[:3], batch(number))
    assert held(mesh) == full
    del state
    assert held(mesh) == empty


def test_a_donated_array_says_what_has_consumed_it(mesh):
    step = jaxpp.place(step_of(), mesh, donate_argnums=(0, 1))
    params, momentum, rate, _ = step(*start(), batch())
    step(params, momentum, rate, batch())
    with pytest.raises(
        ValueError, match=r"args\[0\]\[0\] was donated as args\[0\]\[0\] to call \d"
    ):
        step(params, momentum, rate, batch())
    with pytest.raises(ValueError, match=r"donated as args\[0\]\[1\] to call"):
        np.asarray(params[1])
    assert params[0].is_deleted() and "deleted" in repr(params[0])


def test_the_same_array_twice_is_refused_where_one_is_donated(mesh):
    step = jaxpp.place(step_of(), mesh, donate_argnums=(0,))
    params, *_ = jaxpp.place(step_of(), mesh)(*start(), batch())
    with pytest.raises(ValueError, match="is the same array as"):
        step(params, params, jnp.float32(0.1), batch())


def test_arguments_of_this_process_are_deleted_where_they_are_donated(mesh):
    args = start()
    jaxpp.place(step_of(), mesh, donate_argnums=(0, 1))(*args, batch())
    assert args[0][0].is_deleted() and not args[2].is_deleted()


def test_what_another_step_reads_elsewhere_is_sent_there(mesh):
    """An evaluation whose cuts are others than the training's."""
    params, *_ = jaxpp.place(step_of(), mesh)(*start(), batch())

    def forward(params, x):
        for i, w in enumerate(reversed(params)):
            x = jnp.tanh((x if i == 0 else jaxpp.pipeline_enter_stage(x)) @ w)
        return jnp.mean(x)

    loop = jaxpp.microbatch(jaxpp.wrap_forward(forward), 2)
    evaluate = jaxpp.schedule(loop, jaxpp.schedules.ForwardOnly())
    expected = jaxpp.place(evaluate, local(3))(jax.device_get(params), batch())
    for _ in range(2):
        assert float(jaxpp.place(evaluate, mesh)(params, batch())) == float(expected)
    assert not params[0].is_deleted()


def test_another_input_shape_is_another_program(mesh):
    step = jaxpp.place(step_of(), mesh)
    small = batch()[:4]
    for x in (batch(), small, batch()):
        expected = jaxpp.place(step_of(), local(3))(*start(), x)[-1]
        assert float(step(*start(), x)[-1]) == float(expected)


def test_keys_and_narrow_types_go_there_and_back(mesh):
    def loss(params, x, key):
        for w in params:
            x = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w))
        return jnp.mean(x + jax.random.normal(key, x.shape))

    grad = jaxpp.microbatch(
        jax.value_and_grad(jaxpp.wrap_forward(loss)), 2, in_axes=(None, 0, None)
    )
    grad_fn = jaxpp.schedule(grad, jaxpp.schedules.OneFOneB())

    def step(params, key, x):
        key, own = jax.random.split(key)
        value, grads = grad_fn(params, x, own)
        return jax.tree.map(lambda p, g: (p - g).astype(p.dtype), params, grads), key, value

    params = [w.astype(jnp.bfloat16) for w in start()[0][:2]]
    args = params, jax.random.key(3, impl="rbg"), batch().astype(jnp.bfloat16)
    new, key, value = jaxpp.place(step, mesh)(*args)
    expected = jaxpp.place(step, local(3))(*args)
    chex.assert_trees_all_equal(jax.device_get(new), jax.device_get(expected[0]), strict=True)
    assert jnp.asarray(key).dtype == args[1].dtype
    assert (jax.random.key_data(jnp.asarray(key)) == jax.random.key_data(expected[1])).all()
    with pytest.raises(TypeError, match="random keys"):
        np.asarray(key)
    assert new[0].dtype == jnp.bfloat16 and float(value) == float(expected[2])


# ---- batches that the ranks load ----------------------------------------------------------------


def load(number):
    rng = np.random.default_rng(number)
    return rng.normal(size=(8, 8))  # float64, as NumPy has it


def test_ranks_load_their_batch_themselves(mesh):
    fed = jaxpp.place(step_of(), mesh, donate_argnums=(0, 1), feed={3: load})
    args, expected = start(), start()
    here = jaxpp.place(step_of(), local(3), donate_argnums=(0, 1), feed={3: load})
    plain = jaxpp.place(step_of(), local(3))
    assert float(plain(*start(), load(0))[-1]) == float(here(*start(), 0)[-1])
    for number in range(3):
        *args, loss = fed(*args, number)
        *expected, expected_loss = here(*expected, number)
    assert float(loss) == float(expected_loss)
    chex.assert_trees_all_equal(jax.device_get(args[0]), jax.device_get(expected[0]), strict=True)


# ---- what is recorded, compiled, and how arrays go ----------------------------------------------


def test_a_trace_has_all_that_the_ranks_ran_and_sent(mesh, tmp_path):
    step = jaxpp.place(step_of(), mesh)
    state = step(*start(), batch())
    mesh.start_trace(tmp_path / "trace")
    with pytest.raises(RuntimeError, match="traced already"):
        mesh.start_trace(tmp_path / "other")
    for number in range(2):
        state = step(*state[:3], batch(number))
    trace = mesh.stop_trace()
    ran = [i for p in step.programs for i in p.instructions if isinstance(i, Run)]
    assert sorted(r.label for r in trace.runs) == sorted(2 * [i.label for i in ran])
    assert len(trace.messages) == 2 * sum(len(p.sends) for p in step.programs)
    assert {r.rank for r in trace.runs} == {0, 1, 2} and not trace.errors
    assert (tmp_path / "trace" / "timeline.json").exists()
    with pytest.raises(RuntimeError, match="not traced"):
        mesh.stop_trace()


def kept(mesh):
    """The numbers of steps and of executables that each rank keeps, and the driver's numbers."""
    library = mesh._group.library
    own = len(library._steps), len(library._known), len(library._carried)
    return mesh.apply(number_of_executables, {r: () for r in range(mesh.num_ranks)}), own


def number_of_executables(process):
    return len(process._steps), len(process.computations)


def test_what_only_a_collected_step_has_is_dropped(ray_session):
    with jaxpp.RemoteMpmdMesh((2,)) as mesh:
        args = *start(init_params(2)), batch()
        first = jaxpp.place(step_of(), mesh)
        first(*args)
        before = kept(mesh)
        for factor in (2.0, 3.0):
            other = jaxpp.place(lambda *a: (step_of()(*a), a[2] * factor), mesh)  # noqa: B023  # pyright: ignore
            other(*args)
            assert all(own[1] > before[0][rank][1] for rank, own in kept(mesh)[0].items())
            del other
            gc.collect()
            again = first(*args)
            assert kept(mesh) == before
        expected = jaxpp.place(step_of(), local(2))(*args)
        chex.assert_trees_all_equal(jax.device_get(again), jax.device_get(expected), strict=True)


def faults_of_tasks(process):
    """The new pages of 20 calls, whose results have 1,024 pages each."""
    del process
    call, x = jax.jit(lambda x: x + 1), jnp.zeros(1 << 20)
    for n in range(60):
        if n == 40:  # each thread of JAX's has had its turn
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        jax.block_until_ready(call(x))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_memory_that_tasks_free_stays_with_a_worker_on_cpu(mesh, ray_session):
    assert mesh.apply(faults_of_tasks, {0: ()})[0] < 10 * 1024
    given = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}  # what a user gives counts
    with jaxpp.RemoteMpmdMesh((1,), environment=given) as other:
        assert other.apply(faults_of_tasks, {0: ()})[0] >= 20 * 1024


@pytest.mark.more
def test_transfers_by_jax_give_the_same_and_restart_replaces_all_workers(ray_session):
    """Its messages are large enough to be pulled."""
    ranks = dict.fromkeys(range(2), ())
    with jaxpp.RemoteMpmdMesh((2,), transport="jax") as mesh:
        bench = faults.Bench.on(mesh)  # it trains, and compares with a local mesh
        before = mesh.apply(faults.pid_of, ranks)
        mesh.restart()
        bench.train_once()
        assert not before.items() & mesh.apply(faults.pid_of, ranks).items()


# ---- bad input ----------------------------------------------------------------------------------


def test_a_mesh_of_another_size_is_refused(mesh):
    with pytest.raises(ValueError, match="4 ranks .*, but the mesh has 3"):
        jaxpp.place(step_of(tied_loss), mesh)(*start(), batch())


def test_an_array_of_another_mesh_is_refused(mesh, mesh_of_four):
    params, momentum, rate, _ = jaxpp.place(step_of(tied_loss), mesh_of_four)(*start(), batch())
    step = jaxpp.place(step_of(), mesh)
    told = r"args\[0\]\[0\] is RemoteArray\(.* on another mesh, RemoteMpmdMesh\(\(4,\), .* "
    told += r"a call takes .* of its own mesh, .*\(\(3, 1\), .*pass jaxpp\.gather\(x\)"
    with pytest.raises(ValueError, match=told):
        step(params, momentum, rate, batch())
    own, *_ = step(*start(), batch())  # and where arrays of two meshes are mixed
    with pytest.raises(ValueError, match=r"args\[0\]\[1\] is .* on another mesh"):
        step([own[0], params[1], *own[2:]], *start()[1:], batch())
    gathered = step(jaxpp.gather(params), *jaxpp.gather((momentum, rate)), batch())
    assert np.isfinite(float(gathered[-1]))


def test_a_deleted_array_says_so_and_the_way_out(ray_session):
    with jaxpp.RemoteMpmdMesh((1,)) as mesh:
        step = jaxpp.place(lambda x: x + 1, mesh)
        gone, kept = step(jnp.ones(2)), step(jnp.ones(2))
        gone.delete()
        with pytest.raises(ValueError, match=r"args\[0\] was dropped by delete\(\)") as caught:
            step(gone)
        others = (np.asarray, jaxpp.gather, lambda x: x.block_until_ready())
        told = [str(caught.value)]
        for use in others:
            with pytest.raises(ValueError, match=r"float32\[2\] was dropped by delete") as caught:
                use(gone)
            told.append(str(caught.value))
        assert all("call delete() after its last use" in text for text in told), told
        assert not any("that call returned" in text or "donate" in text for text in told)
        stacked = jaxpp.StackedArray([kept, gone])
        with pytest.raises(ValueError, match="call delete.. after its last use"):
            step(stacked)


def test_keys_are_gathered_and_device_get_says_so(ray_session):
    with jaxpp.RemoteMpmdMesh((1,)) as mesh:
        keys, x = jaxpp.place(lambda x: (jax.random.split(jax.random.key(3)), x + 1), mesh)(1.0)
        for tree in (keys, [x, keys], jaxpp.StackedArray([keys, keys])):
            with pytest.raises(TypeError, match=r"key<fry>\[2\].* random keys, .*jaxpp\.gather"):
                jax.device_get(tree)
        assert (jaxpp.gather([x, keys])[1] == jax.random.split(jax.random.key(3))).all()


def test_a_mesh_that_was_shut_down_says_so(ray_session):
    mesh = jaxpp.RemoteMpmdMesh((1,))
    step = jaxpp.place(lambda x: x + 1, mesh)
    result = step(jnp.ones(2))
    here = jaxpp.place(lambda x: x + 1, jaxpp.MpmdMesh((1,)))
    assert np.asarray(here(jaxpp.gather(result))).tolist() == [3, 3]
    with pytest.raises(ValueError, match=r"args\[0\] is .* on rank 0\), .* pass jaxpp.gather"):
        here(result)
    mesh.shutdown()
    mesh.shutdown()
    with pytest.raises(ValueError, match="has been shut down"):
        step(jnp.ones(2))
    with pytest.raises(ValueError, match=r"args\[0\] is .*lost when its RemoteMpmdMesh was shut"):
        here(result)
    assert "lost when its RemoteMpmdMesh was shut down" in repr(result)
    for use in (np.asarray, float, jaxpp.gather, step, lambda x: x.block_until_ready()):
        with pytest.raises(ValueError, match="shut down; fetch what you keep .*gather|new one"):
            use(result)
    with pytest.raises(
        ValueError, match=r"This RemoteArray of float32\[2\] was lost when its Remote"
    ):
        np.asarray(result)
    result.delete()
    with pytest.raises(ValueError, match=r"args\[0\] was dropped by delete\(\)"):
        here(result)


def test_a_fork_of_the_driver_leaves_the_mesh_alone(mesh):
    step = jaxpp.place(step_of(), mesh)
    before = step(*start(init_params()), batch())
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # ends a child that waits for threads, which it does not have
        mesh.shutdown()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    chex.assert_trees_all_equal(
        *map(jax.device_get, (before, step(*start(init_params()), batch())))
    )


def test_other_versions_are_refused(ray_session, monkeypatch):
    from jaxpp.runtime.site import _group

    monkeypatch.setattr(_group, "versions", lambda: {"jax": "0.9.0"})
    with pytest.raises(ValueError, match=r"rank 0 \(process .* has jax .* \(here 0.9.0\)"):
        jaxpp.RemoteMpmdMesh((1,))


@pytest.mark.parametrize(
    ("shape", "names", "message"),
    [
        ((2, 2), ("mpmd",), "a name of its own for each axis"),
        ((2,), ("data",), "needs an axis named 'mpmd'"),
        ((0,), ("mpmd",), "size 1 at least"),
    ],
)
def test_axes_are_checked_before_anything_is_started(shape, names, message):
    with pytest.raises(ValueError, match=f"RemoteMpmdMesh.*{message}"):
        jaxpp.RemoteMpmdMesh(shape, names)


def test_worker_processes_run_fused_tasks_with_the_same_bits(ray_session):
    with jaxpp.RemoteMpmdMesh((test_fuse.RANKS,)) as mesh:
        step = test_fuse.placed(jaxpp.schedules.DualPipe(), 2, mesh=mesh)
        got = test_fuse.run(step, 2)
    assert any(r.others for r in test_fuse.runs(step))
    alone = test_fuse.placed(jaxpp.schedules.DualPipe(), 2, "none")
    assert_same(got, test_fuse.run(alone, 2))
