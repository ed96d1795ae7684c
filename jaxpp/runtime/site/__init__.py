"""Runs the ranks of a process (`Process`), and calls those of many; knows no Ray, no launcher.

`SiteMesh` is a mesh over several processes, `Group` how it calls them, `Watch` how it hears that
one has failed.
"""

from jaxpp.runtime.site._array import RemoteArray as RemoteArray
from jaxpp.runtime.site._array import RemoteSharding as RemoteSharding
from jaxpp.runtime.site._call import Given as Given
from jaxpp.runtime.site._carried import Packed as Packed
from jaxpp.runtime.site._failure import RESTART as RESTART
from jaxpp.runtime.site._failure import Death as Death
from jaxpp.runtime.site._failure import Failed as Failed
from jaxpp.runtime.site._failure import Failure as Failure
from jaxpp.runtime.site._failure import RankError as RankError
from jaxpp.runtime.site._group import IN_FLIGHT as IN_FLIGHT
from jaxpp.runtime.site._group import Group as Group
from jaxpp.runtime.site._group import Hello as Hello
from jaxpp.runtime.site._group import Member as Member
from jaxpp.runtime.site._interrupts import keep_interrupts as keep_interrupts
from jaxpp.runtime.site._interrupts import uninterrupted as uninterrupted
from jaxpp.runtime.site._mesh import SiteMesh as SiteMesh
from jaxpp.runtime.site._process import LANES as LANES
from jaxpp.runtime.site._process import Process as Process
from jaxpp.runtime.site._process import in_order as in_order
from jaxpp.runtime.site._process import lane as lane
from jaxpp.runtime.site._watch import POLL as POLL
from jaxpp.runtime.site._watch import Watch as Watch
from jaxpp.runtime.site._watch import end_stopped as end_stopped
from jaxpp.runtime.site._watch import has_ended as has_ended
