"""The examples that `--help` shows: their flags exist, and quick ones run as they are pasted."""

import ast
import pathlib
import shlex
import subprocess
import sys
import types

import pytest
from absl import flags

from experiments.training.flags import define
from tests.scripts import load_script

ROOT = pathlib.Path(__file__).parents[2]


def examples(path):
    """The command lines of a script's docstring, which `--help` prints."""
    shown = (ast.get_docstring(ast.parse(path.read_text())) or "").replace("\\\n", " ")
    return [line.strip() for line in shown.splitlines() if line.startswith("    python -m ")]


SHOWN = {
    path: lines
    for folder in ("experiments", "benchmarks")
    for path in sorted((ROOT / folder).glob("*.py"))
    if (lines := examples(path)) and path.stem != "torch_pipeline"  # it needs torch
}
QUICK = [
    "python -m experiments.ablate_schedules --ranks=2 "
    "--schedules=1f1b,benchmarks.irregular:Irregular",
    "python -m experiments.papers",
    "python -m experiments.plan_duel",
]


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: path.stem)
def test_the_flags_of_an_example_exist(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "my_logger", types.SimpleNamespace(log=print))  # the user's
    for line in SHOWN[path]:
        python, option, module, *arguments = shlex.split(line, comments=True)
        assert (python, option) == ("python", "-m")
        if module == "experiments.train_lm":
            known = flags.FlagValues()
            read = define(known)
            assert known([module, *arguments]) == [module] and read()
        else:
            assert load_script(module).rest_of(arguments) == [], line
        for flag in arguments:
            value = flag.partition("=")[2]
            if value.endswith((".csv", ".json")) and "compare" in flag:
                assert value.startswith("outputs/"), f"{line}: who has {value}?"
            assert "my_module" not in value, f"{line}: nobody has {value}"


@pytest.mark.parametrize("line", QUICK, ids=lambda line: line.split()[2])
def test_an_example_runs_as_it_is_pasted(line, tmp_path):
    shown = [own for lines in SHOWN.values() for own in lines]
    shown += examples(ROOT / "experiments" / "papers" / "__main__.py")
    assert line in shown
    command = [sys.executable, *shlex.split(line)[1:]]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "it/s" not in done.stderr and "%|" not in done.stderr  # nobody watches a bar
