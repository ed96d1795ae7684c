"""Tables in torch's CSV format: a row for each rank, a cell for each task, its stage first."""

import csv
import re
from collections.abc import Iterable

from jaxpp.schedules._custom import from_tasks
from jaxpp.schedules._kinds import Kind
from jaxpp.schedules._table import Table, Task

_ACTION = re.compile(r"(\d+)([A-Z_]+)(\d*)")
_TOGETHER = re.compile(r"\((.*)\)OVERLAP_F_B")
# Actions that torch adds when it lowers a schedule: transfers, and those for sharded parameters.
# Here these follow from the data flow.
_IMPLIED = re.compile(r"((WAIT_)?(SEND|RECV)_[FB]|UNSHARD|RESHARD|(WAIT_)?REDUCE_GRAD)")


def to_csv(table: Table) -> str:
    """Writes a table in the CSV format of torch's pipelines, `torch.distributed.pipelining`.

    Each row is a rank, each cell a task: `2F5` is the forward of microbatch 5 on stage 2; `B` is a
    full backward, `I` and `W` its halves; tasks that overlap share a cell, `(0F1;7B0)OVERLAP_F_B`.
    The format has no clock, and does not have the table's placement or stage inputs. Torch itself
    reads only tables that have each stage on one rank, and no `R`, which it does not know.

    Args:
      table: the table.

    Returns:
      The text of the file.

    >>> from jaxpp.schedules import DualPipeV, OneFOneB
    >>> print(to_csv(OneFOneB().table(num_stages=2, num_microbatches=2)), end="")
    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1
    >>> print(to_csv(DualPipeV().table(num_stages=2, num_microbatches=2)), end="")
    0F0,1F0,0F1,1B0,(1F1;0B0)OVERLAP_F_B,1B1,0I1,0W1
    """
    lines = []
    for order in table.ranks:
        cells: list[list[str]] = []
        together = False
        for task in order:
            if not together:
                cells.append([])
            cells[-1].append(f"{task.stage}{task.kind}{task.microbatch}")
            together = task in table.overlaps
        lines.append(",".join(map(_cell, cells)) + "\n")
    return "".join(lines)


def from_csv(
    text: str,
    *,
    placement: Iterable[Iterable[int]] = (),
    stage_inputs: Iterable[Iterable[int]] | None = None,
    direction_of: Iterable[int] = (),
) -> Table:
    r"""Reads a table from the CSV format of torch's pipelines: see `to_csv`.

    Empty cells, which are torch's idle steps, are skipped. So are its transfers, and its actions
    for sharded parameters (`1SEND_F0`, `0UNSHARD`, `0REDUCE_GRAD`): here these follow from the data
    flow. So a file may be of torch's `compute_only` or `compute_comms` format.

    Args:
      text: the text of the file.
      placement: for each direction, the rank of each stage, where it cannot be read off the tasks.
      stage_inputs: for each stage, the stages whose results it reads; by default the one before.
      direction_of: for each microbatch, the number of its direction, where there are several.

    Returns:
      The table, not yet checked: `check` does that.

    Raises:
      ValueError: a cell cannot be read, or there is no task at all.

    >>> table = from_csv("0F0,0F1,,,0I0,0W0,0B1\n,1F0,1B0,1SEND_B0,(1F1;1B1)OVERLAP_F_B\n")
    >>> for tasks in table.ranks:
    ...     print(*tasks)
    F0.0 F0.1 I0.0 W0.0 B0.1
    F1.0 B1.0 F1.1 B1.1
    >>> print(*table.overlaps)
    F1.1
    """
    ranks: list[list[Task]] = []
    overlaps: list[Task] = []
    for row, cells in enumerate(csv.reader(text.splitlines())):
        ranks.append([])
        for column, cell in enumerate(cells):
            where = f"cell {column + 1} of row {row + 1}"
            match = _TOGETHER.fullmatch(cell.strip())
            parts = match[1].split(";") if match else [cell]
            tasks = [task for part in parts for task in _read(part.strip(), where)]
            ranks[-1] += tasks
            overlaps += tasks[:-1]
    return from_tasks(
        ranks,
        placement=placement,
        stage_inputs=stage_inputs,
        overlaps=overlaps,
        direction_of=direction_of,
    )


def _cell(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"({';'.join(words)})OVERLAP_F_B"


def _read(action: str, where: str) -> list[Task]:
    """Reads one of torch's actions: gives one task, or none."""
    match = _ACTION.fullmatch(action)
    if match and match[2] in Kind and match[3]:
        return [Task(Kind(match[2]), int(match[1]), int(match[3]))]
    if not action or (match and _IMPLIED.fullmatch(match[2])):
        return []
    raise ValueError(
        f"{action!r} in {where} is no action of torch's; write the stage, a kind of F, B, I, W and "
        f'R, and the microbatch, as "2F5", two that overlap as "(0F1;7B0)OVERLAP_F_B", or nothing '
        f"for an idle step."
    )
