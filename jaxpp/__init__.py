"""Pipeline parallelism as five composable transforms over jaxprs."""

from jaxpp import schedules as schedules
from jaxpp import testing as testing
from jaxpp._conveniences import accumulate_grads as accumulate_grads
from jaxpp._conveniences import pipelined as pipelined
from jaxpp.runtime import Checkpointer as Checkpointer
from jaxpp.runtime import Measurement as Measurement
from jaxpp.runtime import MpmdMesh as MpmdMesh
from jaxpp.runtime import RankError as RankError
from jaxpp.runtime import RemoteArray as RemoteArray
from jaxpp.runtime import RemoteMpmdMesh as RemoteMpmdMesh
from jaxpp.runtime import RemoteSharding as RemoteSharding
from jaxpp.runtime import StackedArray as StackedArray
from jaxpp.runtime import StackedSharding as StackedSharding
from jaxpp.runtime import Trace as Trace
from jaxpp.runtime import load_state as load_state
from jaxpp.runtime import measure as measure
from jaxpp.runtime import merge_traces as merge_traces
from jaxpp.runtime import save_state as save_state
from jaxpp.transforms import Operator as Operator
from jaxpp.transforms import microbatch as microbatch
from jaxpp.transforms import pipeline_enter_stage as pipeline_enter_stage
from jaxpp.transforms import place as place
from jaxpp.transforms import schedule as schedule
from jaxpp.transforms import split_stages as split_stages
from jaxpp.transforms import wrap_forward as wrap_forward
