"""`MpmdMesh`: runs all ranks in this process."""

from jaxpp.runtime.local._mesh import LocalStep as LocalStep
from jaxpp.runtime.local._mesh import MpmdMesh as MpmdMesh
