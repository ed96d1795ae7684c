from jaxpp.runtime._mesh import MpmdMesh as MpmdMesh
