"""Deferred initialisation: each rank makes the part of a step's state that it reads.

A rank's program is the part of the initialiser's jaxpr that makes this state. Each operation in it
is compiled by itself, as JAX runs a function that is not jitted, for XLA rounds in another way
where it fuses operations. So the values are those of `init_fn(*args)`, bit for bit, on any number
of ranks, and of devices in a rank. There are two exceptions: a function that JAX inlines when it
traces (`jnp.mean`) counts as the operations in it; and a jitted function of which a rank needs only
some results, or some rows of them, is compiled without the rest.
"""

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax.extend.core as jex
import numpy as np

from jaxpp import _compat, jaxprs
from jaxpp._messages import warn
from jaxpp._program import Argument, Bundle, Result, cuts_of
from jaxpp._specs import Spec, replicated, type_of
from jaxpp.jaxprs import Atom, Aval, Eqn, Flow, Literal, Var
from jaxpp.transforms._signature import Signature, with_arrays
from jaxpp.transforms._step import Inside, Step
from jaxpp.transforms.graph import Body, GraphTask, GraphValue, TaskGraph, assign, lower
from jaxpp.transforms.stacked import Bounds, Slicer


def trace_initializer(
    init_fn: Callable, args: Sequence[Any], static_argnums: Sequence[int] = ()
) -> jaxprs.Traced:
    """Traces an initialiser, without computing anything.

    It makes numbers in a step's arguments arrays, but for those of `static_argnums`.

    Raises:
        ValueError: it prints, or has another effect, for which no rank could be chosen.
    """

    def make(*args):
        state = init_fn(*args)
        if type(state) is tuple:
            return with_arrays(state, static_argnums)
        return with_arrays((state,), static_argnums)[0]

    traced = jaxprs.trace(make, args)
    for eqn in traced.jaxpr.eqns:
        if eqn.effects:
            raise ValueError(
                f"initialize: `{eqn.primitive.name}`{_compat.at_source_line(eqn)} has an effect, "
                f"but each rank runs only the part of the initialiser that makes what it reads; "
                f"take it out."
            )
    return traced


def first_arguments(traced: jaxprs.Traced) -> tuple[Any, ...]:
    """Returns the types of the arguments that an initialiser makes: one, or those of its tuple."""
    result = traced.rebuild(type_of(v.aval) for v in traced.jaxpr.jaxpr.outvars)
    return result if type(result) is tuple else (result,)


def check_initializer(state: Sequence[Any], wanted: Signature) -> None:
    """Checks that an initialiser makes the arguments that a step takes.

    Args:
        state: the arguments made: pytrees of `jax.ShapeDtypeStruct`s and static leaves.
        wanted: the step's arguments, the first of which are compared.

    Raises:
        TypeError: they differ; the message names the first leaf that does.
    """
    if len(state) > len(wanted.types):
        raise TypeError(
            f"initialize: init_fn returns a tuple of {len(state)}, but the step has "
            f"{len(wanted.types)} arguments; a tuple stands for the step's first arguments, so "
            f"wrap one that is an argument itself: return (state,)."
        )
    problem = wanted.difference((*state, *wanted.types[len(state) :]))
    if problem != "none":
        raise TypeError(
            f"initialize: what init_fn makes is not what the step was compiled for: {problem}. "
            f"Lower the step for what init_fn returns, or call initialize of the placed function, "
            f"which does."
        )


