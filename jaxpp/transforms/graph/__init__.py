"""The graph of tasks over typed values that all ranks run, and its lowering to programs."""

from jaxpp.transforms.graph._lower import lower as lower
from jaxpp.transforms.graph._task_graph import Body as Body
from jaxpp.transforms.graph._task_graph import GraphTask as GraphTask
from jaxpp.transforms.graph._task_graph import TaskGraph as TaskGraph
from jaxpp.transforms.graph._task_graph import Value as Value
