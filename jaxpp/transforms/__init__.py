"""The transforms. Each room is below those that import it, and is reached through its face.

stacked: layers stacked on an axis. stages: where the stages are. microbatch: the loop and its
reductions. tasks: what the loop's tasks compute. inside: axes inside a rank. initialize: first
arguments. place: a whole step, from a function to the programs of the ranks.
"""

from jaxpp.transforms._conveniences import accumulate_grads as accumulate_grads
from jaxpp.transforms._conveniences import pipelined as pipelined
from jaxpp.transforms.microbatch import Operator as Operator
from jaxpp.transforms.microbatch import microbatch as microbatch
from jaxpp.transforms.place import place as place
from jaxpp.transforms.stages import pipeline_enter_stage as pipeline_enter_stage
from jaxpp.transforms.stages import split_stages as split_stages
from jaxpp.transforms.stages import stages_as_text as stages_as_text
from jaxpp.transforms.stages import wrap_forward as wrap_forward
from jaxpp.transforms.tasks import schedule as schedule
