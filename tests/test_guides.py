"""The pages for users of other systems: what they say is ours exists, by name and by argument."""

import ast
import contextlib
import inspect
import pathlib
import re

import jax
from absl import flags

import jaxpp
from experiments.training.flags import define
from jaxpp.transforms.place import Placed

GUIDES = sorted((pathlib.Path(__file__).parents[1] / "docs").glob("coming_from_*.md"))
#: The functions whose arguments a cell may name without a call, as in `whole=Block`.
TAKEN = (jax.value_and_grad, jaxpp.split_stages, jaxpp.wrap_forward, jaxpp.microbatch, jaxpp.place)


def ours():
    """The code in the second column of each table."""
    rows = [row for path in GUIDES for row in path.read_text().splitlines() if row[:2] == "| "]
    return [code for row in rows for code in re.findall(r"`([^`]+)`", row.split("|")[2])]


def test_the_code_of_the_guide_runs():
    names = {}
    (guide,) = (path for path in GUIDES if path.stem == "coming_from_jaxpp")
    for block in re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL):
        exec(block, names)
    assert names["losses"].shape == (4,) and names["predictions"].shape == (4, 16, 8)


def test_the_names_of_the_guides_are_exported():
    found = {name for name in dir(jaxpp) if not name.startswith("_")}
    found.update(dir(jaxpp.schedules))
    calls = {name for code in ours() for name in re.findall(r"(?<![\w.])([A-Za-z_]\w+)\(", code)}
    elsewhere = {"float", "fun", "loss", "step", "model", "value_and_grad"}
    elsewhere.update(jaxpp.schedules.CATALOGUE)
    assert "accumulate_grads" in calls and calls - elsewhere <= found


def test_the_arguments_of_the_guides_exist():
    known = {name: getattr(jaxpp, name) for name in dir(jaxpp)}
    known |= {**vars(jaxpp.schedules), "initialize": Placed.initialize}
    loose = {name for fun in TAKEN for name in inspect.signature(fun).parameters}
    seen = set()
    for code in ours():
        calls = []
        with contextlib.suppress(SyntaxError):  # such as a flag
            tree = ast.parse(f"f({code})" if re.match(r"\w+=", code) else code)
            calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        for call in calls:
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            given = {keyword.arg for keyword in call.keywords}
            if name in ("f", *known):
                taken = loose if name == "f" else set(inspect.signature(known[name]).parameters)
                assert given <= taken, code
                seen |= {(name, argument) for argument in given}
    assert {("place", "zero1"), ("f", "at"), ("RemoteMpmdMesh", "environment")} <= seen


def test_the_flags_of_the_guides_exist():
    written = [code for code in ours() if code.startswith("--")]
    assert {"--mesh=ray", "--width", "--pp", "--profile"} <= set(written)
    for flag in written:
        values = flags.FlagValues()
        read = define(values)
        assert flag[2:].partition("=")[0] in values, flag
        if "=" in flag:
            values(["train_lm", flag.replace("'", "")])
            read()  # raises where a value is none that there is
