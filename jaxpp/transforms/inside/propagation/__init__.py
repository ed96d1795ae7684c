"""Sharding propagation: finds how the values of a jaxpr are split from how its inputs are split."""

from jaxpp.transforms.inside.propagation._rules import loop_specs as loop_specs
from jaxpp.transforms.inside.propagation._rules import made_whole as made_whole
from jaxpp.transforms.inside.propagation._rules import output_specs as output_specs
from jaxpp.transforms.inside.propagation._rules import propagate as propagate
