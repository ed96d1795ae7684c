"""What is installed: the version, the requirements, and errors where an extra is missing."""

import ast
import configparser
import importlib
import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig

import jax.numpy as jnp
import pytest
from packaging.requirements import Requirement

import jaxpp
from jaxpp import schedules

ROOT = pathlib.Path(__file__).parents[1]
#: The modules of distributions that have another name than their module.
MODULES = {"absl-py": "absl", "dm-haiku": "haiku", "orbax-checkpoint": "orbax"}
#: Required, and not imported by the package itself.
FOR_OTHERS = {
    "absl",  # the flags of the scripts that users copy
    "chex",  # the assertions of the tests that users copy
}
#: Imported where it is installed, and done without elsewhere.
WELCOME = {"tqdm"}  # a bar while a step compiles


def requirements():
    """Each list of requirements in setup.cfg, by its name."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lists = dict(setup["options.extras_require"])
    lists["core"] = setup["options"]["install_requires"]
    return {name: [*map(Requirement, text.split())] for name, text in lists.items()}


def required():
    """The modules that each list of requirements installs."""
    return {
        name: {MODULES.get(one.name, one.name) for one in found}
        for name, found in requirements().items()
    }


def imported(folder):
    """The top-level modules that the files of a folder import, but for types alone."""
    found = set()
    for path in (ROOT / folder).rglob("*.py"):
        tree = ast.parse(path.read_text())
        tree.body = [node for node in tree.body if not ast.unparse(node).startswith("if TYPE_")]
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"jaxpp"}


def test_there_is_one_version():
    assert jaxpp.__version__ == importlib.metadata.version("jaxpp")
    newest = re.search(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest and jaxpp.__version__ == newest[1]


@pytest.mark.more
def test_the_package_requires_what_it_imports():
    lists = required()
    assert lists["core"] - imported("jaxpp") == FOR_OTHERS
    optional = imported("jaxpp") - lists["core"]
    assert optional == lists["plot"] | lists["checkpoint"] | lists["exact"] | WELCOME


def test_scripts_need_what_their_extra_has():
    lists = required()
    scripts = imported("experiments") | imported("benchmarks")
    torch = {"torch"}  # which one script compares with
    assert scripts - lists["core"] - {"benchmarks", "experiments"} <= lists["experiments"] | torch
    assert lists["experiments"] <= scripts | lists["checkpoint"]


def test_the_readme_has_each_extra_and_runs_the_tests():
    readme = (ROOT / "README.md").read_text()
    (table,) = re.findall(r"^\| extra .*\n\| --- .*\n((?:\|.*\n)+)", readme, re.M)
    listed = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row)[:2]}
    assert set(requirements()) - {"core"} <= listed
    assert 'pip install -e ".[test]"\npytest\n' in readme


def test_the_versions_of_the_dockerfile_are_allowed():
    pins = re.findall(r"^([\w-]+)==(.+)$", (ROOT / "constraints.txt").read_text(), re.M)
    pinned = {name.lower(): version for name, version in pins}
    lists = requirements()
    for one in (*lists["core"], *lists["experiments"]):
        assert one.specifier.contains(pinned[one.name]), one


#: What a user may write, outside of the clone; the call of `step` lacks the batch.
USER = """\
import equinox as eqx
import jax
import jax.numpy as jnp
import jaxpp
from jaxpp.schedules import Costs, OneFOneB, compare


def loss_fn(model: eqx.nn.MLP, batch: jax.Array) -> jax.Array:
    return jnp.mean(jax.vmap(model)(batch) ** 2)


def train_step(model: eqx.nn.MLP, batch: jax.Array) -> tuple[eqx.nn.MLP, jax.Array]:
    staged = jaxpp.wrap_forward(jaxpp.split_stages(loss_fn, num_stages=4))
    grad_fn = jaxpp.microbatch(eqx.filter_value_and_grad(staged), 8, in_axes=(None, 0))
    loss, grads = jaxpp.schedule(grad_fn, OneFOneB())(model, batch)
    return eqx.apply_updates(model, grads), loss


step = jaxpp.place(train_step, jaxpp.MpmdMesh((4,)), donate_argnums=(0,))
model = eqx.nn.MLP(4, 1, width_size=64, depth=7, key=jax.random.key(0))
reveal_type(step(model, jnp.ones((8, 4))))
reveal_type(compare([OneFOneB()], 4, 8, Costs()).timelines)
step(model)
"""


@pytest.mark.more
def test_an_editor_sees_the_package_after_the_install_of_the_readme(tmp_path):
    """Pyright, as editors run it, on a script outside of the clone; `jax` and others are there."""
    pytest.importorskip("pyright")
    install, *_ = re.findall(r"^pip (install .*)$", (ROOT / "README.md").read_text(), re.M)
    assert install == 'install -e ".[experiments]"'
    clone, home = tmp_path / "clone", tmp_path / "home"
    clone.mkdir()
    home.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    shutil.copytree(ROOT / "jaxpp", clone / "jaxpp", ignore=shutil.ignore_patterns("__pycache__"))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def run(*command):
        return subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True)

    assert not run(sys.executable, "-m", "venv", tmp_path / "venv").returncode
    python = tmp_path / "venv" / "bin" / "python"
    installed = run(python, "-m", "pip", "install", "--quiet", "--no-deps", "-e", clone)
    assert not installed.returncode, installed.stderr
    (packages,) = (tmp_path / "venv").glob("lib/*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    (home / "user.py").write_text(USER)
    said = run(sys.executable, "-m", "pyright", "--pythonpath", python, "user.py").stdout
    assert 'Type of "step(model, jnp.ones((8, 4)))" is "tuple[MLP, Array]"' in said, said
    assert (
        'Type of "compare([OneFOneB()], 4, 8, Costs()).timelines" is "dict[str, Timeline]"' in said
    )
    (error,) = (line for line in said.splitlines() if "error:" in line)
    assert (
        f":{len(USER.splitlines())}:" in error and 'Argument missing for parameter "batch"' in error
    )
    seen = run(python, "-c", "import jaxpp; print(jaxpp.__file__)")
    assert seen.stdout.strip() == str(clone / "jaxpp" / "__init__.py")


def draw(_):
    schedules.plot(schedules.simulate(schedules.GPipe().table(2, 2)))


def solve(_):
    costs = schedules.Costs()
    schedules.synthesize(costs, (0, 1, 1, 0), 4, memory_limit=1, evaluations=10, exact=0.1)


def run_a_script(_):
    importlib.reload(importlib.import_module("experiments"))


def save(folder):
    jaxpp.save_state(folder / "7", {"weights": jnp.ones(3)})


def checkpoint(folder):
    jaxpp.save_args({"weights": jnp.ones(3)})


@pytest.mark.parametrize(
    ("extra", "module", "use"),
    [
        ("plot", "matplotlib", draw),
        ("exact", "ortools", solve),
        ("checkpoint", "orbax", save),
        ("checkpoint", "tensorstore", checkpoint),
        ("experiments", "tqdm", run_a_script),
    ],
)
@pytest.mark.cases(5)
def test_the_error_names_the_extra_that_is_missing(monkeypatch, tmp_path, extra, module, use):
    use(tmp_path / "there")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"needs {module}, .* 'jaxpp\[{extra}\]'"):
        use(tmp_path / "missing")


def test_a_python_without_jax_runs_what_torch_is_compared_by():
    code = "import sys; sys.modules['jax'] = None; import benchmarks.empty_pipeline"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
