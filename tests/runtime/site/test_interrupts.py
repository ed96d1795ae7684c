"""A Ctrl-C is not lost, also where Python drops what is raised."""

import gc
import signal
import sys
import time

import pytest

from jaxpp.runtime.site._interrupts import keep_interrupts


def test_a_ctrl_c_that_comes_while_garbage_is_collected_comes_again(monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    came = []

    def collect(phase, _):
        if phase == "start" and not came:
            came.append(phase)
            signal.raise_signal(signal.SIGINT)

    gc.callbacks.append(collect)
    try:
        keep_interrupts()
        with pytest.raises(KeyboardInterrupt):
            gc.collect()
            time.sleep(10)
    finally:
        gc.callbacks.remove(collect)
    assert came


def test_other_errors_that_are_dropped_are_shown_as_before(monkeypatch):
    shown = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)
    keep_interrupts()
    hook = sys.unraisablehook
    keep_interrupts()
    assert sys.unraisablehook is hook

    class Bad:
        def __del__(self):
            raise ValueError("dropped")

    Bad()
    gc.collect()
    assert [str(each.exc_value) for each in shown] == ["dropped"]
