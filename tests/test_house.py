"""How the package is laid out: who imports whom, what is exported, what is documented."""

import ast
import functools
import graphlib
import inspect
import pathlib
import re

import pytest

import jaxpp

ROOT = pathlib.Path(jaxpp.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
#: Reads a source file, each once.
parsed = functools.cache(ast.parse)
GROUND = ("_compat", "_program", "_specs", "jaxprs")


def name_of(path):
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


def found_in(check, paths=FILES):
    """What a check finds in files, by their names."""
    return {name_of(p): found for p in paths if (found := check(p))}


def imports(tree):
    """The names of the modules that a file imports, as far as one can tell without running it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_within(name, package):
    return name == package or name.startswith(package + ".")


# ---- private names ------------------------------------------------------------------------------


def private_names(source):
    """Private names of JAX and its like that a source file uses."""
    tree = parsed(source)
    found = [
        name
        for name in imports(tree)
        if re.match(r"(jax|jaxlib|equinox|jaxtyping|optax)(\.|$)", name)
        and any(part.startswith("_") for part in name.split("."))
    ]
    found += [name for name in imports(tree) if is_within(name, "jaxlib")]
    aliases = {
        alias.asname or alias.name.split(".")[0 if isinstance(node, ast.Import) else -1]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).split(".")[0] in ("jax", "equinox")
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match("_(?!_)", node.attr):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in aliases:
                found.append(ast.unparse(node))
    found += re.findall(r"""import_module\(["']jax(?!pp)[\w.]*\._\w+""", source)
    return found


def test_only_compat_uses_private_names():
    folders = ("benchmarks", "examples", "experiments")
    scripts = [path for name in folders for path in (ROOT.parent / name).rglob("*.py")]
    found = found_in(lambda p: private_names(p.read_text()), [*FILES, *scripts])
    assert set(found) == {"jaxpp._compat"}


@pytest.mark.parametrize(
    "source",
    [
        "import jax._src.core",
        "from jax._src import core",
        "from jax._src.core import Jaxpr",
        "import jax\njax._src.core.Jaxpr",
        "from jax.experimental import serialize_executable as s\ns._JaxPjrtUnpickler",
        "import jax.extend.core as jex\njex._private",
        "from jaxlib import xla_client",
        "from equinox._module import Module",
    ],
)
def test_a_private_name_would_be_found(source):
    assert private_names(source)


def test_versions_are_tested_in_compat_only():
    pattern = re.compile(r"jax(lib)?\.__version|version_info|packaging")
    tests = [p.name for p in FILES if pattern.search(p.read_text()) and p.name != "_compat.py"]
    assert tests == []


# ---- imports run one way ------------------------------------------------------------------------

FORBIDDEN = {
    "ground": ["jaxpp.transforms", "jaxpp.runtime", "jaxpp.planning"],
    "jaxprs": ["jaxpp.transforms", "jaxpp.runtime", "jaxpp.planning"],
    "schedules": ["jax", "jaxlib", "equinox", "jaxpp.transforms", "jaxpp.runtime", "jaxpp.planning",
                  *(f"jaxpp.{name}" for name in GROUND)],
    "transforms": ["jaxpp.runtime", "jaxpp.planning", "jaxpp.certification", "ray"],
    "certification": ["jaxpp.runtime", "jaxpp.planning", "jaxpp.jaxprs.primitives", "ray"],
    "runtime": ["jaxpp.planning", "jaxpp.certification"],
    "planning": ["jaxpp.certification", "ray"],
}  # fmt: skip


def layer_of(path):
    parts = path.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else "ground" if path.stem in GROUND else None


def wrong_imports(layer, source):
    return [
        name
        for name in imports(parsed(source))
        if any(is_within(name, f) for f in FORBIDDEN[layer])
    ]


def test_imports_run_one_way():
    layered = [p for p in FILES if layer_of(p)]
    assert not found_in(lambda p: wrong_imports(layer_of(p), p.read_text()), layered)


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("schedules", "import jax.numpy as jnp"),
        ("schedules", "def f():\n    from jaxpp import jaxprs"),
        ("transforms", "from jaxpp.runtime import MpmdMesh"),
        ("transforms", "from jaxpp import runtime"),
        ("runtime", "from jaxpp.planning import measure"),
        ("ground", "from jaxpp.transforms import _marks"),
    ],
)
def test_a_wrong_import_would_be_found(layer, source):
    assert wrong_imports(layer, source)


