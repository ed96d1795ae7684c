"""Runs the programs of a bundle equation by equation, and remembers what equations have given.

Each operation is compiled by itself, so that programs of the same operations give the same bits;
and what an edit has not changed is not computed again.
"""

import collections
import contextlib
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from jaxpp import _compat, jaxprs
from jaxpp._program import Bundle, Free, Receive, Run, Send
from tests.certification.inner.small_steps import SEEN

#: Computed as a whole, on the devices of a rank.
_WHOLE = ("shard_map", "pallas_call")


class Outcome(NamedTuple):
    """What a run gives: for each result its record, and on each rank its value and memory.

    Also what effects have seen.
    """

    results: list[tuple[Any, dict[int, tuple[Any, Any]]]]
    ordered: list[Any]
    unordered: list[Any]


class _Code(NamedTuple):
    """A jaxpr made ready to run; literals are named by their ids."""

    jaxpr: Any  # which keeps them alive
    constants: dict[Any, Any]
    invars: Sequence[Any]
    eqns: Sequence[tuple[Any, Sequence[Any]]]
    outvars: Sequence[Any]
    has_effects: bool


class Stuck(Exception):
    """The programs cannot run to their end."""


class Taken(Exception):
    """What the programs give depends on memory that something else has taken."""


class _Slot(NamedTuple):
    """A value, the memory space that it is in, and the memory that it has there."""

    value: Any
    space: Any
    memory: Any


def _new(value: Any, space: Any) -> _Slot:
    return _Slot(value, space, object())


