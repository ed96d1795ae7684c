"""The Ray session: joins it, and finds places for workers on its nodes."""

from jaxpp.runtime.remote.cluster._environment import prepare_process as prepare_process
from jaxpp.runtime.remote.cluster._environment import warn_of_driver as warn_of_driver
from jaxpp.runtime.remote.cluster._environment import warn_of_platform as warn_of_platform
from jaxpp.runtime.remote.cluster._environment import worker_options as worker_options
from jaxpp.runtime.remote.cluster._places import ranks_of_a_node as ranks_of_a_node
from jaxpp.runtime.remote.cluster._places import release_places as release_places
from jaxpp.runtime.remote.cluster._places import renew_places as renew_places
from jaxpp.runtime.remote.cluster._places import reserve_places as reserve_places
from jaxpp.runtime.remote.cluster._session import ANSWER_TIMEOUT as ANSWER_TIMEOUT
from jaxpp.runtime.remote.cluster._session import join_session as join_session
from jaxpp.runtime.remote.cluster._session import leave_session as leave_session
