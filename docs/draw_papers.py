"""Writes `docs/papers/`, the pages of papers with their pictures: run `python -m docs.draw_papers`.

With names of papers after it, it writes those and the list.
"""

import pathlib
import re
import sys

from experiments.papers import laboratory
from experiments.papers.laboratory import Paper
from jaxpp.schedules import CATALOGUE

_INDEX = """\
# Papers, regenerated

Each page takes a paper on pipeline schedules, builds its setting from what it published, and puts
its figures beside ours. Its schedules are checked and simulated, and a small step of each is placed
and compared with the plain function. Where figures differ, the page says why.

```sh
python -m experiments.papers                 # the list
python -m experiments.papers --paper=gpipe   # figures, picture, placed steps
```

| paper | year | figures | as published | what differs |
| --- | --- | ---: | ---: | --- |
{rows}

A figure is as published where it is the same to each digit that the paper has, or to the digits
shown where the paper has a formula. Each paper is a file of one or two hundred lines in
`experiments/papers/`. That of [PipeOffload](pipeoffload.md) writes schedules that the catalogue
does not have.
"""
_PAGE = """\
# {about}

*{title}*, [arXiv {arxiv}](https://arxiv.org/abs/{arxiv}).

{body}

[![{about}]({name}.png)]({name}.png)

*{caption}*

## Figures

{rows}

{differences}## What the paper leaves open

{leaves_open}

## Run it

```sh
python -m experiments.papers --paper={name}
```

It checks and simulates the tables, prints the figures, and draws the picture. Then it places small
steps of {schedules} on a local mesh, and compares their values with the plain function's.

## BibTeX

```bibtex
{entry}
```
"""


def page(name: str) -> str:
    """The page of a paper, as Markdown."""
    paper = laboratory.load(name)
    title, entry = laboratory.reference(paper)
    about, body = laboratory.about(name)
    (head, *cells), whys = laboratory.table(name)
    lines = [head, ("---", "---", "---:", "---:", "---:", "---")[: len(head)], *cells]
    return _PAGE.format(
        about=about,
        title=title,
        arxiv=paper.arxiv,
        body=re.sub(r"arXiv\s(\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", body),
        name=name,
        caption=paper.caption,
        rows="\n".join(f"| {' | '.join(line)} |" for line in lines),
        differences="\n\n".join(["## Why they differ", *whys, ""]) if whys else "",
        leaves_open="\n".join(f"- {item}" for item in paper.leaves_open),
        schedules=_schedules(paper),
        entry=entry,
    )


def index() -> str:
    """The list of the papers, as Markdown."""
    lines = []
    for name in laboratory.NAMES:
        paper = laboratory.load(name)
        shown = [row.shown for row in laboratory.figures(name)]
        same = sum(paper == ours for paper, ours, _ in shown)
        link = f"[{laboratory.about(name)[0]}]({name}.md)"
        year = 2000 + int(paper.arxiv[:2])
        lines.append(f"| {link} | {year} | {len(shown)} | {same} | {paper.differs} |")
    return _INDEX.format(rows="\n".join(lines))


def main(names: list[str], folder: pathlib.Path) -> None:
    """Writes the pages and the pictures of papers, and the list of all."""
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / f"{name}.md").write_text(page(name))
        laboratory.draw(laboratory.load(name), folder / f"{name}.png")
    (folder / "index.md").write_text(index())


def _schedules(paper: Paper) -> str:
    """The schedules that are placed, linked to their pages in the gallery."""
    pages = {make: name for name, make in CATALOGUE.items()}
    kinds = dict.fromkeys(type(schedule) for schedule, _, _ in paper.small)
    links = [
        f"[`{kind.__name__}`](../schedules/{pages[kind]}.md)" if kind in pages
        else f"`{kind.__name__}`" for kind in kinds
    ]  # fmt: skip
    return " and ".join([", ".join(links[:-1]), links[-1]]) if links[1:] else links[0]


if __name__ == "__main__":
    main(sys.argv[1:] or list(laboratory.NAMES), pathlib.Path(__file__).parent / "papers")
