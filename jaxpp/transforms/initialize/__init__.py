"""Makes the first arguments of a step where the step reads them, each rank its own."""

from jaxpp.transforms.initialize._initialize import check_initializer as check_initializer
from jaxpp.transforms.initialize._initialize import first_arguments as first_arguments
from jaxpp.transforms.initialize._initialize import lower_initializer as lower_initializer
from jaxpp.transforms.initialize._initialize import trace_initializer as trace_initializer