#: What the certificate may take of jaxprs: tracing, reading, contexts; no rule, no pass.
READING = {
    "Aval", "Eqn", "Literal", "Traced", "by_definition", "describe_function", "is_array",
    "is_literal", "opened", "run", "sub_jaxprs", "trace", "without_collections", "without_mesh",
}  # fmt: skip


def taken_of_jaxprs(source):
    """The names of the room of jaxprs that a file uses."""
    tree = parsed(source)
    found = {
        name.removeprefix("jaxpp.jaxprs.") for name in imports(tree) if "jaxpp.jaxprs." in name
    }
    return found | {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "jaxprs"
    }


def test_the_certificate_shares_no_rule_with_what_it_checks():
    files = [p for p in FILES if layer_of(p) == "certification"]
    assert not found_in(lambda p: taken_of_jaxprs(p.read_text()) - READING, files)


@pytest.mark.parametrize(
    "source", ["from jaxpp.jaxprs import primitives", "jaxprs.inline(x)", "jaxprs.structure"]
)
def test_a_shared_rule_would_be_found(source):
    assert taken_of_jaxprs(source) - READING


def test_every_folder_is_a_known_layer():
    assert {layer_of(p) for p in FILES if len(p.relative_to(ROOT).parts) > 1} == set(FORBIDDEN) - {
        "ground"
    }


# ---- rooms ---------------------------------------------------------------------------------------

FACES = [name_of(p) for p in FILES if p.name == "__init__.py"]
ROOMS = [
    name
    for name in FACES
    if re.match(r"jaxpp\.(jaxprs$|transforms\.|runtime\.|planning$|certification$)", name)
]  # those of the schedules are not there yet


def past_a_face(module, source):
    """The imports of a module that reach past the face of a room that it is not in."""
    return [
        name
        for name in imports(parsed(source))
        for room in ROOMS
        if name.startswith(f"{room}._") and not is_within(module, room)
    ]


def test_nothing_imports_past_the_face_of_a_room():
    assert not found_in(lambda p: past_a_face(name_of(p), p.read_text()))


def test_an_import_past_a_face_would_be_found():
    past = "from jaxpp.transforms.inside import _assign, assign"
    assert past_a_face("jaxpp.transforms.graph._lower", past) == ["jaxpp.transforms.inside._assign"]
    past = "from jaxpp.runtime.remote._line import Line"
    assert past_a_face("jaxpp.runtime.local._mesh", past)
    assert past_a_face("jaxpp.runtime", past)
    assert not past_a_face("jaxpp.runtime.remote._channel", past)


#: The rooms of a folder, each below those that may import it.
FLOORS = {
    "jaxpp.transforms": (
        "stacked", "stages", "microbatch", "tasks", "inside", "graph", "initialize", "place",
    ),
    "jaxpp.runtime": (
        "arrays", "executor", "transport", "trace", "local", "site",
        "remote", "launched", "checkpoint",
    ),
}  # fmt: skip


def upward(folder, module, source):
    """The imports of a module of a room that are of a room above it in the folder."""
    floors = FLOORS[folder]
    own = floors.index(module.removeprefix(folder + ".").split(".")[0])
    return [
        name
        for name in imports(parsed(source))
        if any(is_within(name, f"{folder}.{other}") for other in floors[own + 1 :])
    ]


@pytest.mark.parametrize("folder", FLOORS)
def test_every_room_has_a_floor(folder):
    below = [name.removeprefix(folder + ".") for name in ROOMS if name.startswith(folder + ".")]
    assert set(FLOORS[folder]) == {name.split(".")[0] for name in below}


@pytest.mark.parametrize("folder", FLOORS)
def test_rooms_import_what_is_below_them(folder):
    rooms = tuple(f"{folder}.{room}" for room in FLOORS[folder])
    inside = [p for p in FILES if any(is_within(name_of(p), room) for room in rooms)]
    assert inside
    assert not found_in(lambda p: upward(folder, name_of(p), p.read_text()), inside)


