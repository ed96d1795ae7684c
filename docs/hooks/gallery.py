"""Makes a page for each schedule of the catalogue, and links them from the list of schedules."""

import collections
import inspect
import pathlib
import re
import tempfile
import textwrap
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from jaxpp.schedules import CATALOGUE, Schedule, Timeline, compare, plot, simulate
from jaxpp.schedules._drawing._styles import lay_out, num_slots, shade

_ROOT = pathlib.Path(__file__).parents[2]
_REFERENCES = _ROOT / "docs" / "references.bib"
_SIZES = ((4, 8), (4, 32), (8, 16), (16, 32))
_PICTURED = (4, 8)
#: The time that a thumbnail shows, and its points for a unit of it.
_LONGEST, _SCALE = 33, 6
_PAGE = """\
# {title}

`jaxpp.schedules.{value}`; on a command line `--schedule={name}`.

![The timeline of {title}]({name}.svg)

*{ranks} ranks, {microbatches} microbatches, and F = I = W = 1 for a rank's share of a microbatch.
Time is to the right; a number is a microbatch.*

{sizes} {stages}

| ranks | microbatches | makespan | bubble | bubble of the longest span | activations |
| --- | --- | --- | --- | --- | --- |
{figures}

The bubble is the idle share of the makespan, or of the longest time between a rank's first start
and last end. Activations are the most that a rank holds, in microbatches of all of its stages.
They are simulated at the same costs, without communication.

{definition}

{references}
"""
_DEFINITION = """\
::: jaxpp.schedules.{name}
    options:
      members: false
      show_bases: false

??? quote "{path}"

{source}
"""


