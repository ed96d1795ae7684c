"""Pipeline parallelism as five composable transforms over jaxprs.

Words:
    stage: a slice of the forward computation, numbered from 0 in an order of dependence. Stages
        form a directed acyclic graph, of which a chain is the common case.
    mark: an equation of a traced function that says where a stage opens.
    cut: where one stage ends and another opens; of a stacked array, where its rows are divided.
    unit: equations that a cut does not divide: a layer, or a module that is called `whole`.
    rank: a program and the devices that it owns; it runs one or more stages.
    microbatch: a slice of the batch, numbered from 0.
    task: the work of one kind (F, B, I, W, R) for a stage and a microbatch: the forward, the
        backward or one of its halves, or the recomputation of what the backward reads.
    kind: the record of a kind of task: what it comes after, what it costs and what it holds. A new
        kind is a new value.
    table: for each rank the tasks that it runs, in order.
    schedule: a value that gives a table for a number of stages and of microbatches.
    loop: the microbatch loop; a scheduled loop has its tasks and its table.
    carry: a value that a loop hands from each microbatch to the next.
    accumulator: a carry that only adds up.
    step: the whole function that `place` is given, as one flat jaxpr with records and facts.
    edit: a change of the tasks of a scheduled loop, by a rule of yours.
    pass: a function from a step to a step.
    guard: the condition under which an equation runs, if it is from a branch of a conditional.
    place: the stages that an equation around the loops runs with.
    segment: equations of one place that run as one computation.
    value: an array that tasks make and read.
    computation: the function of an executable; equal ones are compiled once.
    program: the instructions (run, send, receive, free) of one rank, over numbered slots.
    bundle: the programs of all ranks, and what they share.
    rows: some of the layers of an array that is stacked over layers.
    part: an array of such rows.
    inside: the axes of a mesh that divide the devices of one rank, such as data and model.
    spec: for each dimension of an array the axes inside a rank that it is split over.
    role: the use of an argument in a step: parameter, optimizer state, batch, or other.
    placement: for each stage the rank that runs it.
    edge: a value that one stage makes and another reads. If their ranks differ, it is a message.
    certificate: a proof that the programs of a step compute its function.
    term: a symbolic value of a proof; equal values are one term.
    bubble: the time of a step in which ranks wait, or its share of the whole time.
    executor: runs the program of one rank, on either mesh.
    feed: a function by which the ranks load an argument of a step themselves.
    worker process: a process of its own that runs a rank, or a host's part of it.
    worker group: the worker processes of a mesh, called in one order.
    health monitor: ends all workers of a mesh, with one error, when one of them fails.
    flight recorder: the memory in which a worker notes what it runs, for the error when it dies.
    program cache: the computations of a mesh, each compiled once and sent once.
    handle: a `RemoteArray`, which stands for an array that worker processes hold.
"""

from typing import TYPE_CHECKING as TYPE_CHECKING

from jaxpp._late import __dir__ as __dir__
from jaxpp._late import __getattr__ as __getattr__
from jaxpp._version import __version__ as __version__
from jaxpp.runtime import Checkpointer as Checkpointer
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
from jaxpp.runtime import save_state as save_state

if TYPE_CHECKING:  # else `__getattr__` imports them, when a program first asks for one
    from jaxpp._names import *  # noqa: F403
