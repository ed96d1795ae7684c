"""Makes the pages of the site that are told elsewhere: the README, the changelog, the glossary."""

import pathlib
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import jaxpp

_ROOT = pathlib.Path(__file__).parents[2]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the pages to those of `docs/`."""
    pages = {
        "index.md": (_ROOT / "README.md").read_text().replace("(docs/", "("),
        "changelog.md": (_ROOT / "CHANGELOG.md").read_text(),
        "glossary.md": glossary(jaxpp.__doc__ or ""),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))


def glossary(words: str) -> str:
    """Makes a table of the words that the docstring of the package explains."""
    rows = re.findall(r"^    (\S[^:\n]*): (.*(?:\n {8}.*)*)", words, re.M)
    lines = [f"| {word} | {' '.join(meaning.split())} |" for word, meaning in rows]
    return "\n".join(["# Glossary", "", "| word | meaning |", "| --- | --- |", *lines, ""])
