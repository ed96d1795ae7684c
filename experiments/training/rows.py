"""The file with a row for each step of a training: written as it goes, cut when it goes back."""

import contextlib
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence

#: The number of a step, its loss, what it took (seconds), and the held-out loss where there is one.
Row = dict[str, float]


@contextlib.contextmanager
def writing(path: pathlib.Path, rows: Sequence[Row]) -> Iterator[Callable[[Row], None]]:
    """Replaces a file by one that starts with some rows; gives a function that adds one.

    A row is in the file when the function returns, and stays there if this process is killed.
    """
    new = path.with_suffix(".new")
    new.write_text("".join(json.dumps(row) + "\n" for row in rows))
    new.replace(path)  # at once, so that there is always a whole file
    with path.open("a") as file:

        def add(row: Row) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()

        yield add


def read(path: pathlib.Path, steps: int) -> list[Row]:
    """The rows of the first steps; a process that was killed may have done more, and half a row.

    Raises:
        ValueError: when the file has fewer.
    """
    lines = path.read_text().splitlines()[:steps] if path.exists() else []
    if len(lines) < steps:
        raise ValueError(
            f"{path} has the rows of {len(lines)} steps, but {steps} are done; put the file back, "
            f"or start again in another folder."
        )
    return [json.loads(line) for line in lines]


def plot_losses(rows: Sequence[Row], path: pathlib.Path) -> None:
    """Draws training and held-out loss against the step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot([row["step"] for row in rows], [row["loss"] for row in rows], lw=1, label="training")
    evaluated = [row for row in rows if "held_out_loss" in row]
    axes.plot(
        [row["step"] for row in evaluated],
        [row["held_out_loss"] for row in evaluated],
        "o-",
        label="held out",
    )
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("cross-entropy (nats per byte)")
    axes.set_xlim(0, len(rows) * 1.01)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
