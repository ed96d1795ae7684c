"""The pages: their Python code runs as it stands there, and prints what they show."""

import csv
import json
import os
import pathlib
import pydoc
import re
import runpy
import shlex
import shutil
import subprocess
import sys

import pytest

import jaxpp
from jaxpp.schedules import CATALOGUE

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
API = sorted((ROOT / "docs" / "api").glob("*.md"))
#: Pages whose code another test runs: that of several hosts, and that whose output JAX words.
ELSEWHERE = {"how_a_step_flows.md", "multi_node.md", "coming_from_jaxpp.md"}
#: Pages whose code starts worker processes.
MARKS = {
    "README.md": pytest.mark.more,
    "end_to_end.md": pytest.mark.more,
    "worker_processes.md": pytest.mark.slow,
}
#: A block of Python, with the block of text that shows what it prints, if one follows.
BLOCK = re.compile(
    r"^```python\n(.*?)^```\n(?:\s*[^\n`]*\n)?(?:\n?```text\n(.*?)^```\n)?",
    re.M | re.S,
)
#: What a script prints between the blocks.
END = "==== end of a block ===="


def public(module):
    """The names that an `__init__.py` exports, and those that the package imports late."""
    file = pathlib.Path(module.__file__)
    source = file.read_text() + (file.with_name("_names.py").read_text() if module is jaxpp else "")
    return set(re.findall(r"import ([^\W_]\w*) as \1$", source, re.M))


def run(page, folder):
    """Runs the blocks of a page as one script, in a fresh process; gives what each prints."""
    codes = [code for code, _ in BLOCK.findall(page.read_text())]
    script = folder / "script.py"
    script.write_text(f"\nprint({END!r})\n".join(codes))
    return printed([script], folder).split(END + "\n")


def printed(arguments, folder):
    """Runs Python in a folder, and gives what it prints."""
    ours = ("JAX_", "XLA_", "COLUMNS")  # pytest-xdist tells the width of the terminal
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "RAY_ADDRESS": "local"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    # Ray shows, too, what has become of a worker, and what it prints.
    rays = re.compile(r"\((raylet|ranks? .* pid=\d+)\)")
    return "".join(line for line in done.stdout.splitlines(True) if not rays.search(line))


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(p, marks=MARKS.get(p.name, ()))
        for p in PAGES
        if p.name not in ELSEWHERE and "```python" in p.read_text()
    ],
    ids=lambda p: p.name,
)
def test_the_code_of_a_page_prints_what_it_shows(page, tmp_path):
    shown = [text for _, text in BLOCK.findall(page.read_text())]
    assert [s.rstrip() for s in run(page, tmp_path)] == [s.rstrip() for s in shown]


@pytest.mark.more
def test_the_schedule_and_the_model_of_the_tutorial_are_ablated(tmp_path):
    page = (ROOT / "docs" / "ablating.md").read_text()
    ((name, code),) = re.findall(r'^```python title="(.*)"\n(.*?)^```', page, re.M | re.S)
    assert len([line for line in code.splitlines() if line]) < 20
    (tmp_path / name).write_text(code)
    ((python, *arguments),) = (
        shlex.split(c) for c in re.findall(r"^```sh\n(.*?)^```", page, re.M | re.S)
    )
    shown = printed(arguments, tmp_path)
    assert python == "python" and shown.count("mine:Patient(more=2)") == 2
    with open(tmp_path / "outputs" / "ablate_schedules" / "results.csv") as file:
        rows = {row["schedule"]: row for row in csv.DictReader(file)}
    assert [row["peak_memory"] for row in rows.values()] == ["2.0", "2.0", "4.0"]
    assert all(float(row["measured"]) > 0 < float(row["predicted"]) for row in rows.values())


def test_each_page_with_code_is_run():
    with_code = {p.name for p in PAGES if "```python" in p.read_text()}
    assert with_code >= ELSEWHERE
    assert {"README.md", "ablating.md", "inside_a_rank.md", "worker_processes.md"} <= with_code


def test_each_public_name_is_on_a_page_of_the_reference():
    shown = re.findall(r"^::: ([\w.]+)", "".join(p.read_text() for p in API), re.M)
    names = {path.rpartition(".")[2] for path in shown}
    catalogue = {getattr(make, "func", make) for make in CATALOGUE.values()}
    assert public(jaxpp) - names == {"extend", "precision", "schedules", "TYPE_CHECKING"}
    assert public(jaxpp.extend) <= names
    assert public(jaxpp.schedules) - names == {schedule.__name__ for schedule in catalogue}


def test_the_papers_of_the_schedules_can_be_cited():
    cited = (ROOT / "docs" / "references.bib").read_text()
    sources = "".join(p.read_text() for p in (ROOT / "jaxpp" / "schedules").glob("**/_*.py"))
    papers = set(re.findall(r"arXiv\s+(\d{4}\.\d{5})", sources))
    assert papers == set(re.findall(r"eprint += \{(.*)\}", cited))


