"""Steps that have between them what a step can have are proven, all transforms included."""

import pytest

from jaxpp import testing
from tests.certification import rare_steps, steps

pytestmark = pytest.mark.cases(3)

CASES = {**steps.CASES, **rare_steps.CASES}


@pytest.mark.parametrize("name", CASES)
def test_a_step_computes_its_function(name):
    step, args = CASES[name]()
    accept_rounding = name in rare_steps.ROUNDED
    testing.assert_computes_the_function(step, *args, accept_rounding=accept_rounding)
