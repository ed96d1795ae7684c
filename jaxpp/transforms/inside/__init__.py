"""Axes inside a rank: splits arrays over them, and runs replicas on devices of their own."""

from jaxpp.transforms.inside._assign import specs_of_leaves as specs_of_leaves
from jaxpp.transforms.inside._assign import split_state as split_state
from jaxpp.transforms.inside._automatic_axes import automatic as automatic
from jaxpp.transforms.inside._automatic_axes import trace as trace
from jaxpp.transforms.inside._batch import cost_of_sharing as cost_of_sharing
from jaxpp.transforms.inside._batch import is_reduction as is_reduction
from jaxpp.transforms.inside._batch import on_rows as on_rows
from jaxpp.transforms.inside._batch import reduce_replicas as reduce_replicas
from jaxpp.transforms.inside._batch import split_examples as split_examples
from jaxpp.transforms.inside._shardy import propagate as propagate
