"""Pipeline parallelism as five composable transforms over jaxprs.

The transforms, from the inside of a train step to the outside:
    split_stages(loss_fn, num_stages=4): cuts a function into stages.
    wrap_forward(f): makes each stage a call of its own, forward and backward.
    microbatch(value_and_grad(f), 8): runs a function on slices of the batch, and combines results.
    schedule(f, schedules.OneFOneB()): orders the tasks of the stages on the ranks.
    place(train_step, mesh): compiles the step to a program for each rank, and runs it on a mesh.

Where a step runs:
    MpmdMesh((4,)): ranks that are devices of this process.
    RemoteMpmdMesh((4,)): ranks that are worker processes of Ray, on one host or many.
    LaunchedMpmdMesh((4,)): the same in processes that srun, mpirun or torchrun has started.
    gather(tree): brings results of a step to one device.
    save_state, load_state: write a state that ranks hold, and read it.
    save_args, restore_args: the same for Orbax's CheckpointManager.

Before it runs, and after:
    schedules: twenty schedules, your own, `compare`, `simulate`, `plot`; all without JAX.
    plan, predict, profile, measure: cuts, times and bytes of a step.
    certify, testing: is the step the function?
    extend: edits of tasks, and kinds of tasks of your own.

`help(jaxpp.place)` has the arguments of each, and an example. docs/glossary.md has the words.
"""

from typing import TYPE_CHECKING as TYPE_CHECKING

from jaxpp._spellings import __dir__ as __dir__
from jaxpp._version import __version__ as __version__
from jaxpp.runtime import LaunchedMpmdMesh as LaunchedMpmdMesh
from jaxpp.runtime import MpmdMesh as MpmdMesh
from jaxpp.runtime import RankError as RankError
from jaxpp.runtime import RemoteArray as RemoteArray
from jaxpp.runtime import RemoteMpmdMesh as RemoteMpmdMesh
from jaxpp.runtime import RemoteSharding as RemoteSharding
from jaxpp.runtime import StackedArray as StackedArray
from jaxpp.runtime import StackedSharding as StackedSharding
from jaxpp.runtime import Trace as Trace
from jaxpp.runtime import gather as gather
from jaxpp.runtime import load_state as load_state
from jaxpp.runtime import merge_traces as merge_traces
from jaxpp.runtime import restore_args as restore_args
from jaxpp.runtime import save_args as save_args
from jaxpp.runtime import save_state as save_state

if TYPE_CHECKING:  # else `__getattr__` imports them, when a program first asks for one
    from jaxpp._names import *  # noqa: F403
else:  # an editor that knew of it would take any name for one of ours
    from jaxpp._spellings import __getattr__ as __getattr__
