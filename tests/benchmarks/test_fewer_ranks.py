"""A training that loses a rank goes on with one rank fewer, as a fresh run there would."""

import numpy as np
import pytest

from tests.scripts import load_script


@pytest.fixture
def script(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "local")
    return load_script("benchmarks.fewer_ranks")


@pytest.mark.slow
def test_a_training_goes_on_with_fewer_ranks_to_the_bit(script, capsys):
    script.main(steps=8, lost_after=5, checkpoint_every=2)
    shown = capsys.readouterr().out
    assert "rank 2 is lost: rank 2" in shown
    assert "go on from the checkpoint of step 4:\nstep  5 on 2 ranks" in shown
    assert "4 losses and 73 arrays are the same to the bit" in shown


def test_two_runs_that_differ_by_a_bit_are_told_apart(script, monkeypatch):
    state = [np.float32(1.0)]
    monkeypatch.setattr(script.module, "train_until_lost", lambda _: None)
    monkeypatch.setattr(script.module, "go_on", lambda _: ([0.5], state))
    monkeypatch.setattr(script.module, "fresh_run", lambda _: ([0.5], state))
    script.main()
    other = [np.nextafter(np.float32(1.0), np.float32(2.0))]
    monkeypatch.setattr(script.module, "fresh_run", lambda _: ([0.5], other))
    with pytest.raises(AssertionError):
        script.main()
