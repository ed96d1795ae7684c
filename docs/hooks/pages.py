"""Makes the pages of the site that are told elsewhere, such as the README and the changelog."""

import pathlib
from typing import Any

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

import jaxpp

_ROOT = pathlib.Path(__file__).parents[2]
#: What links to the citation file, and to its page.
_CITATION = "(CITATION.cff)", "(citation.md)"
_CITED = """\
# Citation

{message}

```bibtex
@software{{jaxpp,
  title = {{{title}}},
  author = {{{authors}}},
  version = {{{version}}},
  license = {{{license}}},
}}
```

The page of each [schedule](schedules.md) has the BibTeX of the paper that it is from. Please cite
that paper, too.
"""


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the pages to those of `docs/`."""
    pages = {
        "index.md": (_ROOT / "README.md").read_text().replace("(docs/", "(").replace(*_CITATION),
        "changelog.md": (_ROOT / "CHANGELOG.md").read_text(),
        "citation.md": citation(yaml.safe_load((_ROOT / "CITATION.cff").read_text())),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))


@event_priority(50)  # before mkdocstrings writes the file
def on_env(env: Any, config: MkDocsConfig, **kwargs: Any) -> None:
    """Puts names into `objects.inv` that a folder of the same name hides from mkdocstrings."""
    inventory: Any = config.plugins["mkdocstrings"]
    for name in ("microbatch", "place"):
        uri = f"api/transforms/#jaxpp.transforms.{name}.{name}"
        known = inventory.handlers.inventory
        known.register(name=f"jaxpp.{name}", domain="py", role="function", uri=uri)


def citation(fields: dict[str, Any]) -> str:
    """Makes a page of the fields of the citation file."""
    authors = " and ".join(f"{{{author['name']}}}" for author in fields["authors"])
    return _CITED.format(**fields | {"authors": authors, "version": jaxpp.__version__})