class Interpreter:
    """Runs bundles, with what their equations gave before."""

    def __init__(self, inside: Any = None):
        self._mesh = None
        if inside is not None:
            devices = np.array(jax.devices()[: inside.size]).reshape(inside.axis_sizes)
            self._mesh = jax.sharding.Mesh(devices, inside.axis_names)
        self._values: dict[Any, Any] = {}
        self._made: dict[Any, tuple[Any, ...]] = {}
        self._compiled: dict[int, tuple[Any, Any]] = {}
        self._codes: dict[int, _Code] = {}
        self._calls: dict[Any, list[Any]] = {}

    def run(self, bundle: Bundle, arrays: Sequence[Any]) -> Outcome:
        """Runs all ranks; `arrays` are those of the caller."""
        for own in SEEN.values():
            own.clear()
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            results = self._run(bundle, arrays)
            jax.effects_barrier()
        unordered = [*SEEN["unordered"], *printed.getvalue().splitlines()]
        return Outcome(results, list(SEEN["ordered"]), unordered)

    def _run(self, bundle: Bundle, arrays: Sequence[Any]):
        ranks, sent, taken = {}, {}, {}
        for p in bundle.programs:
            slots, taken[p.rank] = ranks.setdefault(p.rank, {}), set()
            for n, s in p.inputs:
                record = bundle.arguments[n]
                own = arrays[record.array]
                own = self.known(own if record.rows is None else own[slice(*record.rows)])
                memory = "donated" if record.donated else "an argument", n
                slots[s] = _Slot(own, _compat.memory_space(record.aval), memory)
            device = jax.memory.Space.Device
            for s, value in p.constants:
                slots[s] = _Slot(self.known(value), device, ("a constant", s))
        at = collections.Counter()
        while any(at[p.rank] < len(p.instructions) for p in bundle.programs):
            before = at.total()
            for p in bundle.programs:
                while at[p.rank] < len(p.instructions):
                    own = p.instructions[at[p.rank]]
                    if isinstance(own, Receive) and own.message.tag not in sent:
                        break
                    self._instruct(bundle, ranks[p.rank], own, sent, taken[p.rank])
                    at[p.rank] += 1
            if at.total() == before:
                raise Stuck("the ranks wait for each other")
        found = collections.defaultdict(dict)
        for p in bundle.programs:
            slots = [ranks[p.rank][s] for _, s in p.outputs]
            _read(slots, taken[p.rank])
            made = [own.memory for own in slots if not isinstance(own.memory, tuple)]
            if len(set(made)) < len(made):
                raise Taken("two results are in one memory")
            for (n, _), own in zip(p.outputs, slots, strict=True):
                found[n][p.rank] = own.value, own.space
        return [(record, found[n]) for n, record in enumerate(bundle.results)]

    def _instruct(
        self,
        bundle: Bundle,
        slots: dict[int, _Slot],
        own: Any,
        sent: dict[int, Sequence[_Slot]],
        taken: set[Any],
    ):
        match own:
            case Run():
                computation = bundle.computations[own.computation]
                jaxpr, given = computation.jaxpr, [slots[s] for s in own.inputs]
                _read(given, taken)
                for slot, aval in zip(given, jaxpr.in_avals, strict=True):
                    if slot.space != _compat.memory_space(aval):
                        raise Stuck(f"{own.label} reads what is in {slot.space}")
                made = self.call(jaxpr, [slot.value for slot in given])
                for i in computation.donated:
                    _take(given[i].memory, [slot.memory for slot in given], taken)
                spaces = map(_compat.memory_space, jaxpr.out_avals)
                slots.update(zip(own.outputs, map(_new, made, spaces), strict=True))
            case Send():
                sent[own.message.tag] = [slots[s] for s in own.slots]
                _read(sent[own.message.tag], taken)
            case Receive():
                values = [_new(x.value, x.space) for x in sent[own.message.tag]]
                slots.update(zip(own.slots, values, strict=True))
            case Free():
                for s in own.slots:
                    del slots[s]

    # ---- values and equations ------------------------------------------------------------------

    def known(self, value: Any, weak: bool | None = None) -> Any:
        """The array that stands for all of the same bits and type."""
        weak = bool(getattr(value, "weak_type", False)) if weak is None else weak
        is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        host = np.asarray(jax.random.key_data(value) if is_key else value)
        key = (str(value.dtype), weak, host.shape, host.tobytes())
        if (found := self._values.get(key)) is None:
            if not is_key:
                value = jnp.asarray(host)
                value = jax.lax.convert_element_type(value, value.dtype) if not weak else value
            self._values[key] = found = value
        return found

    def call(self, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
        """The results of a jaxpr."""
        code = self._codes.get(id(jaxpr))
        if code is None:
            code = self._codes[id(jaxpr)] = self._code(jaxpr)
        key = (id(jaxpr), *map(id, args))
        if not code.has_effects and (found := self._calls.get(key)) is not None:
            return list(found)
        values = dict(code.constants)
        values.update(zip(code.invars, args, strict=True))
        for eqn, invars in code.eqns:
            made = self._once(eqn, [values[v] for v in invars])
            values.update(zip(eqn.outvars, made, strict=True))
        results = [values[v] for v in code.outvars]
        if not code.has_effects:
            self._calls[key] = list(results)
        return results

    def _code(self, jaxpr: Any) -> "_Code":
        inside = jaxprs.opened(jaxpr)
        constants: dict[Any, Any] = {
            v: self.known(constant)
            for v, constant in zip(inside.constvars, _compat.constants_of(jaxpr), strict=True)
        }

        def named(atom):
            if not jaxprs.is_literal(atom):
                return atom
            constants[id(atom)] = self.known(jaxprs.literal_array(atom))
            return id(atom)

        needed = jaxprs.needed(inside.eqns, inside.outvars)
        eqns = [(eqn, list(map(named, eqn.invars))) for eqn in needed]
        outvars = list(map(named, inside.outvars))
        has_effects = any(eqn.effects for eqn in needed)
        return _Code(jaxpr, constants, inside.invars, eqns, outvars, has_effects)

    def _once(self, eqn: Any, args: Sequence[Any]) -> Sequence[Any]:
        key = (id(eqn), *map(id, args))
        if not eqn.effects and (found := self._made.get(key)) is not None:
            return found[1]
        made = self._equation(eqn, args)
        for v, x in zip(eqn.outvars, made, strict=True):
            if (x.shape, x.dtype) != (v.aval.shape, v.aval.dtype):
                raise Stuck(f"{eqn.primitive.name} gives {x.dtype}{x.shape}, not {v.aval}")
        if not eqn.effects:
            self._made[key] = eqn, made  # which keeps the equation alive
        return made

    def _equation(self, eqn: Any, args: Sequence[Any]) -> Sequence[Any]:
        if (body := jaxprs.called_jaxpr(eqn)) is not None:
            return self.call(body, args)
        params = eqn.params
        match eqn.primitive.name:
            case "cond":
                which = int(np.clip(int(args[0]), 0, len(params["branches"]) - 1))
                return self.call(params["branches"][which], args[1:])
            case "while":
                a, b = params["cond_nconsts"], params["body_nconsts"]
                state, count = list(args[a + b :]), 0
                while bool(self.call(params["cond_jaxpr"], [*args[:a], *state])[0]):
                    state = self.call(params["body_jaxpr"], [*args[a:][:b], *state])
                    if (count := count + 1) > 100:
                        raise Stuck("a loop does not end")
                return state
            case "scan":
                return self._scan(eqn, args)
        run = self._compiled.get(id(eqn))
        if run is None:
            variables = list(map(jaxprs.fresh_var, eqn.invars))
            alone = _compat.make_closed_jaxpr(
                variables, eqn.outvars, [eqn.replace(invars=variables)]
            )
            fun: Any = jex.jaxpr_as_fun(alone)
            if eqn.primitive.name in _WHOLE:
                fun = jax.jit(fun)
            run = self._compiled[id(eqn)] = eqn, fun
        with jax.set_mesh(self._mesh) if self._mesh else contextlib.nullcontext():
            made = run[1](*args)
        weak = [bool(getattr(v.aval, "weak_type", False)) for v in eqn.outvars]
        return [self.known(x, w) for x, w in zip(made, weak, strict=True)]

    def _scan(self, eqn: Any, args: Sequence[Any]) -> list[Any]:
        num_consts, num_carry = _compat.scan_parts(eqn)
        length, jaxpr = eqn.params["length"], eqn.params["jaxpr"]
        consts, carry = args[:num_consts], list(args[num_consts:][:num_carry])
        xs, ys = args[num_consts + num_carry :], [None] * length
        for i in reversed(range(length)) if eqn.params["reverse"] else range(length):
            made = self.call(jaxpr, [*consts, *carry, *(self.known(x[i]) for x in xs)])
            carry, ys[i] = made[:num_carry], made[num_carry:]
        if not length:
            shapes = [v.aval for v in eqn.outvars[num_carry:]]
            return [*carry, *(self.known(jnp.zeros(a.shape, a.dtype)) for a in shapes)]
        return [*carry, *(self.known(jnp.stack(rows)) for rows in zip(*ys, strict=True))]


def _read(slots: Sequence[_Slot], taken: set[Any]) -> None:
    if any(slot.memory in taken for slot in slots):
        raise Taken("a value is read whose memory is taken")


def _take(memory: Any, all_memory: Sequence[Any], taken: set[Any]) -> None:
    if isinstance(memory, tuple) and memory[0] != "donated":
        raise Taken(f"the memory of {memory[0]} is taken")
    if all_memory.count(memory) > 1:
        raise Taken("memory is taken that is read twice")
    taken.add(memory)
