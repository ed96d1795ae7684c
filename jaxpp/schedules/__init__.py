"""Schedules as tables of tasks, with what reads them; nothing here needs JAX.

The catalogue has a class for each schedule, such as `OneFOneB`, and `by_name` finds them. `check`,
`simulate`, `synthesize`, `to_text` and `plot` take any table; `from_tasks` and `FromTable` make one
of your own, `Kind` a new kind of task. `Recompute`, `Offload`, `Gather` and `Reduce` change a
schedule.
"""

from jaxpp.schedules import building_blocks as building_blocks
from jaxpp.schedules._base import Schedule as Schedule
from jaxpp.schedules._catalogue import CATALOGUE as CATALOGUE
from jaxpp.schedules._catalogue import GIS as GIS
from jaxpp.schedules._catalogue import Chimera as Chimera
from jaxpp.schedules._catalogue import DualPipe as DualPipe
from jaxpp.schedules._catalogue import DualPipeV as DualPipeV
from jaxpp.schedules._catalogue import Eager1F1B as Eager1F1B
from jaxpp.schedules._catalogue import ForwardOnly as ForwardOnly
from jaxpp.schedules._catalogue import GPipe as GPipe
from jaxpp.schedules._catalogue import Hanayo as Hanayo
from jaxpp.schedules._catalogue import Interleaved1F1B as Interleaved1F1B
from jaxpp.schedules._catalogue import InterleavedZeroBubble as InterleavedZeroBubble
from jaxpp.schedules._catalogue import OneFOneB as OneFOneB
from jaxpp.schedules._catalogue import OneFOneBV as OneFOneBV
from jaxpp.schedules._catalogue import Seq1F1B as Seq1F1B
from jaxpp.schedules._catalogue import VBuildingBlock as VBuildingBlock
from jaxpp.schedules._catalogue import VHalf as VHalf
from jaxpp.schedules._catalogue import VMin as VMin
from jaxpp.schedules._catalogue import ZeroBubbleH1 as ZeroBubbleH1
from jaxpp.schedules._catalogue import ZeroBubbleH2 as ZeroBubbleH2
from jaxpp.schedules._catalogue import ZeroBubbleV as ZeroBubbleV
from jaxpp.schedules._catalogue import by_name as by_name
from jaxpp.schedules._catalogue import register as register
from jaxpp.schedules._check import ScheduleError as ScheduleError
from jaxpp.schedules._check import check as check
from jaxpp.schedules._check import execution_order as execution_order
from jaxpp.schedules._costs import Cost as Cost
from jaxpp.schedules._costs import Costs as Costs
from jaxpp.schedules._costs import Link as Link
from jaxpp.schedules._costs import Memory as Memory
from jaxpp.schedules._csv import from_csv as from_csv
from jaxpp.schedules._csv import to_csv as to_csv
from jaxpp.schedules._custom import FromTable as FromTable
from jaxpp.schedules._custom import from_tasks as from_tasks
from jaxpp.schedules._drawing import plot as plot
from jaxpp.schedules._drawing import to_text as to_text
from jaxpp.schedules._drawing import to_trace as to_trace
from jaxpp.schedules._execute import Dependencies as Dependencies
from jaxpp.schedules._execute import stage_dependencies as stage_dependencies
from jaxpp.schedules._gather import Gather as Gather
from jaxpp.schedules._gather import Reduce as Reduce
from jaxpp.schedules._joined import joined as joined
from jaxpp.schedules._kinds import Kind as Kind
from jaxpp.schedules._offload import Offload as Offload
from jaxpp.schedules._recompute import Recompute as Recompute
from jaxpp.schedules._simulation import Comparison as Comparison
from jaxpp.schedules._simulation import Machine as Machine
from jaxpp.schedules._simulation import Span as Span
from jaxpp.schedules._simulation import Timeline as Timeline
from jaxpp.schedules._simulation import compare as compare
from jaxpp.schedules._simulation import simulate as simulate
from jaxpp.schedules._synthesis import SearchOptions as SearchOptions
from jaxpp.schedules._synthesis import Synthesis as Synthesis
from jaxpp.schedules._synthesis import Synthesized as Synthesized
from jaxpp.schedules._synthesis import synthesize as synthesize
from jaxpp.schedules._table import Table as Table
from jaxpp.schedules._table import Task as Task
from jaxpp.schedules._windows import Windows as Windows
