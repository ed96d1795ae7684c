"""The graph of tasks over typed values that all ranks run, and its lowering to programs."""

from jaxpp.transforms.graph._fuse import Fuse as Fuse
from jaxpp.transforms.graph._fuse import fuse as fuse
from jaxpp.transforms.graph._graph import Body as Body
from jaxpp.transforms.graph._graph import GraphTask as GraphTask
from jaxpp.transforms.graph._graph import TaskGraph as TaskGraph
from jaxpp.transforms.graph._graph import Value as Value
from jaxpp.transforms.graph._graph import assign as assign
from jaxpp.transforms.graph._graph import lower as lower
