"""Lowers a function and its arguments to the programs of all ranks: `place`'s work, in order."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import AbstractMesh

from jaxpp import _compat, jaxprs
from jaxpp._messages import warn
from jaxpp._program import (
    PIPELINE_AXIS,
    PROVIDED,
    Argument,
    Bundle,
    Fed,
    Mesh,
    Program,
    Result,
    Role,
)
from jaxpp._specs import Spec, axis_sizes, replicated, type_of
from jaxpp.jaxprs import Eqn
from jaxpp.transforms._signature import Signature, with_keywords, without_keywords
from jaxpp.transforms._step import Inside, Step
from jaxpp.transforms.graph import Fuse, TaskGraph, assign, fuse, lower
from jaxpp.transforms.inside import (
    automatic,
    cost_of_sharing,
    reduce_replicas,
    specs_of_leaves,
    split_examples,
    split_state,
    trace,
)
from jaxpp.transforms.place import _build_graph, _conditionals, _distribute, _flat_step, _placement
from jaxpp.transforms.place._compiled import Compiled, Lowered, load
from jaxpp.transforms.place._join_loops import join_loops
from jaxpp.transforms.stages import is_backward_call, listed, stage_of_call
from jaxpp.transforms.tasks import ScheduledLoop, is_loop


@dataclasses.dataclass(frozen=True)
class Request:
    """The arguments of a call of `place`.

    Args:
        fun: the step.
        mesh: where to run it; None for the default.
        donate_argnums: the positions of donated arguments.
        static_argnums: the positions of arguments whose numbers are static.
        in_specs: a prefix of the arguments.
        out_specs: a prefix of the results.
        zero: for each role, the axes over which arguments of that role are split further.
        replica_axis: the axis whose devices have replicas of their own.
        fuse: which tasks become one computation.
        edits: what `edit_tasks` does to the tasks, in order.
    """

    fun: Callable
    mesh: Mesh | None
    donate_argnums: tuple[int, ...]
    static_argnums: tuple[int, ...]
    in_specs: Any
    out_specs: Any
    zero: Mapping[Role, tuple[str, ...]]
    replica_axis: str
    fuse: Fuse = "none"
    edits: tuple[Callable[[TaskGraph], TaskGraph], ...] = ()


#: The passes that a step goes through before its tasks become a graph, in order.
PASSES: tuple[Callable[[Step], Step], ...] = (
    _distribute.distribute,
    _flat_step.find_roles,
    split_state,
    _flat_step.separate_results,
    split_examples,
    reduce_replicas,
    _conditionals.open_spanning,
    _flat_step.skip_carries,
    _placement.place_equations,
)


def lower_step(request: Request, args: tuple[Any, ...]) -> Lowered:
    """Lowers a step for the types of some arguments, which are loaded already.

    Raises:
        ValueError: for the reasons that `place` lists.
    """
    inside = getattr(request.mesh, "inside", None)
    # A constraint in the model names axes without a mesh: those of the rank that runs it.
    within = contextlib.nullcontext()
    if inside is not None:
        within = jax.sharding.use_abstract_mesh(automatic(inside))
    with within:
        lowered = _lower_inside(request, args, inside)
    return dataclasses.replace(lowered, context=_compat.trace_context())


def _lower_inside(request: Request, args: tuple[Any, ...], inside: AbstractMesh | None) -> Lowered:
    _check_arguments(request, args)
    signature = Signature.of(args, request.static_argnums)
    given = with_keywords(request.in_specs, args, None)
    in_specs = _specs("in_specs", given, signature.types, inside)
    retrace = functools.partial(trace, request.fun, signature.types, in_specs, inside)
    traced = retrace()
    _warn_of_wrong_products(traced.jaxpr)
    step = _make_step(request, args, signature, inside, in_specs, traced)
    keys = _compat.KeyUse(traced.jaxpr, traced.inputs[: traced.num_closed_over])
    passes = {"trace": step}
    with jax.debug_key_reuse(False):  # tasks may share an array of keys
        for run in PASSES:
            step = passes[run.__name__] = run(step)
        graph = join_loops(_build_graph.build(step))
        for edit in request.edits:
            graph = edit(graph)
        specs = assign(step, graph)
        graph, notes = fuse(graph, request.fuse)
        bundle = lower(step, graph, specs)
    if note := cost_of_sharing(step):
        warn(f"place: {note}")
        notes = (note, *notes)
    bundle = dataclasses.replace(bundle, notes=notes)
    mesh = _resolve_mesh(request.mesh, bundle.programs, traced, passes["trace"].jaxpr.eqns)

    rebuild = dataclasses.replace(traced, inputs=[]).rebuild  # without the arrays closed over

    def finish(bundle: Bundle) -> Compiled:
        run = load(mesh, bundle)
        return Compiled(request.fun, bundle, mesh, run, signature, rebuild, keys)

    return Lowered(bundle, passes, finish, retrace, donate_argnums=request.donate_argnums)


# ---- tracing ------------------------------------------------------------------------------------


def _warn_of_wrong_products(jaxpr: Any) -> None:
    """Warns of a computation that this version of JAX gets wrong, with or without a pipeline."""
    todo = [jaxpr]
    while todo:
        eqns = todo.pop().eqns
        if wrong := _compat.reduces_a_wrong_product(eqns):
            warn(
                f"place: JAX 0.10.2 computes wrong values on CPU where it reduces the product"
                f"{_compat.at_source_line(wrong)}, with or without a pipeline "
                f"(github.com/jax-ml/jax/issues/39103). Take JAX 0.11 or later, on Python 3.12, "
                f"or compute the product apart from its reduction."
            )
            return
        todo += [sub for eqn in eqns for sub in jaxprs.sub_jaxprs(eqn)]


def _refuse_refs(traced: jaxprs.Traced) -> None:
    uses = [e for e in traced.jaxpr.eqns if any(map(_compat.is_ref, e.invars))]
    if any(map(_compat.is_ref, traced.jaxpr.jaxpr.invars)):
        raise ValueError(
            f"place: the step reads or writes{max(map(_compat.at_source_line, uses), default='')} "
            f"a jax.new_ref made outside of it, which the ranks of a pipeline cannot share. Pass "
            f"its value, ref[...], and return the new one, or make the ref in the step."
        )


def _make_step(
    request: Request,
    args: tuple[Any, ...],
    signature: Signature,
    inside: AbstractMesh | None,
    in_specs: list[Spec | None],
    traced: jaxprs.Traced,
) -> Step:
    """Makes a flat step of the traced function, the input of the first pass."""
    types = signature.types
    _refuse_refs(traced)
    # Arrays that the step closes over become literals: each rank that reads one gets it once.
    closed_over = traced.inputs[: traced.num_closed_over]
    jaxpr = jaxprs.bind_constants(_flat_step.flatten(traced.jaxpr), closed_over)
    outputs = [v.aval for v in jaxpr.jaxpr.outvars]
    results = traced.rebuild(map(type_of, outputs))
    out_specs = _specs("out_specs", request.out_specs, results, inside)
    pairs = _flat_step.pair_state(types, request.donate_argnums, traced, jaxpr)
    return Step(
        jaxpr,
        _arguments(request, args, signature, jaxpr, in_specs, inside),
        tuple(
            Result(aval, n, becomes=pairs.get(n), spec=spec)
            for n, (aval, spec) in enumerate(zip(outputs, out_specs, strict=True))
        ),
        inside=inside
        and Inside(
            automatic(inside),
            request.zero,
            replicas=request.replica_axis,
        ),
    )


def _arguments(
    request: Request, args: tuple[Any, ...], signature: Signature, jaxpr, in_specs, inside
) -> tuple[Argument, ...]:
    """Makes the records of the arguments, each of which is an array of the caller."""
    leaves, found = jtu.tree_leaves_with_path(args), []
    for n, (i, v, spec) in enumerate(
        zip(signature.arrays, jaxpr.jaxpr.invars, in_specs, strict=True)
    ):
        (position, *_), leaf = leaves[i]
        spec = spec or (replicated(len(v.aval.shape)) if inside is not None else ())
        found.append(
            Argument(
                jtu.keystr(leaves[i][0]),
                v.aval,
                n,
                donated=position.idx in request.donate_argnums,
                fed=isinstance(leaf, Fed),
                spec=spec,
            )
        )
    return tuple(found)


def _specs(what: str, prefix: Any, tree: Any, inside: AbstractMesh | None) -> list[Spec | None]:
    """Finds the spec of each array of a pytree."""
    leaves = jtu.tree_leaves(tree)
    specs: list[Spec | None] = [None] * len(leaves)
    if inside is not None:
        sizes = axis_sizes(inside)
        specs = specs_of_leaves(prefix, tree, sizes, f"place: {what}")
    return [s for s, x in zip(specs, leaves, strict=True) if isinstance(x, jax.ShapeDtypeStruct)]


def _resolve_mesh(
    given: Mesh | None, programs: Sequence[Program], traced: jaxprs.Traced, eqns: Sequence[Eqn]
) -> Mesh:
    count = len(programs)
    mesh = PROVIDED["mesh"](count) if given is None else given
    if mesh.num_ranks == count:
        return mesh
    if mark := _flat_step.unused_mark(traced.jaxpr):
        raise ValueError(
            f"place: pipeline_enter_stage{_compat.at_source_line(mark)} marks where a stage opens, "
            f"but the function has not been cut into stages there: wrap_forward is missing. "
            f"wrap_forward(f) runs each stage on its rank; to train, make a loop of it: "
            f"schedule(microbatch(value_and_grad(wrap_forward(loss)), M), OneFOneB())."
        )
    begins = _first_lines(eqns)
    if not begins:
        raise ValueError(
            f"place: the function has no stages, so that nothing in it runs as a pipeline, but the "
            f"mesh has {mesh.num_ranks} ranks. The update of parameters that lie on several ranks "
            f"belongs in the same step as their gradients: place one function that calls the "
            f"scheduled gradient function, and then the optimizer. To compute with results outside "
            f"of a step, jaxpp.gather(results) brings them to one device first."
        )
    stages = len({stage for program in programs for stage in program.stages})
    per_rank, rest = divmod(stages, mesh.num_ranks)
    tables = [e.params["table"] for e in eqns if is_loop(e)]
    forward = all(t.forward_only for t in tables) and not any(map(is_backward_call, eqns))
    several = f"{'ForwardOnly' if forward else 'Interleaved1F1B'}({per_rank})"
    most = max(len(program.stages) for program in programs)
    held = f"{_counted(stages, 'stage')} on {_counted(count, 'rank')}"
    held += f" ({_counted(most, 'stage')} per rank)"
    given_is = f"the schedule puts {held}"
    if not tables:
        given_is = f"the function has {held} and no schedule: each runs on a rank of its own"
        several = f"schedule(microbatch(fun, M), {several})"
    wanted, left = divmod(stages * mesh.num_ranks, count)
    cut = f"cut into {_counted(wanted, 'stage')} (num_stages=, the names in at=, the marks), or "
    several = f", or give a rank {per_rank} stages: {several}" if per_rank > 1 and not rest else ""
    lines = [line for _, line in sorted(begins.items()) if line]
    raise ValueError(
        f"place: {given_is}, but the mesh has {_counted(mesh.num_ranks, 'rank')}; "
        f"{'' if left else cut}take a mesh of {count} (its devices list may repeat a device)"
        f"{several}." + (f"\nStages begin at {listed(lines)}." if lines else "")
    )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s'[: number != 1]}"


def _first_lines(eqns: Sequence[Eqn]) -> dict[int, str]:
    """Finds the user's line that each stage begins with; an empty string where it has none."""
    found: dict[int, str] = {}
    for eqn in eqns:
        bodies: list[tuple[int, Any]] = []
        if is_loop(eqn):
            tasks = [task.params for task in ScheduledLoop.of(eqn).tasks]
            bodies = [(params["key"].stage, params["jaxpr"]) for params in tasks]
        elif call := stage_of_call(eqn):
            bodies = [(call[0], jaxprs.called_jaxpr(eqn))]
        for stage, body in bodies:
            found.setdefault(stage, next(filter(None, map(_compat.source_line, body.eqns)), ""))
    return found


