"""Makes Markdown of docstrings: examples become blocks of code, sources become links."""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^(?P<margin>[ ]*)>>> .*(?:\n(?P=margin)\S.*|\n(?P=margin)[ ]+\S.*)*", re.M)
_ARXIV = re.compile(r"arXiv\s+(\d{4}\.\d{5})")
_SITE = re.compile(r"\b((?:github|hackmd)\.(?:com|io)/[\w@./-]*\w)")


def linked(text: str) -> str:
    """Makes links of the sources that a docstring names."""
    text = _ARXIV.sub(r"[arXiv \1](https://arxiv.org/abs/\1)", text)
    return _SITE.sub(r"[\1](https://\1)", text)


def as_markdown(docstring: str) -> str:
    """Fences the examples of a docstring, and links its sources."""

    def fence(found: re.Match[str]) -> str:
        margin = found["margin"]
        return f"{margin}```pycon\n{found[0]}\n{margin}```"

    return _EXAMPLE.sub(fence, linked(docstring))


class Docstrings(griffe.Extension):
    """Rewrites each docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrites the docstring of an object."""
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
