"""The transfers between processes, in an order in which no process waits for another."""

from collections import Counter
from collections.abc import Mapping, Sequence

from jaxpp._program import Message, Program, Receive, Send
from jaxpp.runtime.executor import interleave


def transfers_of(programs: Sequence[Program], process_of: Mapping[int, int]) -> tuple[Message, ...]:
    """Returns the messages between processes, in the order of their sends in that of all ranks."""
    return tuple(
        i.message
        for _, chunk in interleave(programs)
        for i in chunk
        if isinstance(i, Send) and _is_between(i.message, process_of)
    )


def check_transfers(
    transfers: Sequence[Message], programs: Sequence[Program], process_of: Mapping[int, int]
) -> None:
    """Proves that processes which issue transfers in one order do not wait for each other.

    A process issues a transfer where it sends the message or receives it, and before that all
    transfers that are earlier in the order. It can do so where it makes its sends in that order,
    and each after all that it has received by then. So each transfer needs only earlier ones, and
    the earliest that is not done can always go on.

    Raises:
        ValueError: the order does not have each message between processes once, or a process would
            wait for what it sends later itself.
    """
    places = {message.tag: place for place, message in enumerate(transfers)}
    issued: Counter[int] = Counter()  # by each process
    sent: set[int] = set()
    for rank, i in ((rank, i) for rank, chunk in interleave(programs) for i in chunk):
        if not isinstance(i, Send | Receive) or not _is_between(i.message, process_of):
            continue
        process, message = process_of[rank], i.message
        if (place := places.get(message.tag)) is None:
            raise ValueError(f"The order of transfers lacks {_named(message)}.")
        if isinstance(i, Send):
            sent.add(message.tag)
            if place < issued[process]:
                raise ValueError(
                    f"The order of transfers has {_named(message)} before "
                    f"{_named(transfers[issued[process] - 1])}, which process {process} issues "
                    f"before it sends the former; it would wait for itself, or another for it."
                )
        issued[process] = max(issued[process], place + 1)
    if len(transfers) != len(sent) or sent != places.keys():
        raise ValueError(
            f"The order of transfers has {len(transfers)} messages, and the ranks send {len(sent)} "
            f"to other processes."
        )


def _is_between(message: Message, process_of: Mapping[int, int]) -> bool:
    return process_of[message.source] != process_of[message.target]


def _named(message: Message) -> str:
    return f"{message.names[0]} from rank {message.source} to rank {message.target}"
