"""The train steps of programs: one text for the plain step and the placed one.

They differ in their loops alone: those of the plain step are written out here, microbatch after
microbatch, and know nothing of jaxpp.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import io_callback

import jaxpp
from tests.programs import build, events
from tests.programs.operations import POLICIES
from tests.programs.optimizers import OPTIMIZERS
from tests.programs.program import SCHEDULES, Program

# ---- loops --------------------------------------------------------------------------------------


def _packed(program: Program, outputs: list, value: Callable) -> Any:
    """The outputs of the loss in the container of the program; `value` makes one of (name, x)."""
    if program.container == "dict":
        return {name: value(name, x) for name, x in outputs}
    return tuple(value(name, x) for name, x in outputs)


def _functions(program: Program, wrap: Callable) -> dict[str, tuple[Callable, Any]]:
    """The function that each kind of loop runs for a microbatch, and how it reduces its results.

    A function of (params, data). `wrap` is what is around the loss: the stages, or nothing.
    """
    loss_fn = build.make_loss(program)

    def whole(params, data):
        return _packed(program, loss_fn(params, data), lambda _, x: x)

    def with_aux(params, data):
        outputs = loss_fn(params, data)
        rest = [(name, x) for name, x in outputs if name != "loss"]
        return dict(outputs)["loss"], _packed(program, rest, lambda _, x: x)

    reductions = [(o.name, o.reduce) for o in program.outputs]
    rest = _packed(program, reductions, lambda _, reduce: reduce)
    reductions.insert(program.place_of_loss, ("loss", "mean"))
    everything = _packed(program, reductions, lambda _, reduce: reduce)
    inside = jax.value_and_grad(wrap(with_aux), has_aux=True)
    return {
        "inside": (inside, (("mean", rest), "mean")),
        "outside": (wrap(whole), everything),
        "eval": (wrap(whole), everything),
    }


def _loss_of(program: Program, results: Any) -> Any:
    return results["loss" if program.container == "dict" else program.place_of_loss]


def _gradient_outside(program: Program, loop: Callable) -> Callable:
    """The gradient of the loss of a whole loop."""

    def loss(params, data):
        results = loop(params, data)
        return _loss_of(program, results), results

    def value_and_grad(params, data):
        (_, results), grads = jax.value_and_grad(loss, has_aux=True)(params, data)
        return results, grads

    return value_and_grad


def plain_loops(program: Program) -> dict[str, Callable]:
    """The loops without jaxpp: microbatch after microbatch, and the results combined."""

    def part_of(x, i, axis):
        return x if axis is None else jnp.split(x, program.microbatches)[i]

    def looped(fun, reduce):
        fun = jax.jit(fun)  # traced once; XLA sees through it

        def loop(params, data):
            results = []
            for i in range(program.microbatches):
                part = {name: part_of(data[name], i, axis) for name, axis in build.AXES.items()}
                results.append(fun(params, part))
            flat = [jax.tree.leaves(r) for r in results]
            tree = jax.tree.structure(results[0])
            names = jax.tree.leaves(
                jax.tree.map(
                    lambda name, sub: jax.tree.map(lambda _: name, sub), reduce, results[0]
                )
            )
            combined = [_combine(n, list(xs)) for n, *xs in zip(names, *flat, strict=True)]
            return jax.tree.unflatten(tree, combined)

        return loop

    functions = _functions(program, lambda fun: fun)
    loops = {kind: looped(fun, reduce) for kind, (fun, reduce) in functions.items()}
    return {**loops, "outside": _gradient_outside(program, loops["outside"])}


def _combine(name: str, xs: list) -> Any:
    match name:
        case "mean" | "sum":
            total = xs[0]
            for x in xs[1:]:
                total = total + x
            return total / len(xs) if name == "mean" else total
        case "max":
            return jnp.stack(xs).max(0)
        case "last":
            return xs[-1]
        case "stack":
            return jnp.stack(xs)
        case "concat":
            return jnp.concatenate(xs)
    raise ValueError(name)


def pipelined_loops(program: Program) -> dict[str, Callable]:
    """The loops as jaxpp makes them: staged, microbatched, scheduled."""
    policy = POLICIES.get(program.policy or "")
    axes = (None, build.AXES)

    def wrap(fun):
        if program.cuts == "automatic":
            fun = jaxpp.split_stages(fun, program.num_stages)
        fun = jaxpp.wrap_forward(fun, policy=policy)
        return jax.checkpoint(fun) if program.policy == "outside" else fun

    schedule = SCHEDULES[program.schedule][1]
    forward_only = jaxpp.schedules.ForwardOnly(like=schedule)
    if program.schedule.startswith("ForwardOnly"):
        forward_only = schedule

    def microbatched(kind):
        fun, reduce = functions[kind]
        return jaxpp.microbatch(fun, program.microbatches, in_axes=axes, reduce=reduce)

    functions = _functions(program, wrap)
    outside = _gradient_outside(program, microbatched("outside"))
    loops = {
        "inside": jaxpp.schedule(microbatched("inside"), schedule),
        "outside": jaxpp.schedule(outside, schedule),
        "eval": jaxpp.schedule(microbatched("eval"), forward_only),
    }
    return {kind: jax.jit(f) for kind, f in loops.items()} if program.jitted else loops


# ---- steps --------------------------------------------------------------------------------------


def make_state(program: Program) -> Any:
    """The first state of a step; no two arrays are the same one, so that all can be donated."""
    params = build.make_params(program)
    state = (params, OPTIMIZERS[program.optimizer].init(params), jnp.zeros((), jnp.int32))
    return jax.tree.map(lambda x: jnp.array(x, copy=True), state)


def make_step(program: Program, loops: dict[str, Callable]) -> Callable:
    """The step: `step(state, data)`, or `step(*state, data)`, gives a new state and what it saw."""
    optimizer = OPTIMIZERS[program.optimizer]

    def step(state, data):
        params, opt_state, count = state
        effects = _Effects(program.effects)
        data = effects.before(params, count, data)
        seen: dict[str, Any] = {}
        for number, kind in enumerate(program.loops):
            if kind == "eval":
                seen[f"eval{number}"] = loops[kind](params, data)
                continue
            results, grads = loops[kind](params, data)
            seen[f"train{number}"] = results
            effects.between(results, grads)
            if program.gradients:
                seen[f"grads{number}"] = grads
            params, opt_state = optimizer.update(grads, opt_state, params)
        effects.after(params, count, seen)
        given = {"a constant": jnp.arange(3), "data": data, "nothing": None, "the step": count}
        given["something twice"] = [jax.tree.leaves(seen)] * 2
        given["old parameters"] = state[0]
        seen["returned"] = {name: given[name] for name in program.returned}
        return (params, opt_state, count + 1), seen

    if not program.flat:
        return step
    return lambda params, opt_state, count, data: step((params, opt_state, count), data)


RETURNED = ("a constant", "data", "nothing", "the step", "something twice", "old parameters")


def _first_float(tree: Any) -> Any:
    return next(x for x in jax.tree.leaves(tree) if x.dtype == jnp.float32 and x.size)


class _Effects:
    """The effects around the loops of a step, by name."""

    def __init__(self, names: tuple[str, ...]):
        self.names = names

    def before(self, params, count, data):
        if "print of a counter" in self.names:
            jax.debug.print("counter: {}", count)
        if "callback of an argument" in self.names:
            jax.debug.callback(events.recorder("argument"), _first_float(params))
        if "callback of data" in self.names:
            jax.debug.callback(events.recorder("data"), data["labels"])
        if "ordered before and after" in self.names:
            io_callback(events.recorder("ordered"), None, count, ordered=True)
        if "a reader" in self.names:  # data from outside, which differs from call to call
            step = io_callback(
                events.reader("reader"), jax.ShapeDtypeStruct((), jnp.float32), count
            )
            data = {**data, "x": data["x"] * (1 + 0.1 * step)}
        if "callback of nothing" in self.names:
            jax.debug.callback(events.recorder("nothing"), jnp.ones(()))
        return data

    def between(self, results, grads):
        leaves = [g.astype(jnp.float32) for g in jax.tree.leaves(grads)]
        if "callback of the loss" in self.names:
            jax.debug.callback(events.recorder("loss"), _first_float(results))
        if "callback of gradients" in self.names and leaves:
            ends = jnp.sum(leaves[0]) + jnp.sum(leaves[-1])
            jax.debug.callback(events.recorder("gradients"), ends)
        if "callback of all gradients" in self.names:
            jax.debug.callback(events.recorder("all gradients"), *leaves)
        if "ordered of gradients" in self.names and leaves:
            io_callback(events.recorder("ordered"), None, jnp.sum(leaves[0]), ordered=True)

    def after(self, params, count, seen):
        if "print of the loss" in self.names:
            jax.debug.print("loss: {}", _first_float(seen).sum())
        if "callback of parameters" in self.names:
            jax.debug.callback(events.recorder("parameters"), _first_float(params))
        if "ordered before and after" in self.names:
            io_callback(events.recorder("ordered"), None, _first_float(seen).sum(), ordered=True)
        if "rare callback" in self.names:
            jax.lax.cond(
                count % 2 == 0,
                lambda x: jax.debug.callback(events.recorder("rare"), x),
                lambda x: None,
                _first_float(seen),
            )


EFFECTS = (
    "print of a counter", "callback of an argument", "callback of data", "callback of nothing",
    "ordered before and after", "a reader", "callback of the loss", "callback of gradients",
    "callback of all gradients", "ordered of gradients", "print of the loss",
    "callback of parameters", "rare callback",
)  # fmt: skip
