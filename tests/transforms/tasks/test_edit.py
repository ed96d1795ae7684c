"""A rule edits scheduled loops: what its edits compute, and which edits are refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp
from jaxpp import testing
from jaxpp._program import Run
from jaxpp.extend import Kind, edit_loops
from jaxpp.schedules import (
    CATALOGUE,
    DualPipe,
    ForwardOnly,
    FromTable,
    Gather,
    Interleaved1F1B,
    Offload,
    OneFOneB,
    Recompute,
    ScheduleError,
    Task,
    ZeroBubbleH1,
    from_tasks,
)
from tests.helpers import assert_close, assert_same, mesh_of

M, WIDTH = 4, 4
K = Kind("K", "quiet", after="F", holds=0)
E = Kind("E", "round", of_stage=True)
T = Kind("T", "round again", of_stage=True, makes="E")
KEYS = jax.random.split(jax.random.key(0), 5)
WS = [jax.random.normal(key, (WIDTH, WIDTH)) / 2 for key in KEYS[:2]]
X = jax.random.normal(KEYS[4], (2 * M, WIDTH))


def loss_fn(ws, x):
    for n, w in enumerate(ws):
        x = jnp.tanh((jaxpp.pipeline_enter_stage(x) if n else x) @ w)
    return jnp.mean((x - 1) ** 2)


def grad_of(schedule=None, microbatches=M):
    grad = jax.value_and_grad(jaxpp.wrap_forward(loss_fn))
    return jaxpp.schedule(jaxpp.microbatch(grad, microbatches), schedule or OneFOneB())


def nothing(loop):
    return loop


def edited(rule, schedule=None, **options):
    """What the edited gradient gives on two ranks, which is what it gives without a mesh."""
    fun = edit_loops(grad_of(schedule), rule, **options)
    got = jax.device_get(jaxpp.place(fun, mesh_of(2))(WS, X))
    assert_close(got, jax.device_get(jax.jit(fun)(WS, X)))
    return got


def value_between(loop, maker, reader):
    return next(v for v in loop.values if v.maker == maker and reader in v.readers)


# ---- edits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_loop_with_tasks_of_a_new_kind_gives_the_same_bits_under_each_schedule(name):
    schedule = CATALOGUE[name]()
    stages = 4 * schedule.stages_per_rank
    ws = [jax.random.normal(k, (WIDTH, WIDTH)) / 2 for k in jax.random.split(KEYS[0], stages)]
    x = jnp.tile(X, (4, 1))

    def rule(loop):
        for stage in range(stages):
            for value in [v for v in loop.values if v.maker == ("F", stage)][:1]:
                loop, made = loop.insert(K, stage, lambda a: a + 0, [value])
                for key in value.readers:
                    if key.stage == stage:
                        loop = loop.read(key, made[0], of=value)
        return loop

    if name.startswith("forward_only"):
        fun = jaxpp.microbatch(jaxpp.wrap_forward(loss_fn), 16)
    else:
        fun = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss_fn)), 16)
    scheduled = jaxpp.schedule(fun, schedule)
    ranks = len(schedule.table(stages, 16).ranks)
    steps = [jaxpp.place(f, mesh_of(ranks)) for f in (scheduled, edit_loops(scheduled, rule))]
    want, got = (jax.device_get(step(ws, x)) for step in steps)
    assert_same(got, want)
    runs = [i for p in steps[1].programs for i in p.instructions if isinstance(i, Run)]
    assert any(run.label.startswith("K") for run in runs)


def test_a_value_is_replaced_for_those_who_read_it():
    def rule(loop):
        sent = value_between(loop, ("F", 0), ("F", 1))
        return loop.replace(("F", 0), [sent], lambda h: 2 * h)

    (loss, (first, second)) = edited(rule)

    def twice(ws, x):
        return jnp.mean((jnp.tanh(2 * jnp.tanh(x @ ws[0]) @ ws[1]) - 1) ** 2)

    want, grads = jax.value_and_grad(twice)(WS, X)
    assert_close((loss, second), (want, grads[1]))
    # The first stage's backward reads the value, too: the derivative of tanh is of what it gets.
    assert not np.allclose(first, grads[0])


@pytest.mark.parametrize("schedule", [OneFOneB(), ZeroBubbleH1()], ids=str)
def test_gradients_are_replaced_before_they_are_added_up(schedule):
    def rule(loop):
        for key in loop.tasks:
            if grads := loop.gradients(key):
                loop = loop.replace(key, grads, lambda *gs: [4 * g for g in gs])
        return loop

    (loss, grads), (same, plain) = edited(rule, schedule), edited(nothing, schedule)
    assert_same((loss, grads), (same, [4 * g for g in plain]))


def test_a_task_that_adds_a_number_to_a_sum_is_edited_too():
    """A loss that counts its microbatches: it has 1.0 as a further result."""

    def rule(loop):
        own = [v for v in loop.values if v.maker == ("F", 1)]
        assert own and not loop.gradients(("F", 1))
        return loop.replace(("F", 1), own, lambda *xs: [2 * x for x in xs])

    grad = jax.value_and_grad(
        jaxpp.wrap_forward(lambda ws, x: (loss_fn(ws, x), jnp.float32(1))), has_aux=True
    )
    loop = jaxpp.microbatch(grad, M, reduce=(("mean", "sum"), "mean"))
    fun = edit_loops(jaxpp.schedule(loop, OneFOneB()), rule)
    (_, count), grads = jaxpp.place(fun, mesh_of(2))(WS, X)
    assert count == M
    assert not np.allclose(grads[1], edited(nothing)[1][1])


@pytest.mark.parametrize("schedule", [OneFOneB(), DualPipe()], ids=str)
def test_a_result_has_each_microbatch_in_its_row_and_any_structure(schedule):
    def rule(loop):
        sent = value_between(loop, ("F", 0), ("F", 1))
        return loop.result("h", ("F", 0), lambda h: {"mean": h.mean(), "all": (h,)}, [sent])

    microbatches = 4
    fun = edit_loops(grad_of(schedule, microbatches), rule, has_aux=True)
    _, found = jaxpp.place(fun, mesh_of(2))(WS, X)
    h = jnp.tanh(X @ WS[0]).reshape(microbatches, -1, WIDTH)
    assert_close(found, {"h": {"mean": h.mean((1, 2)), "all": (h,)}})


def test_what_a_function_closes_over_may_be_an_argument_of_the_step():
    def step(ws, x, shift):
        def rule(loop):
            sent = value_between(loop, ("F", 0), ("F", 1))
            loop, new = loop.after(("F", 0), lambda h: h + shift, [sent])
            return loop.read(("F", 1), new[0], of=sent)

        return edit_loops(grad_of(), rule)(ws, x)[0]

    shift = jnp.arange(WIDTH, dtype=jnp.float32)
    want = jnp.mean((jnp.tanh((jnp.tanh(X @ WS[0]) + shift) @ WS[1]) - 1) ** 2)
    assert_close(jaxpp.place(step, mesh_of(2))(WS, X, shift), want)
    assert_close(jax.vmap(step, (None, None, 0))(WS, X, jnp.stack([shift, shift]))[1], want)


def test_values_and_constants_that_a_task_reads_already_are_read_once():
    shift = jnp.arange(WIDTH, dtype=jnp.float32)

    def rule(loop):
        sent = value_between(loop, ("F", 0), ("F", 1))
        for _ in range(2):  # each closes over the same array
            loop, (new,) = loop.after(("F", 0), lambda h: h + shift, [sent])
        loop, (both,) = loop.insert(K, 0, lambda a, b: a + b, [new, new])
        loop = loop.read(("F", 1), both, of=sent)
        # Now the task reads `both`; so it does for another value.
        loop, (more,) = loop.after(("F", 0), lambda h: 3 * h, [sent])
        loop = loop.before(("F", 1), lambda a, b: a - b, [more, more], of=both)
        loop = loop.before(("F", 1), lambda a, b: a + b, [both, both], of=more)
        return loop.replace(("F", 0), [new], lambda h: h + shift)

    loss, _ = edited(rule)
    h = jnp.tanh(X @ WS[0]) + 2 * shift
    # `more - more` is 0, whatever it is; `both` is dropped again.
    assert_close(loss, jnp.mean((jnp.tanh(0 * h @ WS[1]) - 1) ** 2))


def test_a_task_that_reads_one_value_for_two_reads_it_once():
    def rule(loop):
        kept = [v for v in loop.values if v.maker == ("F", 1) and ("B", 1) in v.readers]
        first, second = [v for v in kept if v.aval.shape == (2, WIDTH)][:2]
        return loop.read(("B", 1), first, of=second)

    def loss(ws, x):
        h = jaxpp.pipeline_enter_stage(x @ ws[0])
        return jnp.mean(jnp.sin(h @ ws[1]) * jnp.sin(h @ ws[1] + 1))

    grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss)), M)
    grad = edit_loops(jaxpp.schedule(grad, OneFOneB()), rule)
    got = jaxpp.place(grad, mesh_of(2))(WS, X)
    assert_close(got, jax.jit(grad)(WS, X))


def test_edits_commute_with_vmap():
    def rule(loop):
        sent = value_between(loop, ("F", 0), ("F", 1))
        loop, half = loop.after(("F", 0), lambda h: h.astype(jnp.bfloat16), [sent])
        return loop.before(("F", 1), lambda h: h.astype(jnp.float32), half, of=sent)

    xs = jnp.stack([X, X + 1])
    inside = edit_loops(jax.vmap(grad_of(), (None, 0)), rule)(WS, xs)
    assert_close(inside, jax.vmap(edit_loops(grad_of(), rule), (None, 0))(WS, xs))


def test_each_loop_of_a_function_is_edited_and_forwards_have_no_gradients():
    def both(ws, x):
        forward = jaxpp.microbatch(jaxpp.wrap_forward(loss_fn), M)
        return jaxpp.schedule(forward, ForwardOnly())(ws, x), grad_of()(ws, x)

    seen = []

    def rule(loop):
        seen.append((loop.tasks, [len(loop.gradients(key)) for key in loop.tasks]))
        return loop

    assert_close(edit_loops(both, rule)(WS, X), both(WS, X))
    assert [counts for _, counts in seen] == [[0, 0], [0, 0, 1, 1]]
    assert [str(key) for key in seen[1][0]] == ["F0", "F1", "B1", "B0"]


def test_a_new_task_comes_between_no_two_that_run_together():
    order = "F{s}.0 F{s}.1 B{s}.0 F{s}.2 B{s}.1 B{s}.2"
    orders = [order.format(s=s).split() for s in range(2)]
    table = from_tasks(orders, overlaps=["F1.1", "F1.2"])
    tables = []

    def rule(loop):
        for stage, before in ((0, None), (1, ("B", 1))):
            kept = [v for v in loop.values if v.maker == ("F", stage)][:1]
            loop, _ = loop.insert(K, stage, lambda h: h, kept, before=before)
        tables.append(loop.table)
        return loop

    grad_fn = edit_loops(grad_of(FromTable(table), 3), rule)
    assert_close(grad_fn(WS, X[:6]), grad_of(FromTable(table), 3)(WS, X[:6]))
    assert " ".join(map(str, tables[0].ranks[1])) == (
        "F1.0 K1.0 F1.1 B1.0 K1.1 F1.2 B1.1 K1.2 B1.2"
    )
    assert tables[0].overlaps == table.overlaps


def test_with_disabled_jit_it_is_the_plain_function():
    with jax.disable_jit():
        assert_close(edit_loops(grad_of(), nothing)(WS, X), grad_of()(WS, X))


# ---- proofs -------------------------------------------------------------------------------------


def offset(loop):
    """An edit that changes values."""
    sent = value_between(loop, ("F", 0), ("F", 1))
    return loop.replace(("F", 0), [sent], lambda h: h + 1)


@pytest.mark.parametrize(("rule", "proven"), [(nothing, True), (offset, False)])
def test_a_certificate_says_whether_the_edit_is_part_of_what_is_proven(rule, proven):
    step = jaxpp.place(edit_loops(grad_of(), rule), mesh_of(2))
    found = jaxpp.certify(step, WS, X)
    assert found.exact and ("schedule" in found.transforms) == proven
    assert ("edit_loops" in found.transforms) == proven == (not found.edits)
    if not proven:
        assert "those of the edited function" in str(found) and "`offset` (" in str(found)


def test_a_broken_program_of_an_edited_loop_is_refuted():
    lowered = jaxpp.place(edit_loops(grad_of(), offset), mesh_of(2)).lower(WS, X)
    first = lowered.bundle.programs[0]
    runs = [i for i in first.instructions if isinstance(i, Run) and i.label == "B0.1"]
    kept = tuple(i for i in first.instructions if i not in runs)
    programs = (dataclasses.replace(first, instructions=kept), *lowered.bundle.programs[1:])
    broken = dataclasses.replace(lowered.bundle, programs=programs)
    with pytest.raises(jaxpp.Refuted):
        dataclasses.replace(lowered, bundle=broken).certify()


# ---- tasks of a stage ---------------------------------------------------------------------------


def code_of(ws):
    return [w.astype(jnp.bfloat16) for w in ws], jnp.float32(2)


def coded(loop, kind=E):
    """Each stage makes a code of its parameters, which its tasks decode."""
    for stage in range(loop.table.num_stages):
        read = [v for v in loop.constants if any(key.stage == stage for key in v.readers)]
        loop, (*codes, scale) = loop.insert(kind, stage, lambda *ws: code_of(ws), read)
        for old, code in zip(read, codes, strict=True):
            for key in [key for key in old.readers if key.stage == stage]:
                two = lambda w, s: s * w.astype("float32") / 2  # noqa: E731
                loop = loop.before(key, two, [code, scale], of=old)
    return loop


@pytest.mark.parametrize(
    "schedule", [Recompute(ZeroBubbleH1()), DualPipe(), Offload(Interleaved1F1B(2))], ids=str
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_what_a_stage_makes_of_constants_all_its_tasks_read(schedule, replicas):
    stages = 2 * schedule.stages_per_rank
    ws = [jax.random.normal(k, (WIDTH, WIDTH)) / 2 for k in jax.random.split(KEYS[0], stages)]
    grad = jax.value_and_grad(jaxpp.wrap_forward(loss_fn))
    grad = jaxpp.microbatch(grad, M, replicas=replicas)
    grad = jaxpp.schedule(grad, schedule)
    fun, x = edit_loops(grad, coded), jnp.tile(X, (2, 1))
    step = jaxpp.place(fun, mesh_of(2))
    got = jax.device_get(step(ws, x))
    # The backward, too, reads the rounded parameters.
    rounded = [w.astype(jnp.bfloat16).astype(jnp.float32) for w in ws]
    assert_same(got, jax.device_get(jaxpp.place(grad, mesh_of(2))(rounded, x)))
    assert_close(got, jax.device_get(jax.jit(fun)(ws, x)))
    assert jaxpp.certify(step, ws, x).exact
    runs = [i for p in step.programs for i in p.instructions if isinstance(i, Run)]
    count = sum(run.label.startswith("E") for run in runs)
    assert count == stages * (2 if isinstance(schedule, DualPipe) else 1)


def test_a_table_says_when_a_stage_makes_it_again():
    orders = [["T0.0", "F0.0", "F0.1", "B0.0", "B0.1"]]
    orders += [["E1.0", "F1.0", "T1.0", "B1.0", "F1.1", "E1.1", "B1.1"]]
    step = jaxpp.place(edit_loops(grad_of(FromTable(from_tasks(orders)), 2), coded), mesh_of(2))
    rounded = [w.astype(jnp.bfloat16).astype(jnp.float32) for w in WS]
    assert_same(step(WS, X), jaxpp.place(grad_of(None, 2), mesh_of(2))(rounded, X))
    runs = [i for p in step.programs for i in p.instructions if isinstance(i, Run)]
    made = [run for run in runs if run.label[0] in "ET"]
    assert [run.label for run in made] == ["T0.0", "E1.0", "T1.0", "E1.1"]


def test_what_a_stage_makes_is_no_value_of_a_microbatch():
    """So rules that go through the values do the same if the schedule gathers parameters."""
    seen = []

    def look(loop):
        seen.append([(v.aval, v.maker, v.readers) for v in loop.values])
        seen.append([(str(v.maker or "-"), *map(str, v.readers)) for v in loop.constants])
        return loop

    for schedule in (OneFOneB(), Gather(OneFOneB(), stages=[1])):
        edited(look, schedule)
    assert seen[0] == seen[-2]
    assert seen[1] == [("-", "F0"), ("-", "F1", "B1")]
    assert seen[-1] == [("-", "F0"), ("-", "G1"), ("G1", "F1", "B1")]


def test_a_stage_makes_what_its_tasks_read_alone():
    def rule(loop):
        (weights,) = [v for v in loop.constants if ("F", 1) in v.readers and v.aval.ndim == 2]
        loop, made = loop.insert(E, 1, lambda w: [w + 1, w + 2, w + 3], [weights])
        return loop.read(("F", 1), made[1], of=weights)

    step = jaxpp.place(edit_loops(grad_of(), rule), mesh_of(2))
    step(WS, X)
    (run,) = [i for i in step.programs[1].instructions if isinstance(i, Run) and i.label[0] == "E"]
    assert len(run.outputs) == 1


# ---- what is refused ----------------------------------------------------------------------------


def unknown_task(loop):
    return loop.after(("F", 7), jnp.sin, [])[0]


def not_read(loop):
    return loop.read(("F", 1), loop.values[-1], of=value_between(loop, ("B", 1), ("B", 0)))


def not_there(loop):
    return loop.after(("F", 0), jnp.sin, [value_between(loop, ("B", 1), ("B", 0))])[0]


def other_type(loop):
    sent = value_between(loop, ("F", 0), ("F", 1))
    return loop.before(("F", 1), lambda h: h.sum(0), [sent], of=sent)


def other_number(loop):
    sent = value_between(loop, ("F", 0), ("F", 1))
    return loop.replace(("F", 0), [sent], lambda h: [h, h])


def read_as(loop):
    sent = value_between(loop, ("F", 0), ("F", 1))
    loop, new = loop.after(("F", 0), jnp.sum, [sent])
    return loop.read(("F", 1), new[0], of=sent)


def not_its_own(loop):
    sent = value_between(loop, ("F", 0), ("F", 1))
    return loop.replace(("F", 1), [sent], lambda h: h)


def in_a_circle(loop):
    sent = value_between(loop, ("F", 0), ("F", 1))
    loop, back = loop.after(("B", 0), lambda h: h, [value_between(loop, ("B", 1), ("B", 0))])
    return loop.read(("F", 1), back[0], of=sent)


def of_an_old_kind(loop):
    return loop.insert(Kind.W, 0, jnp.sin, [loop.values[0]])[0]


def inserted_twice(loop):
    for _ in range(2):
        loop, _ = loop.insert(K, 0, jnp.sin, [loop.values[0]])
    return loop


def no_such_stage(loop):
    return loop.insert(K, 5, jnp.sin, [loop.values[0]])[0]


def of_nothing(loop):
    return loop.insert(K, 0, lambda: jnp.ones(2), [])[0]


def a_negative_stage(loop):
    return loop.insert(K, -1, jnp.sin, [loop.values[0]])[0]


def no_stage(loop):
    return loop.insert(K, "0", jnp.sin, [loop.values[0]])[0]


def of_arrays(loop):
    return loop.insert(K, 0, jnp.sin, [jnp.ones(2)])[0]


def no_key(loop):
    return loop.after("F0", jnp.sin, [loop.values[0]])[0]


def reads_two_for_one(loop):
    sent = value_between(loop, ("F", 0), ("F", 1))
    return loop.read(("F", 1), [sent, sent], of=sent)


def before_no_task(loop):
    return loop.insert(K, 0, jnp.sin, [loop.values[0]], before=("I", 0))[0]


def before_a_number(loop):
    return loop.insert(K, 0, jnp.sin, [loop.values[0]], before=5)[0]


def ordered_by_none(loop):
    return loop.order(None)


def ordered_by_lists(loop):
    return loop.order([[], []])


def ordered_by_a_number(loop):
    return loop.order(lambda tasks: [*tasks, 1])


def gathers_again(loop):
    def change(tasks):
        return [Task(Kind.H, tasks[0].stage, 0), *tasks]

    return loop.order(change)


def gathers_in_a_circle(loop):
    loop, made = loop.insert(E, 0, jnp.sin, loop.constants[:1])
    loop, more = loop.insert(Kind.G, 0, jnp.sin, made)
    return loop.read((E, 0), more, of=loop.constants[:1])


def reads_a_gradient(loop):
    return loop.insert(K, 1, jnp.sin, list(loop.gradients(("B", 1))))[0]


def named_twice(loop):
    for _ in range(2):
        loop = loop.result("same", ("F", 0), jnp.sum, [value_between(loop, ("F", 0), ("F", 1))])
    return loop


def gives_nothing(loop):
    pass


def gives_a_pair(loop):
    return loop.after(("F", 0), jnp.sin, [value_between(loop, ("F", 0), ("F", 1))])


def of_a_lost_loop(edit):
    """Goes on with the loop before `after`."""

    def lost(loop):
        sent = value_between(loop, ("F", 0), ("F", 1))
        _, new = loop.after(("F", 0), jnp.sin, [sent])
        return edit(loop, sent, new)

    return lost


read_of_a_lost_loop = of_a_lost_loop(lambda loop, sent, new: loop.read(("F", 1), new[0], of=sent))
result_of_a_lost_loop = of_a_lost_loop(
    lambda loop, sent, new: loop.result("x", ("F", 0), jnp.max, new)
)
task_of_a_lost_loop = of_a_lost_loop(lambda loop, sent, new: loop.insert(K, 0, jnp.max, new)[0])


def not_in_a_list(loop):
    return loop.after(("F", 0), jnp.sin, value_between(loop, ("F", 0), ("F", 1)))[0]


def before_a_task_of_another_rank(loop):
    return loop.insert(K, 0, jnp.sin, [loop.values[0]], before=("F", 1))[0]


def replaces_nothing(loop):
    return loop.replace(("F", 1), loop.gradients(("F", 1)), jnp.sin)


def of_a_stage_and_a_microbatch(loop):
    return loop.insert(E, 1, jnp.sin, [value_between(loop, ("F", 0), ("F", 1))])[0]


def result_of_a_stage(loop):
    loop, made = loop.insert(E, 0, jnp.sin, loop.constants[:1])
    return loop.result("x", (E, 0), jnp.sum, made)


def of_another_stage(loop):
    loop, made = loop.insert(E, 1, jnp.sin, loop.constants[:1])
    return loop.read(("F", 0), made, of=loop.constants[:1])


def too_late(loop):
    loop, made = loop.insert(E, 0, jnp.sin, loop.constants[:1], before=("B", 0))
    return loop.read(("F", 0), made, of=loop.constants[:1])


def made_again(loop):
    return loop.insert(T, 0, jnp.sin, loop.constants[:1])[0]


def acts_for_a_stage(loop):
    def shown(w):
        jax.debug.print("{}", w[0, 0])
        return w

    return loop.insert(E, 0, shown, loop.constants[:1])[0]


def replaces_a_constant(loop):
    return loop.replace(("F", 0), loop.constants[:1], jnp.sin)


def adds_a_result(loop):
    return loop.result("size", ("F", 0), jnp.max, [value_between(loop, ("F", 0), ("F", 1))])


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (unknown_task, "edits F7, which the loop does not have; its tasks are F0 F1 B1 B0"),
        (not_read, "names a value of B1, which F1 does not read; it reads values of F0"),
        (not_there, "names a value of B1 at the end of F0, which neither makes nor reads it"),
        (other_type, r"at the start of F1, which gives float32\[4\], but is to give float32\[2,4"),
        (other_number, r"gives float32\[2,4\], float32\[2,4\], but is to give float32\[2,4\];"),
        (read_as, r"lets F1 read float32\[\] in place of float32\[2,4\]; convert it"),
        (not_its_own, "replaces in F1 a value that F0 makes; replace it there"),
        (replaces_nothing, "replaces no value in F1; gradients are added up by B1 B0"),
        (not_in_a_list, r"gives Value\(.* where a list of values is due"),
        (in_a_circle, "makes a circle: F1 and .* read values of each other"),
        (of_an_old_kind, "inserts W0, which is not of a new kind; make a kind of your own"),
        (inserted_twice, "inserts K0, which is there already"),
        (no_such_stage, "inserts K5: the loop has 2 stages"),
        (a_negative_stage, "inserts K-1: the loop has 2 stages, numbered from 0"),
        (no_stage, "inserts K0: the loop has 2 stages, numbered from 0"),
        (of_arrays, r"gives \[Array\(.* where a list of values is due"),
        (no_key, "edits 'F0', which the loop does not have; its tasks are F0 F1 B1 B0"),
        (reads_two_for_one, "lets F1 read 2 values in place of 1; give one for each"),
        (of_nothing, "inserts K0, which would make values of none; .* leave out a stage"),
        (before_no_task, "inserts K0 before I0, which the table does not have"),
        (before_a_number, "inserts K0 before 5, which the table does not have"),
        (ordered_by_none, "orders tasks by None; give Loop.order a function that takes the tasks"),
        (ordered_by_lists, r"orders tasks by \[\[\], \[\]\]; give Loop.order a function"),
        (ordered_by_a_number, "orders tasks by 1; give Loop.order a function that takes the tasks"),
        (gathers_again, r"puts H.stage 0, microbatch 0. into the table, and no G0 .* Loop.insert"),
        (
            gathers_in_a_circle,
            "makes a circle.* E0 and G0 make values of constants .* without Gather",
        ),
        (reads_a_gradient, "lets a task read a gradient of B1, .* by Loop.after"),
        (named_twice, "adds two results named 'same'; put the stage in the name"),
        (gives_nothing, "gave None; a rule gives the loop"),
        (gives_a_pair, r"gave \(Loop.*; Loop.after and Loop.insert give a pair"),
        (of_a_stage_and_a_microbatch, "lets E1, which is of its stage, read or give what is of a"),
        (result_of_a_stage, "lets E0, which is of its stage, read or give what is of a microbatch"),
        (of_another_stage, r"lets F.stage 0.* read what E1 makes, but no E of that stage"),
        (too_late, r"lets F.stage 0, microbatch 0. read what E0 makes, but no E of that stage"),
        (made_again, "inserts T0, but its work is that of other kinds"),
        (acts_for_a_stage, "lets E0, which is of its stage, have an effect, such as a print"),
        (replaces_a_constant, "a value that no task makes; let it read another by Loop.read"),
        (adds_a_result, "adds results, 'size', which has_aux=True returns"),
        (read_of_a_lost_loop, "a value of F0 that this loop does not make.* `loop, new ="),
        (result_of_a_lost_loop, "a value of F0 that this loop does not make"),
        (task_of_a_lost_loop, "a value of F0 that this loop does not make"),
        (
            before_a_task_of_another_rank,
            "inserts K0 before F1, which rank 1 runs; K0 is a task of rank 0: name a task of that",
        ),
    ],
)
def test_a_wrong_rule_is_refused_by_its_name_and_line(rule, words):
    line = rule.__code__.co_firstlineno
    with pytest.raises(ValueError, match=rf"`{rule.__name__}` \(.*test_edit.py:{line}\).*{words}"):
        edit_loops(grad_of(), rule)(WS, X)


def test_a_rule_that_is_no_function_is_refused():
    with pytest.raises(TypeError, match="takes a rule, a function from a loop to a loop, got 3"):
        edit_loops(grad_of(), 3)  # pyright: ignore


def test_a_rule_that_gives_the_loop_of_an_earlier_call_is_refused():
    kept = []

    def first(loop):
        kept.append(loop)
        return kept[0]

    fun = edit_loops(grad_of(), first)
    fun(WS, X)
    with pytest.raises(ValueError, match="`first` .* another loop than the one that it got"):
        fun(WS, X[::2])


def test_an_error_in_a_function_of_a_rule_names_the_rule_the_task_and_the_line():
    def wrong(h):
        return h @ jnp.ones(3)

    def rule(loop):
        sent = value_between(loop, ("F", 0), ("F", 1))
        return loop.after(("F", 0), wrong, [sent])[0]

    with pytest.raises(TypeError) as caught:
        edit_loops(grad_of(), rule)(WS, X)
    (note,) = [n for n in caught.value.__notes__ if "edit_loops" in n]
    line = wrong.__code__.co_firstlineno
    assert "the rule `rule` (" in note and f"`wrong` ({__file__}:{line}) at the end of F0" in note


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tasks: [*tasks[:-1]], r"leaves B.stage \d, microbatch 3. out of the table"),
        (lambda tasks: tasks[::-1], "leaves a loop that cannot run: .*comes before"),
        (lambda tasks: sorted(tasks, key=str), "leaves a loop that cannot run: .*"),
        (lambda tasks: [*tasks, tasks[0]], "cannot run: F.stage 0.* is repeated"),
        (lambda tasks: [*tasks, Task(K, 9, 0)], "cannot run: K.stage 9.* is out of range"),
    ],
)
def test_an_edited_table_is_checked_as_that_of_a_schedule(change, words):
    with pytest.raises(ScheduleError, match=words):
        edit_loops(grad_of(), lambda loop: loop.order(change))(WS, X)


def test_a_function_without_a_scheduled_loop_is_refused():
    with pytest.raises(ValueError, match="no scheduled loop to edit; apply schedule first"):
        edit_loops(loss_fn, nothing)(WS, X)
    with pytest.raises(TypeError, match=r"before they are placed, got <placed .*place\(edit_loops"):
        edit_loops(jaxpp.place(grad_of(), mesh_of(2)), nothing)
    with pytest.raises(ValueError, match="edit_loops: a scheduled loop is inside a `scan`"):
        many = lambda ws, xs: jax.lax.map(lambda x: grad_of()(ws, x), xs)  # noqa: E731
        edit_loops(many, nothing)(WS, X[None])


def test_a_table_with_tasks_that_no_edit_gives_work_is_refused():
    table = from_tasks([["F0.0", "K0.0", "B0.0"], ["F1.0", "B1.0"]])
    grad_fn = grad_of(FromTable(table), 1)
    with pytest.raises(
        ValueError, match="place: the table has tasks of the kind K .quiet., .*edit"
    ):
        jaxpp.place(grad_fn, mesh_of(2)).lower(WS, X)


def test_an_edited_step_is_that_of_one_device():
    def step(ws, x):
        loss, grads = edit_loops(grad_of(), offset)(ws, x)
        return [w - 0.1 * g for w, g in zip(ws, grads, strict=True)], loss

    testing.assert_matches_single_device(jaxpp.place(step, mesh_of(2)), step, WS, X)
