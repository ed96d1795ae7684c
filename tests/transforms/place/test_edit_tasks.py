"""A rule edits the tasks of a placed step: another order gives the same bits, or is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import io_callback

import jaxpp
from jaxpp._program import Run
from jaxpp.extend import edit_tasks
from jaxpp.schedules import GPipe
from tests.helpers import assert_same, mesh_of

WS = list(jax.random.normal(jax.random.key(0), (2, 4, 4)))
X = jax.random.normal(jax.random.key(1), (8, 4))


def loss_fn(ws, x):
    h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ ws[0]))
    return jnp.mean((h @ ws[1]) ** 2)


def step_fn(ws, x):
    grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss_fn)), 4)
    grads = jaxpp.schedule(grad, GPipe())(ws, x)
    return [w - 0.1 * g for w, g in zip(ws, grads, strict=True)]


def placed(fun=step_fn):
    return jaxpp.place(fun, mesh_of(2), donate_argnums=0)


def run(step):
    return jax.device_get(step([w + 0 for w in WS], X))


def with_tasks(graph, tasks):
    return dataclasses.replace(graph, tasks=tuple(tasks))


def labels(step, rank):
    return [i.label for i in step.programs[rank].instructions if isinstance(i, Run)]


def by_microbatch(graph):
    """The rank of the last stage goes back with each microbatch before it takes the next one."""
    tasks, own = list(graph.tasks), []
    for task in [t for t in tasks if t.rank == 1 and t.task and t.task.kind == "B"]:
        tasks.remove(task)
        own.append(task)
    for task in own:
        at = next(n for n, t in enumerate(tasks) if t.label == task.label.replace("B", "F"))
        tasks.insert(at + 1, task)
    return with_tasks(graph, tasks)


def test_tasks_in_another_order_give_the_same_bits():
    step, edited = placed(), edit_tasks(placed(), by_microbatch)
    assert_same(run(edited), run(step))
    order = [label for label in labels(edited, 1) if label[0] in "FB"]
    assert order == [f"{kind}1.{i}" for i in range(4) for kind in "FB"]
    assert jaxpp.certify(edited, WS, X).exact
    twice = edit_tasks(edited, lambda graph: with_tasks(graph, graph.tasks))
    assert_same(run(twice), run(step))


def backwards(graph):
    return with_tasks(graph, graph.tasks[::-1])


def update_first(graph):
    """The update of a weight, whose memory it takes as the loop takes that of its accumulator."""
    tasks = list(graph.tasks)
    last = next(t for t in reversed(tasks) if t.body.donated)
    taken = {last.inputs[i] for i in last.body.donated}
    reader = next(t for t in tasks if t is not last and taken & {*t.inputs, *t.outputs})
    return with_tasks(graph, [*tasks, dataclasses.replace(last, label="again"), reader])


def without_updates(graph):
    return with_tasks(graph, [t for t in graph.tasks if t.label != "update"])


def nothing(graph):
    pass


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (backwards, r"has update of rank . read result of B., which no task before it makes"),
        (update_first, "has again of rank . read .*, whose memory B.* before it takes"),
        (without_updates, "leaves out the task that makes the result"),
        (nothing, "gave None; a rule gives the graph"),
    ],
)
def test_what_cannot_run_is_refused_by_the_rule_and_its_line(rule, words):
    line = rule.__code__.co_firstlineno
    with pytest.raises(ValueError, match=rf"`{rule.__name__}` \(.*{line}\) {words}"):
        edit_tasks(placed(), rule).lower(WS, X)


def test_ordered_effects_happen_once_and_keep_their_order():
    def step(ws, x):
        factor = io_callback(lambda x: x, jax.ShapeDtypeStruct((), X.dtype), x[0, 0], ordered=True)
        grads = step_fn(ws, factor * x)
        jax.debug.print("{}", jnp.sum(grads[0]), ordered=True)
        return grads

    def repeated(graph):
        first = next(t for t in graph.tasks if any(e.effects for e in t.body.jaxpr.eqns))
        return with_tasks(graph, [*graph.tasks, first])

    with pytest.raises(ValueError, match="changes the order or the number of tasks with ordered"):
        edit_tasks(placed(step), repeated).lower(WS, X)


def test_a_function_that_is_not_placed_is_refused():
    with pytest.raises(TypeError, match="needs a step that place made.*use edit_loops"):
        edit_tasks(step_fn, nothing)  # pyright: ignore[reportArgumentType]
