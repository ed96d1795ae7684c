"""The duel reads its own files, prints a row for each case, and keeps each plan."""

import re

from jaxpp.planning.search import LayersPlan
from tests.scripts import load_script


def test_the_duel_runs_on_its_own_files(tmp_path, capsys):
    duel = load_script("experiments.plan_duel")
    duel.main(tries=40, evaluations=20, memory=True, out=str(tmp_path))
    rows = capsys.readouterr().out.splitlines()
    assert [row[:40].strip() for row in rows[1:-1]] == [
        "made-up 4x8", "made-up 4x8 1f1b", "made-up 4x16", "made-up", "made-up at its memory",
    ]  # fmt: skip
    assert rows[-1] == "0 above the figure to beat"
    for row in rows[1:-1]:
        plan, bound = re.findall(r"(\d+\.?\d*)[* ] +(\d+\.?\d*) +\d", row)[0]
        assert float(plan) >= float(bound) > 0
    for path in sorted(tmp_path.glob("*.json")):
        plan = LayersPlan.load(path)
        plan.check()
        assert path.with_suffix(".png").exists()
        assert str(plan) in path.with_suffix(".txt").read_text()
    assert len(list(tmp_path.glob("*.json"))) == 3


def test_a_figure_that_is_not_reached_has_a_star():
    row = load_script("experiments.plan_duel").module.Row
    assert "*" in str(row("a case", 10.0, "published", 10.1, 9.0, 0.1))
    assert "*" not in str(row("a case", 10.0, "published", 10.0, 9.0, 0.1))
