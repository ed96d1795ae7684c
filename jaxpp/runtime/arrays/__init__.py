"""Arrays of ranks: where they are, their types, and the handles that stand for them.

_homes: the devices of a rank. _types: the type of an array, and the way from shards to bytes and
back. _handle: a leaf that stands for an array. _stacked: an array in rows. _steps: steps over such.
"""

from jaxpp.runtime.arrays._handle import ArrayHandle as ArrayHandle
from jaxpp.runtime.arrays._handle import HandleSharding as HandleSharding
from jaxpp.runtime.arrays._homes import Box as Box
from jaxpp.runtime.arrays._homes import Home as Home
from jaxpp.runtime.arrays._homes import box_of as box_of
from jaxpp.runtime.arrays._homes import boxes_here as boxes_here
from jaxpp.runtime.arrays._homes import check_axes as check_axes
from jaxpp.runtime.arrays._homes import default_device as default_device
from jaxpp.runtime.arrays._homes import devices_of as devices_of
from jaxpp.runtime.arrays._homes import home_over as home_over
from jaxpp.runtime.arrays._homes import resplit as resplit
from jaxpp.runtime.arrays._homes import sharding_across as sharding_across
from jaxpp.runtime.arrays._homes import sharding_in as sharding_in
from jaxpp.runtime.arrays._homes import sizes_of as sizes_of
from jaxpp.runtime.arrays._homes import spans as spans
from jaxpp.runtime.arrays._stacked import StackedArray as StackedArray
from jaxpp.runtime.arrays._stacked import StackedSharding as StackedSharding
from jaxpp.runtime.arrays._stacked import gather as gather
from jaxpp.runtime.arrays._steps import StackedStep as StackedStep
from jaxpp.runtime.arrays._steps import check_arguments as check_arguments
from jaxpp.runtime.arrays._types import ArrayMaker as ArrayMaker
from jaxpp.runtime.arrays._types import ArrayType as ArrayType
from jaxpp.runtime.arrays._types import from_boxes as from_boxes
from jaxpp.runtime.arrays._types import from_host as from_host
from jaxpp.runtime.arrays._types import host_array as host_array
from jaxpp.runtime.arrays._types import is_ready as is_ready
from jaxpp.runtime.arrays._types import join_shares as join_shares
from jaxpp.runtime.arrays._types import own_share as own_share
from jaxpp.runtime.arrays._types import plain as plain
from jaxpp.runtime.arrays._types import shards_of as shards_of
from jaxpp.runtime.arrays._types import to_host as to_host
