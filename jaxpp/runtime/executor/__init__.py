"""Compiles and runs one rank's program, on any mesh, and describes what the ranks do."""

from jaxpp.runtime.executor._compile import Copier as Copier
from jaxpp.runtime.executor._compile import Executables as Executables
from jaxpp.runtime.executor._compile import compile_all as compile_all
from jaxpp.runtime.executor._compile import compile_for as compile_for
from jaxpp.runtime.executor._compile import current_settings as current_settings
from jaxpp.runtime.executor._compile import key_of as key_of
from jaxpp.runtime.executor._describe import Description as Description
from jaxpp.runtime.executor._describe import RankDescription as RankDescription
from jaxpp.runtime.executor._describe import describe as describe
from jaxpp.runtime.executor._executor import Chunk as Chunk
from jaxpp.runtime.executor._executor import Dispatcher as Dispatcher
from jaxpp.runtime.executor._executor import Executor as Executor
from jaxpp.runtime.executor._executor import interleave as interleave
from jaxpp.runtime.executor._executor import turns_of as turns_of
from jaxpp.runtime.executor._memory import HOST as HOST
from jaxpp.runtime.executor._memory import Inspected as Inspected
from jaxpp.runtime.executor._memory import array_bytes as array_bytes
from jaxpp.runtime.executor._memory import format_bytes as format_bytes
from jaxpp.runtime.executor._memory import held_bytes as held_bytes
from jaxpp.runtime.executor._memory import over_time as over_time
from jaxpp.runtime.executor._operations import find_invalid as find_invalid
