"""The schedules are pure Python: they can be studied where JAX is not installed."""

import subprocess
import sys
from pathlib import Path

import jaxpp.schedules


def test_the_schedules_do_not_import_jax():
    # Imported apart from the top level of jaxpp, which does import JAX.
    folder = Path(jaxpp.schedules.__file__).parent
    program = f"""
import importlib.util, sys, types
sys.modules["jaxpp"] = types.ModuleType("jaxpp")
sys.modules["jaxpp"].__path__ = [{str(folder.parent)!r}]
import jaxpp.schedules
print([name for name in ("jax", "numpy", "matplotlib") if name in sys.modules])
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"