def _check_arguments(request: Request, args: tuple[Any, ...]) -> None:
    check_positions("donate_argnums", request.donate_argnums, args)
    check_positions("static_argnums", request.static_argnums, args)
    jaxprs.refuse_array_likes(args)
    for keys, leaf in jtu.tree_leaves_with_path(args):
        path = jtu.keystr(keys)
        if _compat.is_tracer(leaf):
            raise ValueError(
                f"place: args{path} is a tracer that has left the jit, grad, vmap or scan that "
                f"made it; return it from there."
            )
        if not jaxprs.is_array(leaf):
            try:
                hash(leaf)
            except TypeError:
                raise ValueError(
                    f"place: args{path} is a {type(leaf).__name__}, which is neither an array "
                    f"nor hashable. Arrays and numbers are traced and all else is static: make it "
                    f"an array, or hashable."
                ) from None


def check_positions(name: str, positions: Iterable[int], args: Sequence[Any]) -> None:
    """Checks that an argument of `place` names positions that the call has."""
    count = len(without_keywords(args))
    for n in positions:
        if not 0 <= n < count:
            raise ValueError(
                f"place: {name} names argument {n}, but the step was called with {count} "
                f"arguments that have a position."
            )


# ---- meshes --------------------------------------------------------------------------------------


def as_mesh(given: Any) -> Mesh | None:
    """Makes a pipeline's mesh of what `place` was given.

    Raises:
        ValueError: it is a mesh of JAX that has no axis of ranks.
        TypeError: it is no mesh.
    """
    if given is None or hasattr(given, "num_ranks"):
        return given
    if isinstance(given, jax.sharding.Mesh):
        shape, names = given.devices.shape, given.axis_names
        if PIPELINE_AXIS in names:
            return PROVIDED["mesh_of"](shape, names, given.devices, given.axis_types)
        ours = (PIPELINE_AXIS, *names[1:])
        raise ValueError(
            f"place: the mesh is one of JAX with the axes {names}, none of which is "
            f"{PIPELINE_AXIS!r}, the axis of the ranks. Name it: jaxpp.MpmdMesh({shape}, {ours})."
        )
    raise TypeError(
        f"place: a mesh is a jaxpp.MpmdMesh, such as jaxpp.MpmdMesh((4,), ('mpmd',)), or a "
        f"jaxpp.RemoteMpmdMesh; got {given!r}."
    )
