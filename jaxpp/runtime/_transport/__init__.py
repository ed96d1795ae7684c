from jaxpp.runtime._transport._connections import Addresses as Addresses
from jaxpp.runtime._transport._errors import Aborted as Aborted
from jaxpp.runtime._transport._errors import PeerLost as PeerLost
from jaxpp.runtime._transport._errors import TransportError as TransportError
from jaxpp.runtime._transport._socket import Recorder as Recorder
from jaxpp.runtime._transport._socket import SocketTransport as SocketTransport
from jaxpp.runtime._transport._socket import Traffic as Traffic
