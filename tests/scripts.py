"""Runs scripts that read flags, in the tests' process."""

import contextlib
import dataclasses
import functools
import importlib
import sys
from typing import Any

import pytest
from absl import flags
from absl.testing import flagsaver


@dataclasses.dataclass(frozen=True)
class Script:
    """A script whose flags are its own: the names of flags of several scripts are the same."""

    module: Any
    flags: flags.FlagValues

    def main(self, **values):
        """Runs it with some flags."""
        self.flags.mark_as_parsed()
        with self._restored():
            for name, value in values.items():
                self.flags[name].value = value
            self.module.main([])

    def rest_of(self, arguments):
        """Reads the flags of a command line, and returns what is none of them."""
        with self._restored():
            return self.flags([self.module.__name__, *arguments])[1:]

    @contextlib.contextmanager
    def _restored(self):
        saved = flagsaver.save_flag_values(self.flags)
        try:
            yield
        finally:
            flagsaver.restore_flag_values(saved, self.flags)


@functools.cache
def load_script(name: str) -> Script:
    """Imports a script, as `experiments.train_lm`."""
    own = flags.FlagValues()
    with pytest.MonkeyPatch.context() as patch:
        for define in [n for n in dir(flags) if n.startswith("DEFINE_")]:
            original = getattr(flags, define)
            patch.setattr(flags, define, functools.partial(original, flag_values=own))
        sys.modules.pop(name, None)  # another script may have imported it, with flags among its own
        return Script(importlib.import_module(name), own)
