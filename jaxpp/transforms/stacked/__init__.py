"""Handles layers that are stacked on an axis: rows of arrays, parts, and scans over layers."""

from jaxpp.transforms.stacked._classes import Classes as Classes
from jaxpp.transforms.stacked._classes import rows_used as rows_used
from jaxpp.transforms.stacked._rows import Bounds as Bounds
from jaxpp.transforms.stacked._rows import concatenation_intervals as concatenation_intervals
from jaxpp.transforms.stacked._rows import num_rows as num_rows
from jaxpp.transforms.stacked._rows import pad_interval as pad_interval
from jaxpp.transforms.stacked._rows import part_vars as part_vars
from jaxpp.transforms.stacked._rows import slice_interval as slice_interval
from jaxpp.transforms.stacked._rows import takes_some_rows as takes_some_rows
from jaxpp.transforms.stacked._scans import Divided as Divided
from jaxpp.transforms.stacked._scans import Iteration as Iteration
from jaxpp.transforms.stacked._scans import divide_scans as divide_scans
from jaxpp.transforms.stacked._scans import find_scan as find_scan
from jaxpp.transforms.stacked._scans import layer_scans as layer_scans
from jaxpp.transforms.stacked._scans import loop_that_is_one_unit as loop_that_is_one_unit
from jaxpp.transforms.stacked._scans import walk_stacks as walk_stacks
from jaxpp.transforms.stacked._scans import way_out as way_out
from jaxpp.transforms.stacked._slicer import Slicer as Slicer
from jaxpp.transforms.stacked._slicer import in_parts as in_parts
