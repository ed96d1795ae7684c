"""Random programs are, as pipelines, what they are as plain JAX: values, types, effects.

The default run has a few; `pytest -m slow` has 60, of 300 that `tests/certification` proves, and
`python -m tests.programs.search` as many as one likes.
"""

import dataclasses
import gc

import jax
import jax.numpy as jnp
import pytest

from jaxpp.runtime.executor import _compile
from tests.programs import draw, operations, run, shrink, steps
from tests.programs.operations import Operation
from tests.programs.program import Stage

#: Small ones that have most of what programs are made of.
QUICK = (15, 29, 52, 83, 184, 199, 207, 208, 256, 268, 273, 286)
ALL = 300
#: Of all, those that run in numbers too; `tests/certification` has proofs of all.
IN_NUMBERS = range(0, ALL, 5)


@pytest.fixture(autouse=True)
def nothing_compiled_is_kept():
    yield
    _compile.clear_cache()
    jax.clear_caches()
    gc.collect()


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK))
        for n in range(ALL)
        if n in QUICK or n in IN_NUMBERS
    ],
)
def test_a_random_program_is_what_it_is_as_plain_jax(seed):
    program = draw.draw(seed)
    outcome = run.run(program)
    assert outcome.verdict in ("ok", "refused"), (
        f"{outcome.message}\n\n{program.text()}\n\n"
        f"python -m tests.programs.search --seed={seed} --shrink makes it smaller."
    )


# ---- the net itself -----------------------------------------------------------------------------


def test_a_seed_is_a_program():
    assert draw.draw(7) == draw.draw(7)
    assert draw.draw(7).text() != draw.draw(8).text()


def test_programs_have_every_operation_and_schedule():
    programs = [draw.draw(seed) for seed in range(ALL)]
    drawn = {op.name for program in programs for op in program.operations()}
    assert drawn == set(operations.RULES)
    assert len({program.schedule for program in programs}) == len(draw.SCHEDULES)
    assert {name for program in programs for name in program.effects} == set(steps.EFFECTS)


def _small(seed: int = 0):
    """The program of a seed, with two stages of one product each in place of its own."""
    lines = [(Operation("linear", 1, "matrix0"),), (Operation("linear", 2, "matrix1"),)]
    return dataclasses.replace(
        draw.draw(seed),
        stages=(Stage((), lines[0]), Stage((0,), lines[1])),
        cuts="marks",
        policy=None,
        around="nothing",
        half_weights=False,
        loops=("inside",),
        effects=(),
        gradients=True,
        optimizer="by hand",
        schedule="OneFOneB",
        ranks=2,
        microbatches=2,
    )


def _outcome_with(monkeypatch, program, fault):
    """What comes of a program where the loops of jaxpp have a fault."""
    loops = steps.pipelined_loops

    def with_fault(program):
        right = loops(program)
        return {**right, "inside": lambda params, data: fault(*right["inside"](params, data))}

    monkeypatch.setattr(steps, "pipelined_loops", with_fault)
    return run.run(program)


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("", lambda out, grads: (out, grads)),
        ("value", lambda out, grads: (out, jax.tree.map(lambda g: g * 1.01, grads))),
        ("value", lambda out, grads: (out, jax.tree.map(lambda g: g.at[..., 0].add(1), grads))),
        ("dtype", lambda out, grads: (jax.tree.map(_other_type, out), grads)),
        ("effects: more", lambda out, grads: (_with_effect(out), grads)),
    ],
)
def test_a_fault_would_be_found(monkeypatch, kind, fault):
    outcome = _outcome_with(monkeypatch, _small(), fault)
    assert (outcome.verdict, outcome.kind) == ("failed" if kind else "ok", kind)


def _other_type(x):
    return x.astype(jnp.float16) if x.dtype == jnp.float32 else x


def _with_effect(out):
    jax.debug.print("more: {}", 1)
    return out


def test_a_failure_is_made_smaller():
    program = draw.draw(31)

    def fails(program):
        return any(op.name == "linear" for op in program.operations())

    smaller = shrink.shrink(program, fails)
    assert [op.name for op in smaller.operations()] == ["linear"]
    assert (smaller.ranks, smaller.effects, smaller.optimizer) == (2, (), "by hand")