def on_config(config: MkDocsConfig) -> None:
    """Puts the pages in the navigation, after those of `Schedules` that `docs/` has."""
    (section,) = (entry["Schedules"] for entry in config.nav or () if "Schedules" in entry)
    section.append({"Gallery": [{_title(name): f"schedules/{name}.md"} for name in CATALOGUE]})


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the pages and their pictures to those of `docs/`."""
    for name in CATALOGUE:
        files.append(File.generated(config, f"schedules/{name}.md", content=_page(name)))
        files.append(File.generated(config, f"schedules/{name}.svg", content=_picture(name)))
        files.append(
            File.generated(config, f"schedules/{name}_small.svg", content=_thumbnail(name))
        )


def on_page_markdown(markdown: str, page: Page, **kwargs: Any) -> str:
    """Makes links of the names in the tables of schedules, and shows their pictures."""
    if page.file.src_uri not in ("schedules.md", "choosing_a_schedule.md"):
        return markdown
    pages = {_title(name): name for name in CATALOGUE}

    def link(found: re.Match[str]) -> str:
        name = pages.get(found[1])
        return f"[{found[0]}](schedules/{name}.md)" if name else found[0]

    def row(found: re.Match[str]) -> str:
        papers = re.sub(r"\b\d{4}\.\d{5}\b", r"[\g<0>](https://arxiv.org/abs/\g<0>)", found[0])
        return re.sub(r"`(\w+)(\(\))?`", link, papers)

    markdown = re.sub(r"^\| .*$", row, markdown, flags=re.M)
    if page.file.src_uri == "schedules.md":
        markdown = re.sub(r"\n(?=\| class )", f"\n{_thumbnails()}\n", markdown, count=1)
    return markdown


def _title(name: str) -> str:
    """Returns the name of the class, or that of the catalogue where it has other defaults."""
    make = CATALOGUE[name]
    return make.__name__ if isinstance(make, type) else name


def _page(name: str) -> str:
    schedule = CATALOGUE[name]()
    kind = type(schedule)
    if _title(name) == kind.__name__:
        path = pathlib.Path(inspect.getfile(kind))
        code = textwrap.indent(f"```python\n{path.read_text()}```", "    ")
        file = path.relative_to(_ROOT)
        definition = _DEFINITION.format(name=kind.__name__, path=file, source=code)
    else:
        own = next(n for n, make in CATALOGUE.items() if make is kind)
        definition = f"It is [`{kind.__name__}`]({own}.md) with other knobs; that page defines it."
    return _PAGE.format(
        title=_title(name),
        value=schedule,
        name=name,
        ranks=_PICTURED[0],
        microbatches=_PICTURED[1],
        sizes=_sizes(schedule),
        stages=_stages(schedule),
        figures="\n".join(_figures(schedule, *size) for size in _SIZES),
        definition=definition,
        references=_references(kind),
    )


def _picture(name: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "picture.svg")
        plot(_timeline(name), path)
        return path.read_text()


def _thumbnails() -> str:
    """Writes a small picture of each schedule, which leads to its page."""
    ranks, microbatches = _PICTURED
    pictures = "\n".join(
        f"[![Timeline of {_title(name)}](schedules/{name}_small.svg){{loading=lazy}}"
        f" {_title(name)}](schedules/{name}.md)"
        for name in CATALOGUE
    )
    return (
        f'<div class="gallery" markdown>\n{pictures}\n</div>\n\n*{ranks} ranks, {microbatches} '
        f"microbatches, all on one scale of time. Blue is a forward, green a backward, red and "
        f"yellow its halves; a later stage of a rank has the next shade. A picture leads to the "
        f"page of its schedule.*\n"
    )


def _thumbnail(name: str) -> str:
    """Draws the timeline of a schedule as blocks of colour, with no text."""
    rows, height = lay_out(_timeline(name)), 8
    slots, paths = num_slots(rows), collections.defaultdict(list)
    for rank, cells in enumerate(rows):
        for cell in cells:
            own, high = cell.span, (height - 1) / cell.num_lanes
            x, width = _SCALE * own.start, _SCALE * (own.end - own.start) - 0.3
            y = height * rank + high * cell.lane
            colour = "".join(
                f"{round(255 * c):02x}" for c in shade(own.task.kind, cell.slot, slots)
            )
            paths[colour].append(f"M{x:.2f} {y:.2f}h{width:.2f}v{high - 0.2:.2f}h{-width:.2f}z")
    size = f"{_SCALE * _LONGEST} {height * _PICTURED[0]}"
    drawn = "".join(f'<path fill="#{c}" d="{"".join(own)}"/>' for c, own in paths.items())
    idle = '<rect width="100%" height="100%" fill="#f1f1f1"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}">{idle}{drawn}</svg>'


def _timeline(name: str) -> Timeline:
    return simulate(CATALOGUE[name]().table_for_ranks(*_PICTURED))


def _figures(schedule: Schedule, num_ranks: int, num_microbatches: int) -> str:
    (row,) = compare({"": schedule}, num_ranks, num_microbatches)
    return (
        f"| {num_ranks} | {num_microbatches} | {row.makespan:g} | {row.bubble:.1%} | "
        f"{row.span_bubble:.1%} | {row.peak_memory:g} |"
    )


def _sizes(schedule: Schedule) -> str:
    sizes = ((p, m) for p in range(1, 17) for m in range(1, 65))
    rules = sorted({rule for size in sizes if (rule := schedule.broken_rule(*size))})
    if rules:
        return f"It needs {', and '.join(rules)}."
    return "It takes any number of ranks, and any number of microbatches."


def _stages(schedule: Schedule) -> str:
    rows = [", ".join(map(str, ranks)) for ranks in schedule.placement(_PICTURED[0])]
    return f"The stages are on the ranks {'; the other way on '.join(rows)}."


def _references(kind: type[Schedule]) -> str:
    """Returns the BibTeX entries of the papers that a docstring names."""
    papers = re.findall(r"arXiv\s+(\d{4}\.\d{5})", kind.__doc__ or "")
    entries = re.findall(r"^@.*?^\}$", _REFERENCES.read_text(), re.M | re.S)
    cited = [entry for entry in entries if any(f"{{{paper}}}" in entry for paper in papers)]
    blocks = "\n\n".join(cited)
    return f"## BibTeX\n\n```bibtex\n{blocks}\n```" if cited else ""
