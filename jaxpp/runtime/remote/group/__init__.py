"""The workers of a mesh: starts, monitors, calls and replaces them together."""

from jaxpp.runtime.remote.group._crew import Crew as Crew
from jaxpp.runtime.remote.group._settings import Settings as Settings
