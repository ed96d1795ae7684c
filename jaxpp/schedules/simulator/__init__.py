"""The simulator: it runs numbered tasks, in given orders or in those that a rule decides.

`run` is the clock for given orders: tables (`simulate`, `check`, `predict`) and the synthesizer are
faces over it. `list_schedule` decides the orders itself, for the synthesizer and the search for
plans, to the same times. `join` puts the tasks of several loops in one order, for `place` and for
tables. Each face says what its tasks take and wait for, in numbers.
"""

from jaxpp.schedules.simulator._join import join as join
from jaxpp.schedules.simulator._list_schedule import Rule as Rule
from jaxpp.schedules.simulator._list_schedule import list_schedule as list_schedule
from jaxpp.schedules.simulator._problem import Objective as Objective
from jaxpp.schedules.simulator._problem import OrderProblem as OrderProblem
from jaxpp.schedules.simulator._problem import Orders as Orders
from jaxpp.schedules.simulator._problem import Times as Times
from jaxpp.schedules.simulator._problem import evaluate as evaluate
from jaxpp.schedules.simulator._problem import shape_of as shape_of
from jaxpp.schedules.simulator._run import RunTimes as RunTimes
from jaxpp.schedules.simulator._run import run as run
