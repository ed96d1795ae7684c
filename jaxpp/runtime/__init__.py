from jaxpp.runtime._measure import Measurement as Measurement
from jaxpp.runtime._measure import measure as measure
from jaxpp.runtime._mesh import MpmdMesh as MpmdMesh
