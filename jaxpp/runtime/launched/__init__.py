"""`LaunchedMpmdMesh`: runs ranks in processes that srun, mpirun or torchrun has started."""

from jaxpp.runtime.launched._mesh import LaunchedMpmdMesh as LaunchedMpmdMesh
