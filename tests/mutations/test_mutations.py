"""The mutations fit the sources as they are, and the certificate refutes those that it should.

`python -m tests.mutations` makes each of them, and says which test notices. The default run
certifies programs with a few of them; `pytest -m slow` with all.
"""

import pathlib
import re
import subprocess
import sys

import pytest

from tests.mutations.mutations import MUTATIONS

ROOT = pathlib.Path(__file__).parents[2]
NAMES = [m.wrong for m in MUTATIONS]


def test_each_mutation_has_one_place_in_the_sources():
    stale = [m.wrong for m in MUTATIONS if (ROOT / m.file).read_text().count(m.old) != 1]
    assert not stale


def test_each_mutation_has_a_name_and_one_verdict_of_the_certificate():
    assert len(NAMES) == len(set(NAMES))
    verdicts = {m.wrong: (m.refuted_on, m.kept, m.unseen) for m in MUTATIONS}
    assert not [wrong for wrong, own in verdicts.items() if sum(map(bool, own)) != 1]


QUICK = ("a mean is a sum", "an accumulator is doubled", "a value is freed before its last use")


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(QUICK, marks=pytest.mark.more),
        pytest.param(tuple(m.wrong for m in MUTATIONS if m.refuted_on), marks=pytest.mark.slow),
    ],
    ids=["few", "all"],
)
def test_the_certificate_refutes_mutations_of_the_passes(names):
    command = [sys.executable, "-m", "tests.mutations", "--certify", *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    verdicts = re.findall(r"^ *\d+ (\w+) .*\(jaxpp/", done.stdout, re.MULTILINE)
    assert len(verdicts) == len(names) and set(verdicts) <= {"refuted", "refused"}, done.stdout