def lower_initializer(traced: jaxprs.Traced, step: Bundle, arg_names: Sequence[str]) -> Bundle:
    """Lowers an initialiser to one program per rank, which sends nothing.

    Args:
        traced: the initialiser.
        step: the step whose first arguments it makes. Each rank makes the arrays that its program
            reads, of a stacked array its rows; the first rank also makes those that none reads.
        arg_names: a name for each of the initialiser's flat inputs.
    """
    state = [a for a in step.arguments if a.array < len(traced.jaxpr.jaxpr.outvars)]
    # JAX runs the bodies of all calls but of jitted functions operation by operation, too.
    jaxpr = jaxprs.inline(traced.jaxpr, lambda e: e.primitive.name != "jit")
    jaxpr, blamed = with_parts(jaxpr, cuts_of(state))
    for n, eqn in blamed.items():
        warn(
            f"initialize: each rank that has some of the layers of {traced.output_paths()[n]} "
            f"makes all of them first, because `{eqn.primitive.name}`"
            f"{_compat.at_source_line(eqn)} cannot be computed layer by layer. An initialiser of "
            f"one layer under jax.vmap over keys can."
        )
    reads = [{n for n, _ in p.inputs if n < len(state)} for p in step.programs]
    reads[0] |= set(range(len(state))).difference(*reads)
    arguments = tuple(
        Argument(name, v.aval, n)
        for n, (name, v) in enumerate(zip(arg_names, jaxpr.jaxpr.invars, strict=True))
    )
    results = tuple(
        Result(v.aval, a.array, a.rows, spec=a.spec)
        for v, a in zip(jaxpr.jaxpr.outvars, state, strict=True)
    )
    inside = step.inside and Inside(step.inside, {})
    builder = _InitializerGraph(
        jaxpr, arguments, None if inside is None else [a.spec for a in state]
    )
    for rank, read in enumerate(reads):
        builder.add_rank(rank, sorted(read))
    whole, graph = Step(jaxpr, arguments, results, inside=inside), builder.graph(len(reads))
    return lower(whole, graph, assign(whole, graph))


class _InitializerGraph:
    """Adds the operations of each rank to a graph, as tasks.

    `specs` has the spec of each output inside a rank; it is None if ranks have no axes.
    """

    def __init__(
        self,
        jaxpr: jex.ClosedJaxpr,
        arguments: Sequence[Argument],
        specs: Sequence[Spec] | None,
    ):
        self.jaxpr, self.specs = jaxpr, specs
        invars, outvars = jaxpr.jaxpr.invars, jaxpr.jaxpr.outvars
        self.given = [
            self._value(v.aval, argument=record)
            for v, record in zip(invars, arguments, strict=True)
        ]
        self.made = [
            self._value(v.aval, None if specs is None else specs[n]) for n, v in enumerate(outvars)
        ]
        #: The ranks that read each input, and those that make each output.
        self.readers: list[list[int]] = [[] for _ in self.given]
        self.makers: list[list[int]] = [[] for _ in self.made]
        self.constants: dict[Hashable, GraphValue] = {}
        self.bodies: dict[Hashable, Body] = {}
        self.tasks: list[GraphTask] = []

    def add_rank(self, rank: int, owned: Sequence[int]) -> None:
        """Adds the operations that a rank's outputs need, by the numbers of these outputs."""
        used = [n in owned for n in range(len(self.made))]
        slim = _compat.eliminate_dead_code(self.jaxpr, used)
        slim = jaxprs.with_separate_outputs(slim, slim.jaxpr.invars)
        if self.specs is not None:
            # A device makes an array whole, and takes its shard: operations on split arrays would
            # round in another way.
            pairs = zip(slim.jaxpr.outvars, owned, strict=True)
            split = [v for v, n in pairs if self.specs[n] != replicated(len(v.aval.shape))]
            slim = jaxprs.with_separate_outputs(slim, split)
        # So one computation takes the keys of any layer.
        eqns = list(map(jaxprs.with_start_operands, _output_by_output(slim)))
        read = jaxprs.operands_of(eqns)
        outputs = {v: self.made[n] for n, v in zip(owned, slim.jaxpr.outvars, strict=True)}
        values = dict(zip(slim.jaxpr.invars, self.given, strict=True))
        before: tuple[GraphValue, ...] = ()
        for eqn in eqns:
            results = [v for v in eqn.outvars if v in read or v in outputs]
            values |= {v: outputs[v] if v in outputs else self._value(v.aval) for v in results}
            finished = tuple(outputs[v] for v in results if v in outputs)
            self.tasks.append(
                GraphTask(
                    rank,
                    self._body(eqn, results),
                    tuple(
                        self._constant(a) if jaxprs.is_literal(a) else values[a] for a in eqn.invars
                    ),
                    tuple(values[v] for v in results),
                    "initialize",
                    # It takes memory once dispatched: so at most two outputs are made at once.
                    waits=before if finished else (),
                )
            )
            before = finished or before
        for n, v in enumerate(slim.jaxpr.invars):
            self.readers[n] += [rank] * (v in read)
        for n in owned:
            self.makers[n].append(rank)

    def graph(self, num_ranks: int) -> TaskGraph:
        """The graph of all operations."""
        arguments, results = (
            tuple((value, tuple(ranks)) for value, ranks in zip(values, ranks_of, strict=True))
            for values, ranks_of in ((self.given, self.readers), (self.made, self.makers))
        )
        return TaskGraph(tuple(self.tasks), arguments, results, ((),) * num_ranks)

    def _value(self, aval: Aval, spec: Spec | None = None, **what: Any) -> GraphValue:
        if self.specs is not None and spec is None:
            spec = replicated(len(aval.shape))
        return GraphValue(aval, "gathered", "initialize", spec=spec, **what)

    def _constant(self, literal: Literal) -> GraphValue:
        value = jaxprs.copied_to_host(literal.val, literal.aval)
        key = str(literal.aval), np.asarray(value).tobytes()
        if key not in self.constants:
            self.constants[key] = self._value(literal.aval, constant=value)
        return self.constants[key]

    def _body(self, eqn: Eqn, results: Sequence[Var]) -> Body:
        """The body that makes some of an equation's results; equal operations share one."""
        # Literals become operands, as in calls outside of `jit`: XLA may compute in another way
        # with a number that it knows, and operations that differ in numbers only compile once.
        inputs = [jaxprs.fresh_var(atom) for atom in eqn.invars]
        alone = eqn.replace(invars=inputs)
        jaxpr = _compat.make_closed_jaxpr(inputs, results, [alone], "initialize")
        name = f"initialize_{eqn.params.get('name', eqn.primitive.name)}"
        return self.bodies.setdefault(jaxprs.structure(jaxpr), Body(name, jaxpr, ()))


