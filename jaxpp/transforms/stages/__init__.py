"""Finds the stages of a forward: marks, cuts, units, and the calls that outline the stages."""

from jaxpp.transforms.stages._cut_balanced import Finest as Finest
from jaxpp.transforms.stages._cut_balanced import UnitCosts as UnitCosts
from jaxpp.transforms.stages._cut_balanced import UnitCuts as UnitCuts
from jaxpp.transforms.stages._cut_balanced import Units as Units
from jaxpp.transforms.stages._describe import stages_as_text as stages_as_text
from jaxpp.transforms.stages._marks import call_as as call_as
from jaxpp.transforms.stages._marks import called_as as called_as
from jaxpp.transforms.stages._marks import is_backward_call as is_backward_call
from jaxpp.transforms.stages._marks import is_enter as is_enter
from jaxpp.transforms.stages._marks import is_stage_call as is_stage_call
from jaxpp.transforms.stages._marks import keep_nothing as keep_nothing
from jaxpp.transforms.stages._marks import pipeline_enter_stage as pipeline_enter_stage
from jaxpp.transforms.stages._marks import stage_of_call as stage_of_call
from jaxpp.transforms.stages._split_stages import split_stages as split_stages
from jaxpp.transforms.stages._stages import dissolve_marks as dissolve_marks
from jaxpp.transforms.stages._stages import listed as listed
from jaxpp.transforms.stages._wrap_forward import wrap_forward as wrap_forward
