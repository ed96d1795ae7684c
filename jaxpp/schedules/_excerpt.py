"""Shows the part of a table around a fault, for an error message."""

from collections.abc import Mapping, Sequence

from jaxpp.schedules._table import Table, Task

_NEIGHBOURS = 2  # ranks shown on each side of a fault
_REACH = 3  # tasks shown on each side of a fault
_MOST_RANKS = 64


def excerpt(
    table: Table,
    marked: Mapping[int, Sequence[int]],
    *,
    missing: Task | None = None,
    notes: Mapping[int, str] | None = None,
) -> str:
    """Writes the orders of some ranks around the tasks at fault, one line for each rank.

    Where one rank alone is at fault, the ranks next to it are shown, too. Each line is aligned by
    its task of the same kind and microbatch.

    Args:
      table: the table.
      marked: for each rank at fault, the places of its tasks in brackets, the first in the middle.
      missing: a task to show at the first of these places though the table does not have it.
      notes: for a rank, what to say at the end of its line.

    Returns:
      The lines, each with a line break before it.

    >>> from jaxpp.schedules import OneFOneB
    >>> table = OneFOneB().table(num_stages=3, num_microbatches=4)
    >>> print(excerpt(table, {1: [3]}))
    <BLANKLINE>
      rank 0 |            F0.0  F0.1  F0.2  B0.0  F0.3  B0.1  ...
      rank 1 |      F1.0  F1.1  B1.0 [F1.2] B1.1  F1.3  B1.2  ...
      rank 2 | ...  B2.0  F2.1  B2.1  F2.2  B2.2  F2.3  B2.3
    """
    ranks: Sequence[int] = sorted(marked)
    orders = {rank: table.ranks[rank] for rank in ranks}
    if missing is not None:
        for rank, (place, *_) in marked.items():
            orders[rank] = (*orders[rank][:place], missing, *orders[rank][place:])
    middles = {rank: places[0] for rank, places in marked.items()}
    if len(ranks) == 1:
        fault = orders[ranks[0]][middles[ranks[0]]]
        first, last = ranks[0] - _NEIGHBOURS, ranks[0] + _NEIGHBOURS
        ranks = range(max(first, 0), min(last + 1, table.num_ranks))
        for rank in ranks:
            orders.setdefault(rank, table.ranks[rank])
            middles.setdefault(rank, _place_of(orders[rank], fault))
    shown, hidden = ranks[:_MOST_RANKS], len(ranks[_MOST_RANKS:])
    windows = [_window(orders[r], middles[r], marked.get(r, ()), missing) for r in shown]
    widths = [max(map(len, column)) for column in zip(*windows, strict=True)]
    digits = len(str(max(shown)))
    text = ""
    for rank, window in zip(shown, windows, strict=True):
        cells = "".join(cell.ljust(width) for cell, width in zip(window, widths, strict=True))
        note = f" {notes[rank]}" if notes and rank in notes else ""
        text += f"\n  rank {rank:>{digits}} | {cells}{note}".rstrip()
    return f"{text}\n  and {hidden} more ranks" if hidden else text


def _place_of(order: Sequence[Task], like: Task) -> int:
    """Finds the task with the kind and microbatch of another rank's task; its place, or else 0."""
    same = (
        n for n, t in enumerate(order) if (t.kind, t.microbatch) == (like.kind, like.microbatch)
    )
    return next(same, 0)


def _window(
    order: Sequence[Task], middle: int, marked: Sequence[int], missing: Task | None
) -> list[str]:
    """Writes the tasks around a place, each in a cell, with marks where tasks are cut off."""
    first, last = middle - _REACH, middle + _REACH
    cells = ["... " if first > 0 else ""]
    for place in range(first, last + 1):
        cell = f" {order[place]} " if 0 <= place < len(order) else ""
        if place in marked:
            cell = f"[{order[place]}]" if missing is None else f"[{missing}?]"
        cells.append(cell)
    return [*cells, " ..." if last + 1 < len(order) else ""]
