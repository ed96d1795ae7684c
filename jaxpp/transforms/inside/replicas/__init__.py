"""Adds up gradients over the replicas of the batch once a step, not once a microbatch."""

from jaxpp.transforms.inside.replicas._deferred_sums import defer_sums as defer_sums
from jaxpp.transforms.inside.replicas._deferred_sums import with_deferred_sums as with_deferred_sums
