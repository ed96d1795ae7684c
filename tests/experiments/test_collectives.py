"""The table of collectives in the documentation is that of the compiled programs."""

import pathlib

import pytest

from experiments import collectives

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "inside_a_rank.md"


FIRST = "data, ZeRO-1"


@pytest.mark.parametrize(
    "name",
    [FIRST, *(pytest.param(n, marks=pytest.mark.more) for n in collectives.CASES if n != FIRST)],
)
def test_the_page_has_the_collectives_of_each_case(name):
    """Devices with replicas of their own exchange nothing in tasks, but for ZeRO-3's weights."""
    line = collectives.row(name)
    assert line in PAGE.read_text().splitlines()
    _, _, forward, backward, once, _ = line.split("|")
    if collectives.CASES[name].replicas > 1:
        zero3 = "zero3" in collectives.CASES[name].options
        in_tasks = forward.count("over data"), backward.count("over data")
        assert in_tasks == (zero3, zero3) and "over data" in once
