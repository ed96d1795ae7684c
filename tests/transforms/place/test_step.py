"""`Step`: what a reader sees of it after each pass."""

import contextlib
import io
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import pytest

import jaxpp
from jaxpp.transforms.place._lower_step import PASSES

ROOT = pathlib.Path(__file__).parents[3]
PAGE = ROOT / "docs" / "how_a_step_flows.md"


def test_the_page_shows_what_its_code_prints():
    page = PAGE.read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, str(PAGE), "exec"), {})
    # Not the equations, which JAX writes in its own way.
    own = re.compile(r"(==== |[+-]?argument |[+-]?result )")
    assert [line for line in shown.splitlines() if own.match(line)] == [
        line for line in printed.getvalue().splitlines() if own.match(line)
    ]


def test_the_page_tells_of_each_pass():
    names = re.findall(r"^\| `(\w+)` \| [^|]* \| [^|]* \|$", PAGE.read_text(), re.MULTILINE)
    assert names == [run.__name__ for run in PASSES]


def test_rows_of_a_stack_and_what_becomes_of_them_are_in_the_records():
    def loss(layers, x):
        return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, layers)[0] ** 2)

    staged = jaxpp.wrap_forward(jaxpp.split_stages(loss, 2))
    grad = jaxpp.schedule(jaxpp.microbatch(jax.grad(staged), 2), jaxpp.schedules.OneFOneB())
    mesh = jaxpp.MpmdMesh((2,), devices=[jax.devices()[0]] * 2)
    step = jaxpp.place(lambda w, x: w - grad(w, x), mesh, donate_argnums=0)
    lowered = step.lower(jnp.ones((4, 3, 3)), jnp.ones((4, 3)))
    # What is shown without being asked for is a line, whatever the step's size.
    shown = [lowered, lowered.bundle, lowered.compile(), step, *lowered.programs]
    shown += [*lowered.bundle.computations, *lowered.passes.values()]
    assert all(len(repr(own)) < 120 and "\n" not in repr(own) for own in shown), shown
    assert repr(lowered).startswith("Lowered(2 ranks: ") and "as_text()" in repr(lowered)
    before, after = (lowered.passes[name] for name in ("trace", "distribute"))
    assert [a.rows for a in before.arguments] == [None, None]
    assert [(a.array, a.rows, a.donated) for a in after.arguments] == [
        (0, (0, 2), True),
        (0, (2, 4), True),
        (1, None, False),
    ]
    assert [(r.array, r.rows, r.becomes) for r in after.results] == [(0, (0, 2), 0), (0, (2, 4), 1)]
    assert [a.name for a in lowered.bundle.arguments] == ["[0][0:2]", "[0][2:4]", "[1]"]


def test_the_last_pass_leaves_segments_and_loops_that_make_each_variable_once():
    def loss(w, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ (w[0] * jnp.arange(3.0))))
        return jnp.mean((h @ w[1]) ** 2)

    grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss)), 2)
    grad = jaxpp.schedule(grad, jaxpp.schedules.OneFOneB())
    mesh = jaxpp.MpmdMesh((2,), devices=[jax.devices()[0]] * 2)

    def train(w, x, scale):  # both loops read what is computed of `scale` where they read it
        scaled = [v * jnp.exp(scale) for v in w]
        return jax.tree.map(jnp.subtract, grad(scaled, x), grad(scaled, 2 * x))

    step = jaxpp.place(train, mesh)
    lowered = step.lower([jnp.eye(3), jnp.eye(3)], jnp.ones((4, 3)), 1.0)
    placed = lowered.passes["place_equations"]
    eqns = placed.jaxpr.eqns
    assert {e.primitive.name for e in eqns} == {"segment", "pipeline_loop"}
    known = set(placed.jaxpr.jaxpr.invars)
    for eqn in eqns:
        read = {v for v in eqn.invars if not isinstance(v, jex.Literal)}
        assert read <= known, eqn
        assert known.isdisjoint(eqn.outvars)
        known.update(eqn.outvars)
    assert [sorted(a.stages) for a in placed.arguments] == [[0], [1], [0], [0, 1]]


def lowered_with_conditionals(update):
    """A step on two ranks whose update, of the parameters of both, has conditionals."""

    def loss(w, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        return jnp.mean((h @ w[1]) ** 2)

    grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss)), 2)
    grad = jaxpp.schedule(grad, jaxpp.schedules.OneFOneB())
    mesh = jaxpp.MpmdMesh((2,), devices=[jax.devices()[0]] * 2)
    step = jaxpp.place(lambda w, x, n: update(w, grad(w, x), n), mesh)
    return step.lower([jnp.eye(3), jnp.eye(3)], jnp.ones((4, 3)), 1)


def at_times(w, g, n):
    return jax.lax.cond(n > 2, lambda: [a - b for a, b in zip(w, g, strict=True)], lambda: w)


def at_times_within(w, g, n):
    """The inner guard is a value of a branch, and the outer one of three branches."""
    small = [lambda: at_times(w, g, n + 1), lambda: w]
    return jax.lax.switch(n, [*small, lambda: [jnp.sin(a) for a in w]])


@pytest.mark.parametrize(("update", "guards"), [(at_times, 1), (at_times_within, 2)])
def test_a_guard_has_the_name_that_the_jaxpr_gives_it(update, guards):
    step = lowered_with_conditionals(update).passes["open_spanning"]
    named = {n for names in re.findall(r"^where (.*): made", step.as_text(), re.M)
             for n in re.findall(r"(\w+) is \d", names)}  # fmt: skip
    assert len(named) == guards
    for name in named:
        assert re.search(rf"^    {name}:i32\[\] = ", step.as_text(), re.M)


@pytest.mark.more
def test_texts_are_the_same_in_every_process():
    """A text that shows an address, or the order of a set, is another one in another process."""
    code = (
        "from tests.transforms.place.test_step import *\n"
        "lowered = lowered_with_conditionals(at_times_within)\n"
        "print(lowered.passes_as_text(), lowered.as_text(), sep='\\n')"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    one, other = (process.communicate()[0] for process in processes)
    assert "where" in one and "run F1.1" in one
    assert one == other
