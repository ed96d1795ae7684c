"""Moves arrays between processes: over sockets, or by JAX itself."""

from jaxpp.runtime.transport._errors import Aborted as Aborted
from jaxpp.runtime.transport._errors import NotComputed as NotComputed
from jaxpp.runtime.transport._errors import NotOpened as NotOpened
from jaxpp.runtime.transport._errors import PeerLost as PeerLost
from jaxpp.runtime.transport._errors import TransportError as TransportError
from jaxpp.runtime.transport._errors import lost_in_jax as lost_in_jax
from jaxpp.runtime.transport._handshake import Addresses as Addresses
from jaxpp.runtime.transport._handshake import Door as Door
from jaxpp.runtime.transport._handshake import connect as connect
from jaxpp.runtime.transport._handshake import host_identity as host_identity
from jaxpp.runtime.transport._handshake import warn_of_open_ports as warn_of_open_ports
from jaxpp.runtime.transport._near import RUN_AHEAD as RUN_AHEAD
from jaxpp.runtime.transport._near import Near as Near
from jaxpp.runtime.transport._processes import first_devices as first_devices
from jaxpp.runtime.transport._processes import free_port as free_port
from jaxpp.runtime.transport._processes import join_processes as join_processes
from jaxpp.runtime.transport._processes import leave_processes as leave_processes
from jaxpp.runtime.transport._processes import rank_home as rank_home
from jaxpp.runtime.transport._pull import Payload as Payload
from jaxpp.runtime.transport._pull import Pulls as Pulls
from jaxpp.runtime.transport._socket import SocketTransport as SocketTransport
