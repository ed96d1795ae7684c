"""Steps that have between them what a step can have are proven, all transforms included."""

import pytest

from jaxpp import testing
from tests.certification import steps

pytestmark = pytest.mark.cases(3)


@pytest.mark.parametrize("name", steps.CASES)
def test_a_step_computes_its_function(name):
    step, args = steps.CASES[name]()
    testing.assert_computes_the_function(step, *args)
