"""Random programs are proven to compute their function, which compiles nothing.

The default run has a few small ones; `pytest -m slow` has 300.
"""

import pytest

from tests.programs import draw, run

pytestmark = pytest.mark.cases(7)

QUICK = (15, 52, 75, 184, 207, 256, 273)
ALL = 300


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in range(ALL)]
)
def test_the_ranks_compute_what_a_random_program_is_by_the_definitions(seed):
    program = draw.draw(seed)
    try:
        lowered = run.lower(program)
    except ValueError as error:  # as `tests/programs` says
        assert run.verdict_on(error) == "refused"
        return
    with run.CONTEXTS[program.calls[0].context]():
        certificate = lowered.certify()
    assert not certificate.undecided
