"""The papers: their figures hold or say why not, their pages are what the script writes."""

import dataclasses
import importlib.util
import pathlib

import matplotlib.image
import numpy as np
import pytest

from experiments.papers import chimera, laboratory
from experiments.papers.pipeoffload import GISH
from jaxpp.schedules import OneFOneB, check
from tests.scripts import load_script

ROOT = pathlib.Path(__file__).parents[1]
PAGES = ROOT / "docs" / "papers"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("draw_papers", ROOT / "docs" / "draw_papers.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.more
def test_the_pages_are_what_the_script_writes(script):
    assert (PAGES / "index.md").read_text() == script.index()
    for name in laboratory.NAMES:
        assert (PAGES / f"{name}.md").read_text() == script.page(name), name


def test_each_paper_is_one_file_a_page_and_a_picture_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    names = {path.stem for path in PAGES.parents[1].joinpath("experiments/papers").glob("*.py")}
    assert names - {"__init__", "__main__", "laboratory"} == set(laboratory.NAMES)
    for name in laboratory.NAMES:
        assert f"papers/{name}.md" in navigation
        assert (PAGES / f"{name}.png").exists()
        file = ROOT / "experiments" / "papers" / f"{name}.py"
        assert len(file.read_text().splitlines()) < 200
        assert laboratory.load(name).arxiv in laboratory.about(name)[1]


def test_a_figure_that_differs_has_a_reason_and_no_other():
    for name in laboratory.NAMES:
        rows = laboratory.figures(name)
        assert len({row.what for row in rows}) == len(rows) > 4, name
        for row in rows:
            assert bool(row.why) == (row.shown[-1] != "0"), (name, row)
            assert not row.why or row.why.endswith("."), row.why
        assert (laboratory.load(name).differs == "nothing") == (not any(row.why for row in rows))


def test_a_difference_is_that_of_what_is_shown():
    row = laboratory.Row("bubble", "section 2", paper=0.42, ours=0.3333333, digits=2)
    assert row.shown == ("0.42", "0.33", "-0.09")
    assert dataclasses.replace(row, ours=0.4199).shown[-1] == "0"


def test_another_schedule_has_other_figures(monkeypatch):
    monkeypatch.setattr(chimera, "Chimera", OneFOneB)
    wrong = [row.what for row in chimera.rows() if row.shown[-1] != "0"]
    assert len(wrong) == 7 and not any("DAPPLE" in what for what in wrong)


def test_gis_h_refuses_what_its_groups_do_not_divide():
    check(GISH(2, 2).table_for_ranks(4, 8))
    for group, microbatches in ((1, 8), (5, 10), (3, 8)):
        with pytest.raises(ValueError, match=f"groups of {group} "):
            GISH(2, group).table_for_ranks(4, microbatches)


@pytest.mark.more
def test_the_pictures_are_what_the_script_draws(script, tmp_path):
    for name in laboratory.NAMES:
        laboratory.draw(laboratory.load(name), tmp_path / f"{name}.png")
        drawn, kept = (
            matplotlib.image.imread(folder / f"{name}.png") for folder in (tmp_path, PAGES)
        )
        assert drawn.shape == kept.shape, name
        # Another version of matplotlib smooths edges otherwise.
        assert np.abs(drawn - kept).mean() < 0.01, name
    again = tmp_path / "again.png"
    laboratory.draw(laboratory.load("gpipe"), again)
    assert again.read_bytes() == (tmp_path / "gpipe.png").read_bytes()


@pytest.mark.more
def test_small_steps_have_the_values_of_the_plain_function():
    for name in laboratory.NAMES:
        paper = laboratory.load(name)
        assert paper.small, name
        laboratory.place(paper)


@pytest.mark.more
def test_another_function_would_be_seen():
    paper = laboratory.load("gpipe")

    def model(*sizes):
        staged, loss, weights, batch = laboratory.perceptron(*sizes)
        return staged, lambda weights, x: 1.01 * loss(weights, x), weights, batch

    with pytest.raises(AssertionError):
        laboratory.place(dataclasses.replace(paper, model=model, small=paper.small[:1]))


@pytest.mark.more
def test_a_paper_is_printed_drawn_and_placed(tmp_path, capsys):
    script = load_script("experiments.papers.__main__")
    script.main(output=str(tmp_path))
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(
        laboratory.NAMES
    )
    script.main(paper=["chimera"], output=str(tmp_path))
    shown = capsys.readouterr().out
    assert "bubble ratio, D=8, N=32" in shown and "Chimera, placed on 2 ranks" in shown
    assert (tmp_path / "chimera.png").exists()
    with pytest.raises(SystemExit, match="--paper=chimaera is none of gpipe, "):
        script.main(paper=["chimaera"])
