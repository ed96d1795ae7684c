"""The examples of `examples/extend/`, from a folder that is not the package, as users have them.

Each runs under schedules of every form: whole backwards and halves, several stages on a rank, two
directions, recomputation. On ranks the bits are those of one device, and the proof holds.
"""

import functools
import importlib
import pathlib
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.schedules import (
    Costs,
    DualPipe,
    Interleaved1F1B,
    OneFOneB,
    Recompute,
    ScheduleError,
    ZeroBubbleH1,
    check,
    simulate,
)
from tests.helpers import assert_close, assert_same, mesh_of

FOLDER = pathlib.Path(__file__).parents[2] / "examples" / "extend"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
M, WIDTH, STAGES = 8, 8, 4
#: The schedules, each with its number of ranks.
SCHEDULES = {
    "1f1b": (OneFOneB(), 4),
    "zb_h1": (ZeroBubbleH1(), 4),
    "interleaved": (Interleaved1F1B(2), 2),
    "dualpipe": (DualPipe(), 4),
    "recompute": (Recompute(OneFOneB()), 4),
}
EACH = pytest.mark.parametrize("name", SCHEDULES)
OPTIMIZER = optax.adam(1e-2)
KEYS = jax.random.split(jax.random.key(0), STAGES + 1)
WS = [jax.random.normal(key, (WIDTH, WIDTH)) / 2 for key in KEYS[1:]]
X = jax.random.normal(KEYS[0], (2 * M, WIDTH))


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """The modules, by name, imported from a folder with nothing else in it."""
    folder = tmp_path_factory.mktemp("mine")
    for name in NAMES:
        shutil.copy(FOLDER / f"{name}.py", folder)
    sys.path.insert(0, str(folder))
    yield {name: importlib.import_module(name) for name in NAMES}
    sys.path.remove(str(folder))
    for name in NAMES:
        del sys.modules[name]


def loss_fn(ws, x):
    for n, w in enumerate(ws):
        x = jnp.tanh((jaxpp.pipeline_enter_stage(x) if n else x) @ w)
    return jnp.mean((x - 1) ** 2)


def grad_of(schedule):
    grad = jax.value_and_grad(jaxpp.wrap_forward(loss_fn))
    return jaxpp.schedule(jaxpp.microbatch(grad, M), schedule)


def step_of(grad_fn, has_aux=False, clip_norm=False):
    def step(ws, state, x):
        out = grad_fn(ws, x)
        (loss, grads), more = out if has_aux else (out, {})
        if clip_norm:
            grads, _ = optax.clip_by_global_norm(0.01).update(grads, optax.EmptyState())
        updates, state = OPTIMIZER.update(grads, state)
        return optax.apply_updates(ws, updates), state, loss, more

    return step


@functools.cache
def plain(name):
    """The step without an edit, and what it trains."""
    schedule, ranks = SCHEDULES[name]
    return both(grad_of(schedule), ranks)


def train(step, steps=2):
    """Weights, losses and what else there is after some steps; the step's arguments are donated."""
    ws, state, losses = [w + 0 for w in WS], OPTIMIZER.init(WS), []
    for n in range(steps):
        ws, state, loss, more = step(ws, state, X + n)
        losses.append(loss)
    return jax.device_get((ws, losses, more))


def both(grad_fn, ranks, has_aux=False):
    """A step on devices of its ranks' own, and what it trains; which one device trains, too."""
    step = step_of(grad_fn, has_aux)
    placed = jaxpp.place(step, mesh_of(ranks), donate_argnums=(0, 1))
    got = train(placed)
    alone = jaxpp.place(step, mesh_of(ranks, shared=True), donate_argnums=(0, 1))
    assert_same(got, train(alone))
    return placed, got


def sent(step):
    return sum(send.message.nbytes for program in step.programs for send in program.sends)


def shapes():
    return jax.eval_shape(lambda: (WS, OPTIMIZER.init(WS), X))


def order(step, rank):
    runs = [i.label for i in step.programs[rank].instructions if type(i).__name__ == "Run"]
    return " ".join(runs)


