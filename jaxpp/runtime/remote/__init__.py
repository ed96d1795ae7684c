"""`RemoteMpmdMesh`: runs each rank in worker processes that Ray starts, and keeps arrays there."""

from jaxpp.runtime.remote._array import RemoteArray as RemoteArray
from jaxpp.runtime.remote._array import RemoteSharding as RemoteSharding
from jaxpp.runtime.remote._failure import Lost as Lost
from jaxpp.runtime.remote._failure import RankError as RankError
from jaxpp.runtime.remote._mesh import RemoteMpmdMesh as RemoteMpmdMesh
