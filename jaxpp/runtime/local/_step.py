"""`LocalStep`: a step's programs on the devices of this process, its arguments and its results."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp import _compat, jaxprs
from jaxpp._program import Argument, Bundle, Result
from jaxpp.runtime.arrays import (
    ArrayHandle,
    ArrayType,
    Home,
    check_arguments,
    devices_of,
    from_host,
    sharding_across,
    sharding_in,
    sizes_of,
    to_host,
)
from jaxpp.runtime.executor import (
    Description,
    Dispatcher,
    Executor,
    Inspected,
    compile_all,
    describe,
    turns_of,
)
from jaxpp.runtime.transport import RUN_AHEAD, Near

#: A rank's executor, its home, and a slot.
Seat = tuple[Executor, Home, int]


class LocalStep:
    """A step's programs, loaded on the devices of one process; called with its flat arguments.

    `order` has the pieces of all ranks' programs in the order of their dispatch. All calls use the
    same slots, so they are dispatched one after the other.
    """

    def __init__(
        self,
        bundle: Bundle,
        homes: Sequence[Home],
        dispatch: Callable[[Dispatcher, Bundle], None],
        lock: threading.RLock,
    ):
        self.bundle, self.homes = bundle, homes
        self._dispatch, self._lock = dispatch, lock
        self.transport = Near(dict(enumerate(homes)))
        executors = [
            Executor(
                program,
                [own.get(n) for n in range(len(bundle.computations))],
                self.transport,
                [(n, from_host(to_host(v), ArrayType.of(v), home)) for n, v in program.constants],
                bundle.computations,
                home,
            )
            for program, own, home in zip(
                bundle.programs, compile_all(bundle, homes), homes, strict=True
            )
        ]
        self._dispatcher = Dispatcher(executors, turns_of(bundle.programs))
        self.executors = list(self._dispatcher.executors.values())
        self.order = self._dispatcher.order
        #: True if there is an `eqx.error_if`, whose error a call raises, as in `eqx.filter_jit`.
        self._raises = any(
            jaxprs.contains(e, _compat.is_error_if)
            for c in bundle.computations
            for e in c.jaxpr.eqns
        )
        inputs = self._places([p.inputs for p in bundle.programs], len(bundle.arguments))
        outputs = self._places([p.outputs for p in bundle.programs], len(bundle.results))
        self.feeds = list(map(Feed, inputs, bundle.arguments))
        self._fetches = list(map(Fetch, outputs, bundle.results))

    def _places(self, pairs: Sequence[Sequence[tuple[int, int]]], count: int) -> list[list[Seat]]:
        """Returns for each argument or result the executor, home and slot of its ranks."""
        places: list[list[Seat]] = [[] for _ in range(count)]
        for own, executor, home in zip(pairs, self.executors, self.homes, strict=True):
            for number, slot in own:
                places[number].append((executor, home, slot))
        return places

    def __call__(
        self, args: Sequence[Any], dispatch: Callable[[], None] | None = None
    ) -> list[Any]:
        """Runs the step; returns when all of it has been dispatched, by `dispatch` if given."""
        with self._lock:
            check_arguments(self.bundle, args)
            for feed, arg in zip(self.feeds, args, strict=True):
                feed(arg)
            try:
                with _compat.raising_once() if self._raises else contextlib.nullcontext():
                    if dispatch is None:
                        self._dispatch(self._dispatcher, self.bundle)
                    else:
                        dispatch()
                    results = [fetch() for fetch in self._fetches]
                    if self._raises:
                        jax.block_until_ready(results)
            except jax.errors.JaxRuntimeError as error:
                public = _compat.public_error(error)
                raise public from (error.__cause__ if public is error else None)
            except ValueError as error:
                _check_layouts(self.bundle, args, error)
                raise
            finally:
                self.transport.clear()
            for n in self.bundle.donated:
                if isinstance(args[n], jax.Array):
                    args[n].delete()  # on all its devices: a rank may have taken a part only
            return results

    def input_shardings(self) -> list[Any]:
        """Returns the sharding of each argument that needs no copy; None if nothing reads it."""
        return [feed.sharding() for feed in self.feeds]

    def inspect(self) -> list[Inspected]:
        """Returns each rank's devices and axes, and XLA's analysis of what it runs."""
        return [
            Inspected.of(devices_of(home), sizes_of(home), executor.executables, RUN_AHEAD)
            for home, executor in zip(self.homes, self.executors, strict=True)
        ]

    def describe(self) -> Description:
        """Describes what each rank holds, sends and reduces."""
        return describe(self.bundle, self.inspect())


def _check_layouts(bundle: Bundle, args: Sequence[Any], error: Exception) -> None:
    """Explains an error of a computation by the memory layout of an argument, if that is why.

    Raises:
        ValueError: an array has another layout than JAX gives it by default.
    """
    if "layout" not in str(error):
        return
    for own, arg in zip(bundle.arguments, args, strict=True):
        layout = getattr(getattr(arg, "format", None), "layout", None)
        order = getattr(layout, "major_to_minor", None)
        if order is not None and tuple(order) != tuple(range(arg.ndim)):
            raise ValueError(
                f"args{own.name} has a memory layout of its own, {layout}, but a placed step reads "
                f"and keeps arrays in the default layout. Pass jnp.copy(array), which has that."
            ) from error


# ---- arguments and results ----------------------------------------------------------------------


class Feed:
    """Puts one argument into the slots of the ranks that read it; copies it only if it must."""

    def __init__(self, places: Sequence[Seat], own: Argument):
        self._places, self._name, self._donated = places, own.name, own.donated
        self._split = own.spec, _compat.memory_kind(own.aval)
        self._sharding: Any = None
        self._known: list[_Source] = []

    def __call__(self, arg: Any) -> None:
        if not self._places:
            return
        if not isinstance(arg, jax.Array):
            # A copy: the caller may write to a NumPy array while the step runs.
            arg = jnp.array(arg)
        if arg.sharding is not self._sharding:
            if isinstance(arg, ArrayHandle) and not arg.is_fully_addressable:
                raise ValueError(
                    f"args{self._name} is {arg!r}, and the step runs on a mesh of this process: "
                    f"pass jaxpp.gather(x), which fetches it while its own mesh runs."
                )
            self._sharding = arg.sharding
            self._known = [
                _source(arg, sharding_in(home, *self._split)) for _, home, _ in self._places
            ]
        taken: set[Any] = set()
        for (executor, home, slot), source in zip(self._places, self._known, strict=True):
            value = source(arg)
            if len(self._places) > 1 and self._donated:
                if taken.intersection(devices_of(home)):  # ranks that share a device: a copy each
                    value = jnp.copy(value)
                taken.update(devices_of(home))
            executor.slots[slot] = value

    def sharding(self) -> Any:
        """Returns the sharding of an argument that needs no copy; None where nothing reads it."""
        homes = tuple(dict.fromkeys(home for _, home, _ in self._places))
        return sharding_across(homes, *self._split) if homes else None


#: Gives a home's part of an array.
_Source = Callable[[Any], Any]


def _source(arg: jax.Array, wanted: jax.sharding.Sharding) -> _Source:
    """Makes the function that gives a home's part of arrays of one sharding, copied if need be."""
    if arg.sharding.is_equivalent_to(wanted, arg.ndim):
        return lambda x: x
    needed = wanted.addressable_devices_indices_map(arg.shape)
    held = {s.device: (i, s.index) for i, s in enumerate(arg.addressable_shards)}
    here = all(d in held and held[d][1] == index for d, index in needed.items())
    # To JAX, unpinned memory is the device's.
    if not here or arg.sharding.memory_kind != wanted.memory_kind:
        return lambda x: jax.device_put(x, wanted)
    shards = [held[device][0] for device in needed]
    if len(shards) == 1:
        return lambda x: x.addressable_shards[shards[0]].data

    def assemble(x: Any) -> Any:
        own = x.addressable_shards
        return jax.make_array_from_single_device_arrays(
            x.shape, wanted, [own[i].data for i in shards]
        )

    return assemble


class Fetch:
    """Makes one result from the arrays that the ranks have left in their slots."""

    def __init__(self, places: Sequence[Seat], own: Result):
        spec = own.spec or ()
        by_home: dict[Home, tuple[Any, int]] = {}
        for executor, home, slot in places:
            by_home.setdefault(home, (executor, slot))
        self._places, self._aval = places, own.aval
        self._sources = list(by_home.values())
        kind = _compat.memory_kind(own.aval)
        across = sharding_across(tuple(by_home), spec, kind)
        alone = sharding_in(next(iter(by_home)), spec, kind)
        self._sharding = None if across is alone else across

    def __call__(self) -> Any:
        values = [executor.slots[slot] for executor, slot in self._sources]
        for executor, _, slot in self._places:  # from here on the caller alone holds the result
            executor.slots[slot] = None
        if self._sharding is None:
            return values[0]
        shards = {s.device: s.data for value in values for s in value.addressable_shards}
        return _compat.join_shards(self._aval, self._sharding, list(shards.values()))
