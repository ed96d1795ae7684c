"""Errors of the transfers between ranks."""


class TransportError(RuntimeError):
    """Arrays could not be moved between ranks."""


class PeerLost(TransportError):
    """The connection to another rank ended: its process or host is gone, or only the connection.

    Args:
        rank: the rank that cannot be reached.
        reason: what was seen of it.
    """

    def __init__(self, rank: int, reason: str):
        super().__init__(rank, reason)
        self.rank, self.reason = rank, reason

    def __str__(self):
        return f"The connection to rank {self.rank} is lost: {self.reason}."


class NotOpened(PeerLost):
    """The other end took a connection, and then did not do as a rank does: it may be none."""


class Aborted(TransportError):
    """The error of a send or a receive after the transport was aborted; the cause is chained."""


class NotComputed(TransportError):
    """An array that was to be sent could not be computed; the cause is chained.

    Args:
        task: the task whose result it is, the way its messages name it.
    """

    def __init__(self, task: str):
        super().__init__(task)
        self.task = task

    def __str__(self):
        return f"The result of {self.task}, which was to be sent, could not be computed."


def lost_in_jax(error: BaseException) -> bool:
    """Tells whether an error says that another process of a collective or a transfer was missing.

    Example:
        >>> lost_in_jax(RuntimeError("Gloo AllGather failed: Connection closed by peer"))
        True
    """
    words = "gloo", "socketserver", "recv()", "while transferring"
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
