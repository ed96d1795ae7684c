"""The worker process: keeps its rank's arrays, and answers the calls of the driver."""

from jaxpp.runtime.remote.worker._actor import LOOPBACK as LOOPBACK
from jaxpp.runtime.remote.worker._actor import Hello as Hello
from jaxpp.runtime.remote.worker._actor import Setup as Setup
from jaxpp.runtime.remote.worker._actor import actor_of as actor_of
from jaxpp.runtime.remote.worker._actor import versions as versions
from jaxpp.runtime.remote.worker._black_box import BlackBox as BlackBox
from jaxpp.runtime.remote.worker._settings import Settings as Settings
