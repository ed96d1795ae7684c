"""How a step's computations are compiled: once each, from a cache on disk, with a report."""

import io
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import jaxpp
from jaxpp.runtime.executor import _compile, _progress

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


def report(monkeypatch, stream, asked=None, patience=0.0):
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.delenv(_progress.VARIABLE, raising=False)
    if asked is not None:
        monkeypatch.setenv(_progress.VARIABLE, asked)
    with _progress.Progress(2, patience) as progress:
        for name, size in {"F0": 12, "B0": 30}.items():
            with progress.compiling(name, size):
                pass
    return stream.getvalue()


def test_a_terminal_shows_one_line_which_goes_away(monkeypatch):
    shown = report(monkeypatch, Terminal())
    assert "compiled 1 of 2 computations; now B0 (30 equations)" in shown
    assert "\n" not in shown
    assert shown.endswith("\r") and not shown.split("\r")[-2].strip()


def test_a_log_says_after_a_while_what_is_compiled_and_then_seldom(monkeypatch):
    """At 0.1 s, 0.4 s and 1.6 s here, and how long it took; nothing for what is soon done."""
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    monkeypatch.delenv(_progress.VARIABLE, raising=False)
    monkeypatch.setattr(_progress, "PATIENCE_OF_A_LOG", 0.1)
    with _progress.Progress(2) as progress:
        with progress.compiling("F0", 12):
            time.sleep(0.2)
        with progress.compiling("B0", 30):
            time.sleep(0.6)
    first, second, last = log.getvalue().splitlines()
    assert first == "jaxpp: compiled 0 of 2 computations in 0 s; now F0 (12 equations)"
    assert second == "jaxpp: compiled 1 of 2 computations in 0 s; now B0 (30 equations)"
    assert last == "jaxpp: compiled 2 computations in 1 s"
    assert report(monkeypatch, io.StringIO(), patience=60.0) == ""


def test_a_log_has_each_line_if_asked_and_a_terminal_none_if_not_wanted(monkeypatch):
    lines = report(monkeypatch, io.StringIO(), asked="1").splitlines()
    assert lines[-1] == "jaxpp: compiled 2 of 2 computations"
    assert report(monkeypatch, Terminal(), asked="0") == ""


def test_nothing_is_said_of_what_is_soon_done(monkeypatch):
    assert report(monkeypatch, Terminal(), patience=60.0) == ""
