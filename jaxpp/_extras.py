"""Checks for what an extra installs; an error names the extra that is missing."""

import importlib.util


def need(extra: str, purpose: str, *modules: str) -> None:
    """Checks that what an extra installs is there, without importing it.

    Args:
        extra: the extra of this package that installs the modules.
        purpose: what needs them, for the error.
        modules: names of top-level modules.

    Raises:
        ModuleNotFoundError: if one of them is not installed.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f"{purpose} needs {' and '.join(missing)}, not installed here; install the extra "
            f"`{extra}`: pip install 'jaxpp[{extra}]'.",
            name=missing[0],
        )
