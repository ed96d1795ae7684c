"""The GPT-2 with dropout, weight decay mask and metrics has the losses of one device on a mesh."""

from unittest import mock

import equinox as eqx
import jax
import pytest

from tests.scripts import load_script

TINY = dict(layers=2, width=8, heads=2, sequence_length=8, batch_size=8, microbatches=2, steps=3)


@pytest.fixture(scope="module")
def script():
    return load_script("examples.data_parallel_gpt2")


@pytest.fixture
def run(script, tmp_path, monkeypatch):
    """Runs it in this process, for which conftest.py has made the devices."""
    text = tmp_path / "text"
    text.write_bytes(bytes(i * i % 251 for i in range(4096)))
    monkeypatch.setattr(script.module, "make_devices", lambda: None)
    return lambda **values: script.main(**(TINY | dict(data=str(text)) | values))


@pytest.mark.slow  # tests/test_parallelism.py has the same law of a smaller GPT-2
def test_losses_agree(run, capsys):
    run(zero1=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["step", "one", "device", "2x2x2"]
    assert len(lines) == 1 + TINY["steps"] + 1
    assert len({line.split()[2] for line in lines[1:-1]}) == TINY["steps"]
    assert float(lines[-1].split()[-1]) <= 1e-5


def test_a_difference_is_an_error(script, run, monkeypatch):
    metrics = dict(loss=2.0, accuracy=0.5, gradient_norm=1.0)
    histories = iter([[metrics], [metrics | dict(loss=2.0001)]])
    monkeypatch.setattr(script.module, "train", lambda step, state: next(histories))
    monkeypatch.setattr(script.module, "placed_step", lambda optimizer: mock.Mock())
    with pytest.raises(SystemExit, match="differ by more than 1e-05"):
        run(steps=1)


def test_matrices_of_blocks_decay_alone(script):
    script.flags.mark_as_parsed()
    module = script.module
    state = eqx.filter_eval_shape(module.initial_state, module.make_optimizer(), jax.random.key(0))
    parameters = eqx.filter(state.model, lambda x: hasattr(x, "shape"))
    mask = module.decayed(parameters)
    block = mask.blocks[0]
    assert block.up.weight and block.attention.query_proj.weight
    assert not any(
        [mask.embed.weight, mask.position, mask.norm.weight, block.up.bias, block.mlp_norm.weight]
    )
