"""Measures placed steps on their meshes, as a plan of a training run needs it."""

from jaxpp.planning._measure import Measurement as Measurement
from jaxpp.planning._measure import measure as measure
