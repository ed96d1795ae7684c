"""Partitions the body of a microbatch loop into tasks, which run by a schedule."""

from jaxpp.transforms.tasks._as_scan import was_loop as was_loop
from jaxpp.transforms.tasks._delay import delay as delay
from jaxpp.transforms.tasks._edit import Loop as Loop
from jaxpp.transforms.tasks._edit import Value as Value
from jaxpp.transforms.tasks._edit_loops import edit_loops as edit_loops
from jaxpp.transforms.tasks._loop import ScheduledLoop as ScheduledLoop
from jaxpp.transforms.tasks._loop import error_inside as error_inside
from jaxpp.transforms.tasks._loop import handed_on as handed_on
from jaxpp.transforms.tasks._loop import is_loop as is_loop
from jaxpp.transforms.tasks._loop import operand_stages as operand_stages
from jaxpp.transforms.tasks._loop import result_stages as result_stages
from jaxpp.transforms.tasks._loop import row_type as row_type
from jaxpp.transforms.tasks._loop import rows_type as rows_type
from jaxpp.transforms.tasks._schedule import holds_microbatch_loop as holds_microbatch_loop
from jaxpp.transforms.tasks._schedule import is_microbatch_loop as is_microbatch_loop
from jaxpp.transforms.tasks._schedule import schedule as schedule
