"""A proof fails where the programs do: edits of the programs of steps, by hand and at random.

Those that the proof accepts run, and have to give the same numbers. The default run draws a few
dozen; `pytest -m slow` thousands, and `JAXPP_EDITS` says how many of each step.
"""

import collections
import dataclasses
import functools
import os
import random

import jax
import pytest

import jaxpp
from tests.certification import edits, steps
from tests.helpers import assert_close_sums

pytestmark = pytest.mark.cases(20)


@functools.cache
def lowered(name):
    step, args = steps.CASES[name]()
    return step.lower(*args), args


def certify(name, bundle):
    return dataclasses.replace(lowered(name)[0], bundle=bundle).certify(passes=False)


# ---- by hand ------------------------------------------------------------------------------------

NAME = "layers, ZB-H1"


def test_the_memory_of_an_argument_is_not_taken_that_is_not_donated():
    step, args = steps.CASES["tied, 1F1B"]()
    own = step.lower(*args)
    taken = [dataclasses.replace(a, donated=True) for a in own.bundle.arguments]
    bundle = dataclasses.replace(own.bundle, arguments=tuple(taken))
    with pytest.raises(jaxpp.Refuted, match=r"argument\[2\] is taken, which is not donated"):
        dataclasses.replace(own, bundle=bundle).certify(passes=False)


@pytest.mark.parametrize(
    ("edit", "path", "rank", "task"),
    [
        (edits.not_run, "[0][0]", 0, "W1.2"),
        (edits.added_nothing, "[0][0]", 0, "W1.2"),
        (edits.added_twice, "[0][0]", 0, "W1.1"),
        (edits.other_slice, "[0][0]", 0, "F2.3"),
        (edits.swapped_operands, "[0][0]", 0, "W1.2"),
        (edits.swapped_messages, "[0][0]", 0, "F2.1"),
        (edits.swapped_results, "[0][2]", 1, "update"),
        (edits.sum_for_mean, "[0][0]", 0, "update"),
        (edits.stale_weight, "[0][3]", 2, ""),
        # These cannot run, and so have no result.
        (edits.freed_early, "", 1, "I1.0"),
        (edits.waiting, "", None, ""),
        (edits.not_received, "", 1, ""),
        (edits.donated_constant, "", 0, "F0.0"),
        (edits.donated_argument, "", 0, "update"),
    ],
)
def test_a_broken_program_is_refuted_and_the_error_says_where(edit, path, rank, task):
    with pytest.raises(jaxpp.Refuted) as caught:
        certify(NAME, edit(lowered(NAME)[0].bundle))
    error = caught.value
    assert (error.pass_name, error.path, error.rank, error.task) == (
        "the programs", path, rank, task,
    )  # fmt: skip
    assert (path or str(rank if rank is not None else "wait")) in str(error)


def test_the_error_names_the_users_line():
    with pytest.raises(jaxpp.Refuted, match="steps.py:") as caught:
        certify(NAME, edits.swapped_messages(lowered(NAME)[0].bundle))
    file, _, number = caught.value.line.rpartition(":")
    with open(file) as source:
        assert "jnp.mean((x - y)" in source.readlines()[int(number) - 1]


# ---- at random ----------------------------------------------------------------------------------


def run(name, bundle):
    """Runs a bundle of a step on arguments of its own, some of which it may consume."""
    step, args = lowered(name)
    return step._finish(bundle)(*jax.tree.map(lambda x: jax.numpy.array(x, copy=True), args))


def judge(name, number, seed, most_run=None):
    """Draws edits of a step's programs; counts what the proof says of each kind of edit.

    Args:
        name: the name of the step.
        number: the number of edits.
        seed: that of the draws.
        most_run: the number of accepted edits to run; None for all.
    """
    rng, counts = random.Random(seed), collections.Counter()
    bundle = lowered(name)[0].bundle
    want = run(name, bundle)
    for _ in range(number):
        kind, new = edits.draw(rng, bundle)
        try:
            certify(name, new)
        except jaxpp.Refuted:
            counts["refuted", kind] += 1
            continue
        counts["accepted", kind] += 1
        if most_run is None or counts["run", ""] < most_run:
            counts["run", ""] += 1
            try:
                assert_close_sums(run(name, new), want, 1e-5)
            except Exception as error:
                raise AssertionError(f"a {kind} was accepted, and is not the same") from error
    return counts


@pytest.mark.more
def test_an_edit_that_is_accepted_gives_the_same_numbers():
    counts = judge("tied, 1F1B", 40, seed=0, most_run=3)
    verdicts = collections.Counter()
    for (verdict, _), n in counts.items():
        verdicts[verdict] += n
    assert verdicts["refuted"] >= 25
    assert verdicts["run"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["layers, ZB-H1", "tied, 1F1B", "tied, ZB-H1", "aux and keys"])
def test_every_edit_that_is_accepted_gives_the_same_numbers(name):
    number = int(os.environ.get("JAXPP_EDITS", "1000"))
    counts = judge(name, number, seed=1)
    print(sorted(counts.items()))
    assert sum(n for (verdict, _), n in counts.items() if verdict == "refuted") > number / 2
