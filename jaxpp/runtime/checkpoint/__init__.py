"""Checkpoints in Orbax's format; each rank writes and reads its own arrays.

_state: the names that users call. _handler: the part of Orbax that knows of ranks. _shares: what
runs in the process that holds the arrays.
"""

from jaxpp.runtime.checkpoint._state import load_state as load_state
from jaxpp.runtime.checkpoint._state import restore_args as restore_args
from jaxpp.runtime.checkpoint._state import save_args as save_args
from jaxpp.runtime.checkpoint._state import save_state as save_state
