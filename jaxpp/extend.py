"""Edits loops and tasks between `schedule` and `place`: for those who write transforms.

`edit_loops` edits the tasks of a scheduled loop, by a rule of yours; `Kind` makes a new kind of
task.
"""

from jaxpp.schedules import Kind as Kind
from jaxpp.transforms.graph import TaskGraph as TaskGraph
from jaxpp.transforms.place import edit_tasks as edit_tasks
from jaxpp.transforms.tasks import Loop as Loop
from jaxpp.transforms.tasks import Value as Value
from jaxpp.transforms.tasks import edit_loops as edit_loops
