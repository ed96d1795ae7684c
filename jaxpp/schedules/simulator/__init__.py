"""The simulator: it runs numbered tasks, in given orders or in those that a rule decides.

`run` is the one clock of the library. Tables (`simulate`, `check`), the synthesizer and the search for
plans are faces over it: each says what its tasks take and wait for, in numbers.
"""

from jaxpp.schedules.simulator._list_schedule import Rule as Rule
from jaxpp.schedules.simulator._list_schedule import list_schedule as list_schedule
from jaxpp.schedules.simulator._problem import Objective as Objective
from jaxpp.schedules.simulator._problem import Orders as Orders
from jaxpp.schedules.simulator._problem import Problem as Problem
from jaxpp.schedules.simulator._problem import Times as Times
from jaxpp.schedules.simulator._problem import evaluate as evaluate
from jaxpp.schedules.simulator._run import Run as Run
from jaxpp.schedules.simulator._run import run as run
