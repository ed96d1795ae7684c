"""No edit inside a computation that the proof accepts changes what the programs give.

Edits are drawn for small steps that have between them what a step can have. `JAXPP_EDITS` says how
many of each step, and `JAXPP_SEED` which; `survey.py` draws many thousands.
"""

import collections
import dataclasses
import os

import jax
import pytest

import jaxpp
from tests.certification.inner import judge, small_steps

NUMBER = int(os.environ.get("JAXPP_EDITS", "12"))
SEED = os.environ.get("JAXPP_SEED", "0")

#: The step of a plain `pytest` comes first.
NAMES = sorted(small_steps.CASES, key=lambda name: name != "narrow weights")


@pytest.mark.parametrize("name", NAMES)
def test_an_edit_inside_a_computation_is_refuted_or_changes_nothing(name):
    own, said = judge.case(name), collections.Counter()
    own.certify(own.lowered.bundle)
    for n in range(NUMBER):
        edit = own.draw(f"{SEED}/{n}")
        verdict = judge.judge(own, edit)
        said[verdict.said] += 1
        assert not verdict.is_error, (verdict.said, edit.text)
        assert not verdict.is_false, (
            f"{name}/{SEED}/{n}, a {edit.kind}, is accepted as {verdict.said}, and gives "
            f"{verdict.difference}: {edit.text}"
        )
    assert said["refuted"] > NUMBER / 4, said


@pytest.mark.parametrize(
    ("kind", "change"), [("numbers", 1.0009765625), ("types", None), ("missing", None)]
)
def test_the_judge_sees_a_change(kind, change):
    """What is wrong is told from what is right: by the numbers, the types, what there is."""
    own = judge.case("narrow weights")
    arrays = own.inputs["as given"]
    wanted = own.interpreter.run(own.lowered.bundle, arrays)
    assert judge.difference(wanted, wanted, 0.0) == ""
    (record, values), *others = wanted.results
    if kind == "numbers":
        values = {r: (own.interpreter.known(x * change), at) for r, (x, at) in values.items()}
    if kind == "types":
        weak = record.aval.update(weak_type=True)
        record = dataclasses.replace(record, aval=weak)
    results = others if kind == "missing" else [(record, values), *others]
    assert judge.difference(wanted._replace(results=results), wanted, 2.0**-20)


def test_the_interpreter_gives_what_the_step_gives():
    own = judge.case("narrow weights")
    found = own.interpreter.run(own.lowered.bundle, own.inputs["as given"]).results
    wanted = jax.tree.leaves(jaxpp.gather(own.step(*own.args)))
    for (_, ranks), value in zip(found, wanted, strict=True):
        for made, _ in ranks.values():
            assert not judge.of_values(made, own.interpreter.known(value), 2.0**-9)