def test_an_import_of_a_room_above_would_be_found():
    up = "from jaxpp.transforms.tasks import is_loop"
    assert upward("jaxpp.transforms", "jaxpp.transforms.stages._cuts", up)
    down = "from jaxpp.transforms.stages import is_enter"
    assert not upward("jaxpp.transforms", "jaxpp.transforms.tasks._loop", down)
    up = "from jaxpp.runtime.remote import RemoteMpmdMesh"
    assert upward("jaxpp.runtime", "jaxpp.runtime.executor._line", up)
    assert upward("jaxpp.runtime", "jaxpp.runtime.transport._socket", up)


def circle(sources):
    """A circle of the imports of some modules, the text of each by its name; or none.

    An import for types alone does not count.
    """
    graph = {module: set() for module in sources}
    for module, source in sources.items():
        body = [n for n in parsed(source).body if not ast.unparse(n).startswith("if TYPE_")]
        for name in imports(ast.Module(body, [])):
            imported = name if name in sources else name.rpartition(".")[0]
            if imported in sources and imported != module:
                graph[module].add(imported)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]


def test_modules_import_each_other_without_a_circle():
    assert not circle({name_of(p): p.read_text() for p in FILES})


def test_a_circle_would_be_found():
    first, second = "from a import b", "def f():\n    from a.c import g"
    assert circle({"a.c": first, "a.b": second})
    assert not circle({"a.c": first, "a.b": ""})


# ---- exports ------------------------------------------------------------------------------------


#: What imports names when a program first asks for one, and tells a type checker of them.
LATE_NAMES = (
    "if TYPE_CHECKING:\n    from jaxpp._names import *\n"
    "else:\n    from jaxpp._spellings import __getattr__ as __getattr__"
)


def other_than_exports(source):
    return [
        ast.unparse(node)
        for i, node in enumerate(parsed(source).body)
        if not (i == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        and not (
            isinstance(node, ast.ImportFrom)
            and len(node.names) == 1
            and node.names[0].name == node.names[0].asname
        )
        and ast.unparse(node) != LATE_NAMES
    ]


def test_packages_hold_exports_only():
    packages = [p for p in FILES if p.name == "__init__.py" or p == ROOT / "_names.py"]
    assert not found_in(lambda p: other_than_exports(p.read_text()), packages)


@pytest.mark.parametrize(
    "source", ["import jax", "from a import b", "from a import b as c", "x = 1"]
)
def test_something_else_would_be_found(source):
    assert other_than_exports(source)


def test_modules_are_private_but_for_those_that_users_import():
    public = [p.stem for p in FILES if not p.stem.startswith("_")]
    assert set(public) <= {"testing", "building_blocks", "precision", "extend", "primitives"}


# ---- documentation ------------------------------------------------------------------------------


def public_names():
    """The functions and classes that users type."""
    found = [(f"jaxpp.{name}", getattr(jaxpp, name)) for name in dir(jaxpp)]
    found += [(f"jaxpp.schedules.{name}", value) for name, value in vars(jaxpp.schedules).items()]
    found += [(f"jaxpp.extend.{name}", value) for name, value in vars(jaxpp.extend).items()]
    found += [
        (f"{module.__name__}.{name}", value)
        for module in (jaxpp.precision, jaxpp.testing)
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__
    ]
    return {
        name: value
        for name, value in found
        if (inspect.isfunction(value) or inspect.isclass(value))
        and not name.split(".")[-1].startswith("_")
    }


def test_public_names_are_documented_with_an_example():
    for name, value in public_names().items():
        doc = inspect.getdoc(value) or ""
        assert doc.split("\n")[0].endswith((".", ":")), f"the first line of {name} is a sentence"
        if not (isinstance(value, type) and issubclass(value, Exception)):
            assert ">>> " in doc, name


def test_what_a_user_types_is_exported():
    for name in (
        "pipeline_enter_stage", "split_stages", "wrap_forward", "microbatch", "schedule", "place",
        "Operator", "MpmdMesh", "schedules",
    ):  # fmt: skip
        assert hasattr(jaxpp, name)


def test_every_module_says_what_it_is():
    modules = [p for p in FILES if p.name != "__init__.py"]
    assert not found_in(lambda p: not ast.get_docstring(parsed(p.read_text())), modules)
