from jaxpp.schedules._catalogue._chimera import Chimera as Chimera
from jaxpp.schedules._catalogue._dualpipe import DualPipe as DualPipe
from jaxpp.schedules._catalogue._dualpipe import DualPipeV as DualPipeV
from jaxpp.schedules._catalogue._forward_only import ForwardOnly as ForwardOnly
from jaxpp.schedules._catalogue._gpipe import GPipe as GPipe
from jaxpp.schedules._catalogue._hanayo import Hanayo as Hanayo
from jaxpp.schedules._catalogue._interleaved import Interleaved1F1B as Interleaved1F1B
from jaxpp.schedules._catalogue._interleaved_zero_bubble import (
    InterleavedZeroBubble as InterleavedZeroBubble,
)
from jaxpp.schedules._catalogue._names import CATALOGUE as CATALOGUE
from jaxpp.schedules._catalogue._names import by_name as by_name
from jaxpp.schedules._catalogue._names import register as register
from jaxpp.schedules._catalogue._one_f_one_b import Eager1F1B as Eager1F1B
from jaxpp.schedules._catalogue._one_f_one_b import OneFOneB as OneFOneB
from jaxpp.schedules._catalogue._pipe_offload import GIS as GIS
from jaxpp.schedules._catalogue._seq1f1b import Seq1F1B as Seq1F1B
from jaxpp.schedules._catalogue._v_blocks import OneFOneBV as OneFOneBV
from jaxpp.schedules._catalogue._v_blocks import VBuildingBlock as VBuildingBlock
from jaxpp.schedules._catalogue._v_blocks import VHalf as VHalf
from jaxpp.schedules._catalogue._v_blocks import VMin as VMin
from jaxpp.schedules._catalogue._zero_bubble import ZeroBubbleH1 as ZeroBubbleH1
from jaxpp.schedules._catalogue._zero_bubble import ZeroBubbleH2 as ZeroBubbleH2
from jaxpp.schedules._catalogue._zero_bubble_v import ZeroBubbleV as ZeroBubbleV
