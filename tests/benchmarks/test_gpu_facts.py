"""Where there is no GPU each fact says so; what needs none of its driver is measured here."""

import pytest

from tests.scripts import load_script


@pytest.fixture(scope="module")
def script():
    return load_script("benchmarks.gpu_facts")


def test_without_a_gpu_no_fact_is_measured(script, monkeypatch, capsys):
    monkeypatch.setattr(script.module, "count_gpus", lambda: 0)
    script.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(script.module.GROUPS)
    assert all(line.endswith("not measured: no GPU") for line in lines)


def says():
    yield "one", "1"
    raise RuntimeError("no such thing\nand a long story")


def test_a_fact_that_cannot_be_measured_says_why(script, monkeypatch):
    facts = script.module
    monkeypatch.setattr(facts, "count_gpus", lambda: 1)
    why = [("one", "1"), ("the rest", "not measured: RuntimeError: no such thing")]
    assert facts.ask(facts.Group(says, "")) == why
    late = [("the rest", "not measured: no answer in 0 s")]
    assert facts.ask(facts.Group(says, "", seconds=0.0)) == late
    assert facts.ask(facts.Group(says, "two", gpus=2)) == [
        ("two", "not measured: 2 GPUs needed, 1 there")
    ]


def test_what_any_device_has_is_measured(script):
    facts = script.module
    for measure in (facts.near, facts.staging):
        for what, answer in measure((facts.MIB,)):
            assert "1 MiB" in what and answer.endswith("GB/s")
    found = dict(facts.tasks(width=16))
    assert "run_id" in found["attributes of operations"]
    for name in ("F0", "F1", "B0", "B1"):
        assert found[f"runs of {name} in the profile"].startswith("24 of 24, median")
        assert found[f"runs of {name} by threads that wait"].startswith("24, median")
