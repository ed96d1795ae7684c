from jaxpp.runtime._remote._array import RemoteArray as RemoteArray
from jaxpp.runtime._remote._array import RemoteSharding as RemoteSharding
from jaxpp.runtime._remote._failure import RankError as RankError
from jaxpp.runtime._remote._mesh import RemoteMpmdMesh as RemoteMpmdMesh