@pytest.mark.parametrize("name", NAMES)
def test_an_example_has_fifty_lines_at_most_and_needs_the_public_names_alone(name):
    text = (FOLDER / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 50 and "jaxpp._" not in text


# ---- (a) ----------------------------------------------------------------------------------------


@EACH
def test_what_goes_between_stages_is_sent_in_fewer_bytes(examples, name):
    schedule, ranks = SCHEDULES[name]
    unedited, (_, losses, _) = plain(name)
    coded = examples["int8_edges"].int8_edges(grad_of(schedule))
    step, (_, near, _) = both(coded, ranks)
    assert_close(near, losses, rtol=0.02)
    edges = 2 * (STAGES - 1) * M * 2 * WIDTH  # elements, forwards and back
    assert sent(unedited) - sent(step) == 4 * edges - (edges + 4 * edges // WIDTH)
    # Without `place` it is the same function: but for how XLA fuses a program.
    assert_close(coded(WS, X)[0], near[0])
    certificate = jaxpp.certify(step, *shapes())
    assert certificate.exact and certificate.transforms == ("place",) and certificate.edits


# ---- (b) ----------------------------------------------------------------------------------------


@EACH
def test_new_kinds_of_task_pack_what_is_kept_and_change_no_bit(examples, name):
    schedule, ranks = SCHEDULES[name]
    pack = examples["pack"].pack
    if name == "recompute":
        with pytest.raises(ValueError, match="computed again: there is nothing to pack"):
            pack(grad_of(schedule), [0, 1])(WS, X)
        return
    _, want = plain(name)
    step, got = both(pack(grad_of(schedule), [0, 1]), ranks)
    assert_same(got, want)
    runs = [str(run) for run in order(step, 0).split()]
    for i in range(M):
        if f"P0.{i}" in runs:  # of two directions, a rank has half of the microbatches
            backward = next(r for r in runs if r[0] in "BIW" and r[1:] == f"0.{i}")
            places = list(map(runs.index, [f"F0.{i}", f"P0.{i}", f"Y0.{i}", backward]))
            assert places == sorted(places)
    certificate = jaxpp.certify(step, *shapes())
    assert certificate.exact and {"schedule", "edit_loops"} <= set(certificate.transforms)


def test_what_is_offloaded_may_be_in_host_memory_if_it_comes_back(examples):
    def host(*arrays):
        return [jax.device_put(x, jax.memory.Space.Host) for x in arrays]

    def device(*arrays):
        return [jax.device_put(x, jax.memory.Space.Device) for x in arrays]

    pack, grad_fn = examples["pack"].pack, grad_of(OneFOneB())
    _, want = plain("1f1b")
    _, got = both(pack(grad_fn, [0], host, device), 4)
    assert_same(got, want)
    with pytest.raises(ValueError, match=r"lets B0 read float32<host>.* in place of float32\["):
        pack(grad_fn, [0], host)(WS, X)


# ---- (c) ----------------------------------------------------------------------------------------


@EACH
def test_the_update_of_a_stage_runs_when_its_last_gradient_is_there(examples, name):
    step, want = plain(name)
    early = examples["early_update"].early_update(step)
    assert_same(train(early), want)
    kinds = "".join(run[0] for run in order(early, 0).split() if "." in run)
    assert kinds.count("U") == (2 if name in ("interleaved", "dualpipe") else 1)
    if name == "interleaved":
        assert kinds.endswith("UBBU") and order(step, 0).endswith("update update")
    assert jaxpp.certify(early, *shapes()).exact


def test_with_a_norm_of_all_gradients_no_update_comes_before_the_last_backward(examples):
    step = step_of(grad_of(Interleaved1F1B(2)), clip_norm=True)
    early = examples["early_update"].early_update(jaxpp.place(step, mesh_of(2)))
    text = early.lower(*shapes()).as_text()
    after = text.split("\nrank 1")[0].rpartition("run B")[2]
    assert after.count("run U") + after.count("run update") >= 2


def test_an_update_that_is_a_task_is_seen_by_what_reads_tasks(examples):
    step = jaxpp.place(step_of(grad_of(Interleaved1F1B(2))), mesh_of(2), donate_argnums=(0, 1))
    early = examples["early_update"].early_update(step)
    args = WS, OPTIMIZER.init(WS), X
    found = jaxpp.measure(early, *args, repeats=1)
    assert {("U", s) for s in range(STAGES)} <= set(found.times)
    assert found.costs.of(next(t for t in found.table.tasks if t.kind == "U")) > 0
    peaks = [jaxpp.predict(s, *args, costs=Costs()).peaks for s in (step, early)]
    for late, own in zip(*peaks, strict=True):
        assert own.bytes["parameters"] <= late.bytes["parameters"]
        assert own.bytes["accumulators"] <= late.bytes["accumulators"]


# ---- (d) ----------------------------------------------------------------------------------------


@EACH
def test_gradient_norms_come_out_of_the_loop_and_change_no_bit(examples, name):
    schedule, ranks = SCHEDULES[name]
    _, (ws, losses, _) = plain(name)
    with_norms = examples["gradient_norms"].gradient_norms(grad_of(schedule))
    step, (own_ws, own_losses, norms) = both(with_norms, ranks, has_aux=True)
    assert_same((own_ws, own_losses), (ws, losses))
    _, norms = with_norms(WS, X)
    assert list(norms) == [f"stage {s}" for s in sorted(range(STAGES), reverse=True)]
    for i, x in enumerate(X.reshape(M, 2, WIDTH)):
        for s, grad in enumerate(jax.grad(loss_fn)(WS, x)):
            assert_close(norms[f"stage {s}"][i], jnp.linalg.norm(grad), rtol=1e-4)
    certificate = jaxpp.certify(step, *shapes())
    assert certificate.exact and certificate.transforms == ("place",)


@EACH
def test_gradients_are_clipped_inside_the_loop_by_an_argument_of_the_step(examples, name):
    schedule, ranks = SCHEDULES[name]

    def step(ws, x, clip):
        return examples["gradient_norms"].gradient_norms(grad_of(schedule), clip)(ws, x)

    placed = jaxpp.place(step, mesh_of(ranks))
    for clip in (0.05, 1e9):
        (_, got), _ = jax.device_get(placed(WS, X, np.float32(clip)))
        want = [np.zeros_like(w) for w in WS]
        for x in X.reshape(M, 2, WIDTH):
            for s, grad in enumerate(jax.grad(loss_fn)(WS, x)):
                want[s] += grad * min(1.0, clip / np.linalg.norm(grad)) / M
        assert_close(got, want, rtol=1e-4, atol=1e-5)


# ---- (e) ----------------------------------------------------------------------------------------


@EACH
def test_curvature_is_that_of_what_stages_read(examples, name):
    schedule, ranks = SCHEDULES[name]
    _, want = plain(name)
    curvature = examples["pipefisher"].curvature(grad_of(schedule))
    step, (ws, losses, factors) = both(curvature, ranks, has_aux=True)
    assert_same((ws, losses), want[:2])
    assert jaxpp.certify(step, *shapes()).exact
    h, wanted = X, {}
    for stage in range(1, STAGES):
        h = jnp.tanh(h @ WS[stage - 1])
        wanted[f"stage {stage}"] = [jnp.stack([x.T @ x for x in h.reshape(M, 2, WIDTH)])]
    assert_close(curvature(WS, X)[1], wanted, atol=1e-5)


def test_a_schedule_a_kind_and_a_transform_of_a_paper_fill_the_bubbles(examples):
    module = examples["pipefisher"]
    table, other = (s.table(4, M) for s in (module.PipeFisher(), OneFOneB()))
    check(table)
    assert simulate(table).makespan < simulate(other).makespan + 0.5 * M
    assert simulate(table).bubble_fraction < simulate(other).bubble_fraction
    step, (*_, factors) = both(module.curvature(grad_of(module.PipeFisher())), 4, has_aux=True)
    assert order(step, 0).split()[4:7] != [f"F0.{i}" for i in range(4, 7)]
    other = module.curvature(grad_of(OneFOneB()))
    assert_same(factors, both(other, 4, has_aux=True)[1][2])


def test_a_schedule_that_puts_curvature_before_what_it_recomputes_is_refused(examples):
    module = examples["pipefisher"]
    schedule = Recompute(module.PipeFisher())
    with pytest.raises(ScheduleError, match="C.stage 0.* comes before R.stage 0.*: it reads what"):
        module.curvature(grad_of(schedule))(WS, X)


# ---- together -----------------------------------------------------------------------------------


def all_of(examples, schedule):
    """The edits of all examples, one around the other."""
    grad_fn = examples["int8_edges"].int8_edges(grad_of(schedule))
    if not isinstance(schedule, Recompute):
        grad_fn = examples["pack"].pack(grad_fn, [0, 1])
    edited = examples["gradient_norms"].gradient_norms(grad_fn, clip=0.05)
    return examples["pipefisher"].curvature(edited)


def step_of_all(grad_fn):
    def both(ws, x):
        ((result, norms), factors) = grad_fn(ws, x)
        return result, {"norms": norms, "factors": factors}

    return step_of(both, has_aux=True)


@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_the_edits_compose(examples, name):
    schedule, ranks = SCHEDULES[name]
    grad_fn = all_of(examples, schedule)
    step, (*_, more) = both(lambda *args: grad_fn(*args)[0], ranks, has_aux=True)
    batched = jax.vmap(grad_fn, (None, 0))(WS, jnp.stack([X, X + 1]))
    for n in range(2):
        alone = grad_fn(WS, X + n)
        assert_close(jax.tree.map(lambda x, n=n: x[n], batched), alone, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("axes", [("data",), ("model",)], ids=str)
def test_the_edits_run_with_axes_inside_a_rank(examples, axes):
    schedule, _ = SCHEDULES["1f1b"]
    grad_fn = examples["gradient_norms"].gradient_norms(grad_of(schedule), clip=0.05)
    spec = jax.sharding.PartitionSpec(*axes)
    in_specs = (None, None, spec) if axes == ("data",) else (spec, None, None)
    mesh = jaxpp.MpmdMesh((4, 2), ("mpmd", *axes))
    placed = jaxpp.place(step_of(grad_fn, has_aux=True), mesh, in_specs=in_specs)
    alone = jaxpp.place(step_of(grad_fn, has_aux=True), mesh_of(4, shared=True))
    assert_close(train(placed), train(alone), rtol=1e-4, atol=1e-5)
