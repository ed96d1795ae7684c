"""The runs in a profile are those of the dispatches, in the order of their launch."""

import pytest

from jaxpp.runtime.trace._profile import Module, match

MS = 1_000_000
F = Module("jit_F0", (0,))


def dispatched(count, first=0):
    """Dispatches, one a millisecond; their positions are numbers from `first` on."""
    return {F: {(0, 0, n): n * MS for n in range(first, count)}}


def run(number, start, module="jit_F0", device=0, length=5 * MS):
    return (module, device), number, (start * MS, start * MS + length)


def profile(runs):
    found = {}
    for key, number, span in runs:
        found.setdefault(key, {})[number] = span
    return found


def found(dispatches, runs):
    """The start of each dispatch that is known, in milliseconds; and the errors."""
    seen, errors = match(dispatches, profile(runs), zero=0)
    return {n: start and start // MS for (_, _, n), (_, start, _) in seen.items()}, errors


def test_the_order_is_that_of_launches():
    # A launch whose inputs are late may start after the next one.
    profiled = [run(7, 30), run(8, 20), run(9, 40), run(3, 1, "jit_other")]
    assert found(dispatched(3), profiled) == ({0: 30, 1: 20, 2: 40}, [])


@pytest.mark.parametrize("missing", [0, 1, 2, 3])
def test_a_run_that_did_not_start_is_the_one_without_its_number(missing):
    profiled = [run(7 + n, 10 * n) for n in range(4) if n != missing]
    starts, (error,) = found(dispatched(4), profiled)
    if missing:
        assert starts == {n: 10 * n for n in range(4) if n != missing}
    else:  # by its number the first one could be of any of the four dispatches
        assert starts == {0: 10, 1: 20, 2: 30}
    assert error.startswith("JAX's profile has 3 of 4 runs of jit_F0 on device 0")


def test_no_run_starts_before_its_dispatch():
    late = {F: {w: t + 100 * MS * (w[2] > 0) for w, t in dispatched(3)[F].items()}}
    starts, (_,) = found(late, [run(7, 90), run(8, 110)])
    assert starts == {0: 90, 1: 110}
    starts, (_,) = found(dispatched(3, 1), [run(7, 0)])
    assert starts == {}


def test_executables_of_one_name_are_taken_in_order_of_their_starts():
    profiled = [run(7, 10), run(-900, 20), run(8, 30)]
    assert found(dispatched(3), profiled) == ({0: 10, 1: 20, 2: 30}, [])
    assert found(dispatched(4), profiled)[0] == {}


def test_what_others_ran_is_not_taken_for_a_task():
    starts, (error,) = found(dispatched(2), [run(n, 10 * n) for n in range(3)])
    assert starts == {} and "has 3 of 2 runs" in error and "times of 0 are known" in error


def test_a_run_on_several_devices_lasts_until_all_have_ended():
    module = Module("jit_F0", (0, 1))
    profiled = [run(7, 10), run(7, 12, device=1), run(7, 50, device=2)]
    seen, errors = match({module: {(0, 0, 0): 0}}, profile(profiled), zero=3)
    assert seen == {(0, 0, 0): (0, 10 * MS + 3, 17 * MS + 3)} and not errors


def test_what_gives_its_arguments_back_is_there_without_times():
    assert found(dispatched(2), [run(7, 10, ""), run(8, 20, "")]) == ({0: None, 1: None}, [])
    assert found(dispatched(2), [run(7, 10, "", device=1)])[1]