def test_the_list_of_schedules_has_the_catalogue():
    rows = re.findall(r"^\| `.*", (ROOT / "docs" / "schedules.md").read_text(), re.M)
    listed = set(re.findall(r"`(\w+)`", "".join(rows)))
    kinds = {type(make()).__name__: type(make()) for make in CATALOGUE.values()}
    assert listed == {*CATALOGUE, *kinds}
    for row in rows:
        docstring = kinds[re.findall(r"`(\w+)`", row)[0]].__doc__ or ""
        assert all(paper in docstring for paper in re.findall(r"\d{4}\.\d{5}", row)), row


@pytest.mark.more
@pytest.mark.parametrize(
    "script",
    # `tests/test_papers.py` has the pictures of papers.
    [p for p in sorted((ROOT / "docs").glob("draw_*.py")) if p.stem != "draw_papers"],
    ids=lambda p: p.stem,
)
def test_a_picture_is_what_its_script_draws(script, tmp_path):
    for file in (script, ROOT / "docs" / "drawing.py", ROOT / "docs" / "trace.csv"):
        shutil.copy(file, tmp_path)
    printed([tmp_path / script.name], tmp_path)
    pictures = [p for p in tmp_path.iterdir() if p.suffix in (".svg", ".png")]
    assert pictures and all(p.stat().st_size < 200_000 for p in pictures)
    pages = "".join(page.read_text() for page in PAGES)
    for picture in pictures:
        assert picture.read_bytes() == (ROOT / "docs" / picture.name).read_bytes(), picture.name
        assert f"{picture.name})" in pages, f"no page shows {picture.name}"


@pytest.mark.more
def test_the_picture_of_the_readme_is_what_its_code_draws(tmp_path):
    codes = [code for code, _ in BLOCK.findall((ROOT / "README.md").read_text())]
    (code,) = (code for code in codes if "schedules.png" in code)
    (tmp_path / "script.py").write_text(code)
    printed(["script.py"], tmp_path)
    drawn = tmp_path / "schedules.png"
    assert drawn.read_bytes() == (ROOT / "docs" / "schedules.png").read_bytes()


def test_help_begins_with_what_a_user_types():
    said = pydoc.plain(pydoc.render_doc(jaxpp)).partition("DESCRIPTION")[2]
    words = re.findall(r"^ +(\w+)\(.*\): ", said, re.M)
    order = ["split_stages", "wrap_forward", "microbatch", "schedule", "place", "MpmdMesh"]
    assert words[: len(order)] == order


def test_the_site_shows_the_values_of_defaults():
    pytest.importorskip("griffe")
    default_of = runpy.run_path(str(ROOT / "docs" / "hooks" / "docstrings.py"))["default_of"]
    fun = "jaxpp.transforms.microbatch._microbatch.microbatch"
    assert default_of(fun, "reduce", "_BY_DEFAULT") == "'mean'"
    assert default_of(fun, "replicas", "1") == "1"
    assert default_of("jaxpp.schedules._costs.Costs", "forward", "Kind.F.cost") == "1.0"
    assert default_of("jaxpp.schedules._costs.Costs", "other", "x()") == "x()"


def test_every_picture_of_the_site_follows_a_dark_page_and_fits_a_narrow_one():
    style = (ROOT / "docs" / "site.css").read_text()
    (dark,) = re.findall(r"((?:[^{}]*slate[^{}]*))\{[^{}]*invert[^{}]*\}", style)
    assert '.md-typeset img:is([src$=".svg"], [src$=".png"])' in dark
    assert dark.count(".jp-OutputArea-output > ") == 2  # what a notebook draws
    narrow = style[style.index("@media") :]
    assert narrow.count("overflow-x: auto") == 2 and ".jp-OutputArea-output > svg" in narrow


NOTEBOOKS = sorted((ROOT / "docs").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_keeps_no_outputs_and_is_on_the_site(path):
    """The site runs it each time that it is built, and an error there is an error of the build."""
    cells = json.loads(path.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code and not any(c["outputs"] or c["execution_count"] for c in code)
    assert f" {path.name}\n" in (ROOT / "mkdocs.yml").read_text()
    assert f"docs/{path.name})" in (ROOT / "README.md").read_text()
    assert len(NOTEBOOKS) >= 4


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    links = re.findall(r"\]\(([^)#:]+)(#[^)]*)?\)", text)
    assert all((page.parent / target).exists() for target, _ in links), links


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda p: p.name)
def test_the_files_and_scripts_that_a_page_names_exist(page):
    text = re.sub(r"\]\(.*?\)", "", page.read_text())
    modules = re.findall(r"((?:benchmarks|examples|experiments|tests)(?:\.\w+)+)", text)
    files = [f"{module.replace('.', '/')}.py" for module in modules]
    files += re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", text)
    for file in files:
        places = [top / file for top in (ROOT, ROOT / "jaxpp", page.parent)]
        packages = [place.with_suffix("") / "__main__.py" for place in places]
        assert any(place.exists() for place in (*places, *packages)), file


def test_a_wrong_output_would_be_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1 + 1)\n```\n\nIt prints:\n\n```text\n3\n```\n")
    ((_, shown),) = BLOCK.findall(page.read_text())
    assert shown == "3\n"
    assert run(page, tmp_path) == ["2\n"]
