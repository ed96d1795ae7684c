"""Writes what passes change, for a reader."""

import difflib
from collections.abc import Mapping


def changes(texts: Mapping[str, str]) -> str:
    """Writes the first of some texts, and of each further one the lines that changed.

    Args:
        texts: the text after each pass, by the pass's name.
    """
    (first, *lines), *rest = ([name, *text.splitlines()] for name, text in texts.items())
    said = [f"==== {first}", *lines]
    for name, *text in rest:
        # Without the names of files, and the numbers of lines, of a diff.
        said += [f"==== {name}", *[*difflib.unified_diff(lines, text, n=0, lineterm="")][2:]]
        lines = text
    return "\n".join(line for line in said if not line.startswith("@@"))
