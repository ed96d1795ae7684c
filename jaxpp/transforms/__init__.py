from jaxpp.transforms._marks import pipeline_enter_stage as pipeline_enter_stage
from jaxpp.transforms._microbatch import microbatch as microbatch
from jaxpp.transforms._place import place as place
from jaxpp.transforms._reductions import Operator as Operator
from jaxpp.transforms._schedule import schedule as schedule
from jaxpp.transforms._split_stages import split_stages as split_stages
from jaxpp.transforms._wrap_forward import wrap_forward as wrap_forward
