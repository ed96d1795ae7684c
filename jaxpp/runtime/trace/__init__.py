"""Records when each task and each message was, and writes it as files that tools open."""

from jaxpp.runtime.trace._figures import Clocked as Clocked
from jaxpp.runtime.trace._figures import Key as Key
from jaxpp.runtime.trace._figures import dependencies_of as dependencies_of
from jaxpp.runtime.trace._figures import fit_line as fit_line
from jaxpp.runtime.trace._figures import table_of as table_of
from jaxpp.runtime.trace._figures import tasks_of as tasks_of
from jaxpp.runtime.trace._figures import timeline_of as timeline_of
from jaxpp.runtime.trace._figures import typical_times as typical_times
from jaxpp.runtime.trace._recorder import Recorder as Recorder
from jaxpp.runtime.trace._result import Trace as Trace
from jaxpp.runtime.trace._timeline import merge_traces as merge_traces
from jaxpp.runtime.trace._tracing import Times as Times
from jaxpp.runtime.trace._tracing import Tracing as Tracing
from jaxpp.runtime.trace._tracing import start_trace as start_trace
from jaxpp.runtime.trace._tracing import stop_recording as stop_recording
from jaxpp.runtime.trace._tracing import stop_trace as stop_trace
