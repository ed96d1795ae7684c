"""Runs a function on microbatches, one after the other, and combines the results."""

from jaxpp.transforms.microbatch._arguments import broadcast_axes as broadcast_axes
from jaxpp.transforms.microbatch._microbatch import microbatch as microbatch
from jaxpp.transforms.microbatch._microbatch import microbatch_by as microbatch_by
from jaxpp.transforms.microbatch._reductions import Operator as Operator
