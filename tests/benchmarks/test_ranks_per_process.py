"""Ranks that share a process give the bits of a local mesh, and a bit that differs is told."""

import numpy as np
import pytest

from tests.scripts import load_script


@pytest.fixture
def script(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "local")
    return load_script("benchmarks.ranks_per_process")


@pytest.mark.slow
def test_any_ranks_in_a_process_and_all_features_give_the_same_bits(script, capsys):
    script.main(schedules=["dualpipe"], per_process=["2", "4"], blocks=1, steps=1)
    shown = capsys.readouterr().out
    assert "dualpipe: the same bits; 2 a process 1.00, 4 a process" in shown
    assert "4 a process, a checkpoint: the same bits" in shown
    assert "4 a process, replicas: the same bits" in shown


def test_a_bit_that_differs_is_an_error(script):
    one = [np.float32(1.0)]
    script.module.check_same(one, [np.float32(1.0)])
    with pytest.raises(AssertionError):
        script.module.check_same(one, [np.nextafter(np.float32(1.0), np.float32(2.0))])
