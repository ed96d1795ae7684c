"""The executors of placed steps. Each room is below those that import it, and has a face.

arrays: where arrays are. executor: one rank's program. transport: from process to process. trace:
when all was. local: ranks in this process. remote: ranks as worker processes. checkpoint: on disk.
"""

from jaxpp.runtime.arrays import StackedArray as StackedArray
from jaxpp.runtime.arrays import StackedSharding as StackedSharding
from jaxpp.runtime.arrays import gather as gather
from jaxpp.runtime.checkpoint import load_state as load_state
from jaxpp.runtime.checkpoint import restore_args as restore_args
from jaxpp.runtime.checkpoint import save_args as save_args
from jaxpp.runtime.checkpoint import save_state as save_state
from jaxpp.runtime.executor import Description as Description
from jaxpp.runtime.executor import RankDescription as RankDescription
from jaxpp.runtime.launched import LaunchedMpmdMesh as LaunchedMpmdMesh
from jaxpp.runtime.local import MpmdMesh as MpmdMesh
from jaxpp.runtime.remote import RemoteMpmdMesh as RemoteMpmdMesh
from jaxpp.runtime.site import RankError as RankError
from jaxpp.runtime.site import RemoteArray as RemoteArray
from jaxpp.runtime.site import RemoteSharding as RemoteSharding
from jaxpp.runtime.trace import Trace as Trace
from jaxpp.runtime.trace import merge_traces as merge_traces
