from jaxpp.schedules._simulation._compare import Comparison as Comparison
from jaxpp.schedules._simulation._compare import compare as compare
from jaxpp.schedules._simulation._machine import Machine as Machine
from jaxpp.schedules._simulation._simulate import Span as Span
from jaxpp.schedules._simulation._simulate import Timeline as Timeline
from jaxpp.schedules._simulation._simulate import simulate as simulate
