"""`RemoteMpmdMesh`: runs ranks in worker processes that Ray starts."""

from jaxpp.runtime.remote._mesh import RemoteMpmdMesh as RemoteMpmdMesh
