"""How a step's computations are compiled: once each, or from a cache on disk."""

import io
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import jaxpp
from jaxpp._messages import progress
from jaxpp.runtime.executor import _compile
from tests.helpers import mesh_of

STAGES = 4


def loss(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def step_and_arguments():
    staged = jaxpp.wrap_forward(jaxpp.split_stages(loss, STAGES))
    grad = jaxpp.microbatch(jax.value_and_grad(staged), 2)
    grad = jaxpp.schedule(grad, jaxpp.schedules.OneFOneB())

    def step(weights, x):
        value, grads = grad(weights, x)
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value

    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(6, 6)).astype(np.float32) for _ in range(2 * STAGES)]
    x = rng.normal(size=(4, 6)).astype(np.float32)
    return jaxpp.place(step, jaxpp.MpmdMesh((STAGES,))), (weights, x)


@pytest.fixture
def cache(tmp_path):
    """JAX's persistent compilation cache, in an empty directory; gives the numbers of hits."""
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, (str(tmp_path), 0), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    events: list[str] = []

    def note(event: str, **_: Any) -> None:
        events.append(event.rsplit("/", 1)[-1])

    jax.monitoring.register_event_listener(note)
    yield events
    jax.monitoring.unregister_event_listener(note)
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_a_step_comes_out_of_the_cache_on_disk_with_the_same_bits(cache):
    _compile.clear_cache()
    step, arguments = step_and_arguments()
    first = step(*arguments)
    misses = cache.count("cache_misses")
    assert misses >= len(step.bundle.computations)
    _compile.clear_cache()
    jax.clear_caches()
    cache.clear()
    again, arguments = step_and_arguments()
    second = again(*arguments)
    assert cache.count("cache_misses") == 0
    assert cache.count("cache_hits") >= len(again.bundle.computations)
    jax.tree.map(np.testing.assert_array_equal, jaxpp.gather(first), jaxpp.gather(second))
    _compile.clear_cache()


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "log"])
def test_a_long_compilation_has_a_bar_on_a_terminal(monkeypatch, terminal):
    tqdm, stream = pytest.importorskip("tqdm"), Terminal() if terminal else io.StringIO()
    bar = tqdm.tqdm
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(  # else what is soon done has no bar
        tqdm, "tqdm", lambda **options: bar(**options | {"delay": 0}, mininterval=0)
    )
    _compile.clear_cache()
    step, args = step_and_arguments()
    jaxpp.place(step, mesh_of(STAGES))(*args)
    shown = stream.getvalue()
    if terminal:
        assert "jaxpp: compiling" in shown and "100%" in shown
        assert "\n" not in shown and not shown.split("\r")[-2].strip()  # it goes away
    else:
        assert not shown
    _compile.clear_cache()


def test_without_tqdm_there_is_no_bar(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with progress("compiling", 2) as update:
        assert update() is None
    step, args = step_and_arguments()
    jaxpp.place(step, mesh_of(STAGES))(*args)
