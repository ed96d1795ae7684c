"""The workers of a mesh: starts, calls, monitors and replaces them together."""

from jaxpp.runtime.remote.group._group import Pending as Pending
from jaxpp.runtime.remote.group._group import WorkerGroup as WorkerGroup
