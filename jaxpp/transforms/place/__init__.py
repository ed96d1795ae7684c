"""Takes a step through passes, places its equations, and lowers it to a program for each rank."""

from jaxpp.transforms.place._compiled import Compiled as Compiled
from jaxpp.transforms.place._edit_tasks import edit_tasks as edit_tasks
from jaxpp.transforms.place._place import Placed as Placed
from jaxpp.transforms.place._place import place as place
from jaxpp.transforms.place._task_graph import TaskGraph as TaskGraph
