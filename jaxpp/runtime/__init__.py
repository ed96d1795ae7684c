from jaxpp.runtime._measure import Measurement as Measurement
from jaxpp.runtime._measure import measure as measure
from jaxpp.runtime._mesh import MpmdMesh as MpmdMesh
from jaxpp.runtime._remote import RankError as RankError
from jaxpp.runtime._remote import RemoteArray as RemoteArray
from jaxpp.runtime._remote import RemoteMpmdMesh as RemoteMpmdMesh
from jaxpp.runtime._remote import RemoteSharding as RemoteSharding
