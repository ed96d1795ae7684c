"""The mutations fit the sources as they are: `python -m tests.mutations` can make each of them."""

import pathlib

from tests.mutations.mutations import MUTATIONS

ROOT = pathlib.Path(__file__).parents[2]


def test_each_mutation_has_one_place_in_the_sources():
    stale = [m.wrong for m in MUTATIONS if (ROOT / m.file).read_text().count(m.old) != 1]
    assert not stale