def _output_by_output(jaxpr: jex.ClosedJaxpr) -> list[Eqn]:
    """Orders the equations that the outputs need, those of one output after those of another.

    So a rank holds little at a time: a model that is made in float32 and then cast is cast leaf by
    leaf.
    """
    flow, done, ordered = Flow(jaxpr.eqns), set(), []
    for output in jaxprs.variables(jaxpr.jaxpr.outvars):
        needed = {i for _, i in flow.behind([output], done.__contains__) if i is not None} - done
        done |= needed
        ordered += [jaxpr.eqns[i] for i in sorted(needed)]
    return ordered


# ---- the layers of stacked arrays ----------------------------------------------------------------

#: Arrays of fewer elements may be made whole, such as the keys of all layers.
SMALL = 1 << 16


def with_parts(
    jaxpr: jex.ClosedJaxpr, cuts: Sequence[Bounds | None]
) -> tuple[jex.ClosedJaxpr, dict[int, Eqn]]:
    """Divides outputs of a jaxpr into parts.

    Args:
        jaxpr: the jaxpr; its own equations stay, for others that need them.
        cuts: for each output where its rows are cut, or None where it stays whole.

    Returns:
        The jaxpr with parts in place of outputs. Also the equation to blame for each large output
        of which all rows have to be made before some can be taken.
    """
    outputs: list[Atom] = []
    blamed: dict[int, Eqn] = {}
    whole: list[tuple[Eqn, int]] = []

    def note(eqn: Eqn, atoms: Sequence[Atom], maker: Mapping[Var, Eqn]) -> None:
        whole.append((eqn, _size_behind(atoms, maker)))

    slicer = Slicer({v: e for e in jaxpr.eqns for v in e.outvars}, wanted_whole=note)
    for n, (output, bounds) in enumerate(zip(jaxpr.jaxpr.outvars, cuts, strict=True)):
        whole.clear()
        intervals = [] if bounds is None else itertools.pairwise(bounds)
        outputs += [slicer.rows(output, *rows) for rows in intervals] or [output]
        large = max(output.aval.size, SMALL)
        blamed.update((n, eqn) for eqn, size in reversed(whole) if size >= large)
    eqns = [*jaxpr.eqns, *slicer.eqns]
    return _compat.make_closed_jaxpr(jaxpr.jaxpr.invars, outputs, eqns), blamed


def _size_behind(atoms: Sequence[Atom], maker: Mapping[Var, Eqn]) -> int:
    """Finds the size of the largest array among some atoms and those that they are made of."""
    stack, seen = jaxprs.variables(atoms), set()
    while stack:
        var = stack.pop()
        if var not in seen:
            seen.add(var)
            stack.extend(jaxprs.variables(maker[var].invars) if var in maker else [])
    return max((v.aval.size for v in seen), default=0)
