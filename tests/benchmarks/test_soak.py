"""The soak tells what has grown, and the meshes keep to what they held."""

import os
import types

import pytest

from tests.scripts import load_script


@pytest.fixture
def script(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "local")
    script = load_script("benchmarks.soak")
    monkeypatch.setattr(script.module.jax.config, "update", lambda *_: None)  # conftest.py did
    script.flags.mark_as_parsed()
    return script


@pytest.mark.parametrize(
    "more", [dict(mib=99.0), dict(threads=4), dict(files=4)], ids=lambda more: next(iter(more))
)
def test_what_grows_is_told(script, monkeypatch, more):
    held = {"mib": 100.0, "threads": 10, "files": 5}
    grown = {name: held[name] + more.get(name, 0) for name in held}

    made = script.module.Held

    def by(number):
        return made(**(grown if number >= 10 else held))

    now = types.SimpleNamespace(number=0)
    monkeypatch.setattr(script.module, "Held", types.SimpleNamespace(by=lambda _: by(now.number)))

    def one(number):
        now.number = number + 1

    assert len(script.module.soak(None, "steps", one, 10, 0.2, mib=0.1)) == 1
    now.number = 0
    assert not script.module.soak(None, "steps", lambda _: None, 10, 0.2, mib=0.1)


def test_a_process_is_measured(script):
    held = script.module.Held.by(os.getpid())
    assert held.mib > 10 and held.threads >= 1 and held.files >= 3


@pytest.mark.slow
def test_a_short_soak_finds_nothing(script, capsys):
    script.main(steps=200, functions=10)
    shown = capsys.readouterr().out
    assert shown.count("rank 1") == 6 and "Nothing has grown." in shown
