"""Sharding propagation: finds how the values of a jaxpr are split from how its inputs are split."""

from jaxpp.transforms.inside.propagation._propagate import made_whole as made_whole
from jaxpp.transforms.inside.propagation._propagate import output_specs as output_specs
from jaxpp.transforms.inside.propagation._propagate import propagate as propagate
