from jaxpp.schedules._drawing import _display as _display
from jaxpp.schedules._drawing._plot import plot as plot
from jaxpp.schedules._drawing._text import to_text as to_text
from jaxpp.schedules._drawing._trace import to_trace as to_trace
