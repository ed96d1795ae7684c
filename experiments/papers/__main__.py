"""Regenerates the figures and the main picture of papers on schedules.

    python -m experiments.papers
    python -m experiments.papers --paper=gpipe
    python -m experiments.papers --paper=zero_bubble,hanayo --output=outputs/papers

Without `--paper` it lists the papers. For each it prints the paper's figures beside ours, says why
they differ where they do, and what the paper leaves open; it draws the paper's main picture, and
places a small step of the paper's schedules on this machine, whose values it compares with the
plain function's.
"""

import pathlib

import jax
from absl import app, flags

from experiments.papers import laboratory

_PAPERS = flags.DEFINE_list("paper", [], f"Some of {', '.join(laboratory.NAMES)}; else a list.")
_OUTPUT = flags.DEFINE_string("output", "outputs/papers", "Folder for the pictures.")


def main(_: list[str]) -> None:
    """Prints, draws and places each paper."""
    if unknown := sorted(set(_PAPERS.value) - set(laboratory.NAMES)):
        raise SystemExit(f"--paper={unknown[0]} is none of {', '.join(laboratory.NAMES)}.")
    if not _PAPERS.value:
        print(*(f"{name:20} {laboratory.about(name)[0]}" for name in laboratory.NAMES), sep="\n")
    folder = pathlib.Path(_OUTPUT.value)
    for name in map(str, _PAPERS.value):
        paper = laboratory.load(name)
        title = laboratory.reference(paper)[0]
        print(f"{title}, arXiv {paper.arxiv}\n\n{laboratory.text(name)}\n")
        folder.mkdir(parents=True, exist_ok=True)
        laboratory.draw(paper, folder / f"{name}.png")
        print(f"The picture is {folder / name}.png.")
        laboratory.place(paper)
        for schedule, ranks, microbatches in paper.small:
            print(
                f"{type(schedule).__name__}, placed on {ranks} ranks with {microbatches} "
                f"microbatches, has the values of the plain function."
            )
        print()


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    app.run(main)
