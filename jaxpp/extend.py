"""Edits loops and tasks between `schedule` and `place`: for those who write transforms.

`edit_loops` edits the scheduled loops of a function, by a rule of yours, which takes a `Loop` and
gives one: with its tasks, and each `Value` between them. `Kind` makes a new kind of task.
`edit_tasks` edits the `TaskGraph` of a placed step: all tasks, with those around the loops.
"""

from jaxpp.schedules import Kind as Kind
from jaxpp.transforms.graph import TaskGraph as TaskGraph
from jaxpp.transforms.place import edit_tasks as edit_tasks
from jaxpp.transforms.tasks import Loop as Loop
from jaxpp.transforms.tasks import Value as Value
from jaxpp.transforms.tasks import edit_loops as edit_loops
