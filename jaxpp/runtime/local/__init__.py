"""`MpmdMesh`: runs all ranks in this process."""

from jaxpp.runtime.local._mesh import MpmdMesh as MpmdMesh
from jaxpp.runtime.local._step import LocalStep as LocalStep
