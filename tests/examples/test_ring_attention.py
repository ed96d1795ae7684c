"""Attention around a ring of devices is plain attention, alone and in a pipeline."""

import functools
from unittest import mock

import chex
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from tests.scripts import load_script

TINY = dict(layers=2, width=8, heads=2, sequence_length=16, batch_size=4, microbatches=2)


@pytest.fixture(scope="module")
def script():
    return load_script("examples.ring_attention")


@pytest.mark.parametrize("parts", [2, 4])
def test_values_and_gradients_are_those_of_plain_attention(script, parts):
    module = script.module
    rng = np.random.default_rng(parts)
    *qkv, weights = rng.normal(size=(4, 2, 8, 3, 4)).astype(np.float32)

    def total(attention, *qkv):
        return (attention(*qkv) * weights).sum()

    want = jax.value_and_grad(functools.partial(total, module.plain_attention), (0, 1, 2))(*qkv)
    mesh = jax.make_mesh((parts,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        split = [jax.device_put(x, NamedSharding(mesh, module.SPLIT)) for x in qkv]
        ring = functools.partial(total, module.ring_attention)
        got = jax.jit(jax.value_and_grad(ring, (0, 1, 2)))(*split)
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-5)
    assert {s.data.shape for s in got[1][1].addressable_shards} == {(2, 8 // parts, 3, 4)}


@pytest.mark.parametrize("parts", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_pipeline_with_ring_attention(script, capsys, monkeypatch, parts):
    monkeypatch.setattr(script.module, "make_devices", lambda: None)
    script.main(**TINY, seq=parts)
    plain, ring = (
        [int(n.replace(",", "")) for n in line.split()[2:4]]
        for line in capsys.readouterr().out.replace(", ", " ").splitlines()[1:]
    )
    # The scores are not kept at all, and of all else each device keeps its block.
    assert all(b * parts < a for a, b in zip(plain, ring, strict=True))


def test_a_difference_is_an_error(script, monkeypatch):
    monkeypatch.setattr(script.module, "make_devices", lambda: None)
    monkeypatch.setattr(script.module, "placed", mock.MagicMock())
    monkeypatch.setattr(script.module, "difference", lambda got, want: float("nan"))
    with pytest.raises(SystemExit, match="differ by more than 1e-05"):
        script.main(**TINY)
