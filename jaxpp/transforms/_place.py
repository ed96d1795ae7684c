"""`place`: compiles a step to one program per rank, and runs it on a mesh."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import AbstractMesh, NamedSharding

from jaxpp import _compat, _jaxprs
from jaxpp._program import Bundle, Fed, Mesh, Program, Role, Step, default_mesh
from jaxpp._specs import Spec, axis_sizes, explicit_axes, only, partition_spec
from jaxpp.transforms import (
    _assign_specs,
    _automatic_axes,
    _batch_axes,
    _constraints,
    _deferred_sums,
    _distribute,
    _in_specs,
    _initialize,
    _join_ranks,
    _loop,
    _lower,
    _marks,
    _optimizer_shards,
    _parameter_shards,
    _placement,
    _roles,
    _schedule,
)
from jaxpp.transforms._signature import Signature


def place(
    fun: Callable,
    mesh: Mesh | None = None,
    *,
    donate_argnums: int | Sequence[int] = (),
    in_specs: Any = None,
    out_specs: Any = None,
    zero1: str | Sequence[str] = (),
    zero3: str | Sequence[str] = (),
    feed: Mapping[int, Callable[[Any], Any]] | None = None,
) -> "Placed":
    """Partitions the whole of `fun` into one program per rank, and runs them on a mesh.

    The outermost transform, as `jax.jit` is: around a train step whose loops `schedule` has
    partitioned. The stages' tasks run where the schedule's table puts them, and everything around
    the loops where its largest operand lives. Parameters and optimizer state stay on the ranks that
    use them: results are left where the next call needs them.

    Args:
        fun: a function of pytrees. JAX and NumPy arrays, of any shape and dtype, are traced; every
            other leaf is static and must be hashable: another value traces again, as do other
            shapes and dtypes.
        mesh: where to run; by default a `jaxpp.MpmdMesh` over the first `jax.devices()`.
        donate_argnums: the positions of arguments whose memory the step may reuse. Their arrays are
            deleted by the call.
        in_specs: how the arguments are split over the axes inside a rank, on a mesh that has such:
            a prefix of the tuple of arguments, of `jax.sharding.PartitionSpec`s. In place of one
            may be a list of rules `[(pattern, spec), ...]`: a leaf takes the spec of the first
            pattern that `re.search` finds in its path, such as `blocks.0.mlp.up.weight`. None, and
            what no rule speaks of, is whole on each device.
        out_specs: the same for the results. By default a result that is the next call's argument,
            such as the parameters, is split as that is, and others as they come out.
        zero1: the axis, or axes, inside a rank over which optimizer state is split, such as
            `"data"`: whatever the step hands on to the next one and no stage reads. Gradients are
            then scattered to where their state is, and parameters gathered, once a step.
        zero3: the axis, or axes, over which parameters are split as well as optimizer state. Each
            task gathers the parameters that it reads, and drops them when it ends; gradients are
            accumulated whole, and scattered once a step.
        feed: for the positions of some arguments a function that loads the argument: the step is
            then called with what the function takes, such as the number of the batch. On a
            `jaxpp.RemoteMpmdMesh` each rank that reads the argument calls the function itself, and
            nothing goes through this process; it has to give the same everywhere.

    Returns:
        A callable with `lower(*args)`, as `jax.jit` gives. It cannot be transformed further.

    Raises:
        ValueError: for a loop without a schedule, a mesh with another number of ranks, a donated
            array that is used again, an argument that is neither array nor hashable, or a spec that
            does not fit its array or the mesh.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> def loss(w, x):
        ...     h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w))
        ...     return jnp.mean((h @ w) ** 2)
        >>> grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss)), 4)
        >>> grad = jaxpp.schedule(grad, jaxpp.schedules.OneFOneB())
        >>> mesh = jaxpp.MpmdMesh((2,), ("mpmd",), devices=[jax.devices()[0]] * 2)
        >>> step = jaxpp.place(lambda w, x: w - 0.1 * grad(w, x), mesh)
        >>> step(jnp.eye(2), jnp.ones((8, 2))).shape
        (2, 2)
    """
    if isinstance(donate_argnums, int):
        donate_argnums = (donate_argnums,)
    inside = getattr(mesh, "inside", None)
    given = {
        "in_specs": in_specs is not None,
        "out_specs": out_specs is not None,
        "zero1": bool(zero1),
        "zero3": bool(zero3),
    }
    for name, is_given in given.items():
        if is_given and inside is None:
            raise ValueError(
                f"place: {name} splits arrays inside a rank, but each rank of the mesh is one "
                f"device. Give the mesh further axes: jaxpp.MpmdMesh((2, 2), ('mpmd', 'data'))."
            )
    parameter_axes = _axes_inside("zero3", zero3, inside)
    optimizer_axes = parameter_axes or _axes_inside("zero1", zero1, inside)
    zero = {Role.PARAMETER: parameter_axes, Role.OPTIMIZER: optimizer_axes}
    return Placed(fun, mesh, tuple(donate_argnums), in_specs, out_specs, zero, dict(feed or {}))


def _axes_inside(
    name: str, given: str | Sequence[str], inside: AbstractMesh | None
) -> tuple[str, ...]:
    """The axes that an argument of `place` names."""
    axes = (given,) if isinstance(given, str) else tuple(given)
    known = tuple(axis_sizes(inside))
    for axis in axes:
        if axis not in known or axes.count(axis) > 1:
            twice = "twice" if axis in known else f"which is no axis inside a rank: {known}"
            raise ValueError(f"place: {name}={given!r} names {axis!r}, {twice}.")
    return axes


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A step lowered to programs, before it is compiled."""

    bundle: Bundle
    _finish: Callable[[Bundle], "Compiled"]

    @property
    def programs(self) -> tuple[Program, ...]:
        """What each rank runs."""
        return self.bundle.programs

    def as_text(self) -> str:
        """The programs as text, one instruction a line."""
        return self.bundle.as_text()

    def compile(self) -> "Compiled":
        """Compiles the computations and loads the programs on the mesh."""
        return self._finish(self.bundle)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A step compiled for arguments of given types."""

    bundle: Bundle
    _mesh: Mesh
    _run: Step
    _signature: "Signature"
    _rebuild: Callable[[list[Any]], Any]

    @property
    def programs(self) -> tuple[Program, ...]:
        """What each rank runs."""
        return self.bundle.programs

    @property
    def input_shardings(self) -> tuple[Any, ...]:
        """Where the step reads its arguments: a pytree for each, of `jax.sharding.Sharding`s.

        On a `RemoteMpmdMesh`, of `RemoteSharding`s. Leaves that are not arrays, and arrays that
        nothing reads, are None.
        """
        leaves: list[Any] = [None] * len(self._signature.avals)
        for n, sharding in zip(self._signature.arrays, self._run.input_shardings(), strict=True):
            leaves[n] = sharding
        return jtu.tree_unflatten(self._signature.tree, leaves)

    def as_text(self) -> str:
        """The programs as text, one instruction a line."""
        return self.bundle.as_text()

    def describe(self) -> Any:
        """What each rank holds, sends and reduces in a step, as `Placed.describe` gives it."""
        return self._run.describe()

    def initialize(self, init_fn: Callable, *args: Any) -> Any:
        """Makes the step's first arguments where it reads them, as `Placed.initialize` does.

        Raises:
            TypeError: `init_fn` makes something else than the step was compiled for; the message
                names the first leaf that differs.
        """
        traced = _initialize.trace(init_fn, args)
        wanted = [x if a is None else a for x, a in zip(*self._signature.leaves, strict=True)]
        state = _initialize.first_arguments(traced)
        _initialize.check(state, jtu.tree_unflatten(self._signature.tree, wanted))
        return self.run_initializer(traced, args)

    def run_initializer(self, traced: _jaxprs.Traced, args: Sequence[Any]) -> Any:
        """Runs an initialiser that is known to match; `traced` is at `args`."""
        paths = [jtu.keystr(p) for p, x in jtu.tree_leaves_with_path(args) if _jaxprs.is_array(x)]
        names = [*(f" closed over, {n}" for n in range(traced.num_closed_over)), *paths]
        bundle = _initialize.lower(traced, self.bundle, names)
        return traced.rebuild(self._mesh.load(bundle)(traced.inputs))

    def __call__(self, *args: Any) -> Any:
        """Runs the step; the arguments must have the types it was compiled for."""
        leaves, tree = jtu.tree_flatten(args)
        if not self._signature.matches(leaves, tree):
            raise TypeError(
                "The step was compiled for other arguments: "
                + self._signature.difference(args)
                + ". Call the placed function itself, which compiles for each."
            )
        return self.call(leaves)

    def call(self, leaves: Sequence[Any]) -> Any:
        """Runs the step on leaves that are known to match."""
        return self._rebuild(self._run([leaves[i] for i in self._signature.arrays]))


class Placed:
    """A function partitioned over the ranks of a mesh; made by `place`."""

    def __init__(
        self,
        fun: Callable,
        mesh: Mesh | None,
        donate_argnums: tuple[int, ...],
        in_specs: Any,
        out_specs: Any,
        zero: Mapping[Role, tuple[str, ...]],
        feed: Mapping[int, Callable[[Any], Any]],
    ):
        functools.update_wrapper(self, fun)
        self._feed = feed
        self._in_specs = in_specs
        self._out_specs = out_specs
        self._zero = zero
        self._fun = fun
        self._mesh = mesh
        self._donate_argnums = donate_argnums
        self._cache: list[Compiled] = []

    def __repr__(self):
        return f"<placed {getattr(self._fun, '__name__', self._fun)}>"

    def __call__(self, *args: Any) -> Any:
        """Runs the step; traces and compiles it where the arguments have new types.

        An `int` that differs from the calls before (flax's `TrainState.step`) is an array from then
        on, unless the step needs to know its value: every other static leaf compiles it again.
        """
        args = self._fed(args)
        leaves, tree = jtu.tree_flatten(args)
        compiled = self._known(leaves, tree)
        if compiled is None:
            counted = self._with_counts(leaves, tree)
            compiled = self._known(counted, tree)
            if compiled is None and counted is not leaves:
                try:
                    compiled = self._compile(jtu.tree_unflatten(tree, counted))
                except jax.errors.JAXTypeError:  # a shape or a branch depends on it
                    counted = leaves
            leaves = counted
        return (compiled or self._compile(args)).call(leaves)

    def _known(self, leaves: Sequence[Any], tree: Any) -> Compiled | None:
        """What has been compiled for such leaves; it is now the last one used."""
        cache = self._cache
        for i, compiled in enumerate(cache):
            if compiled._signature.matches(leaves, tree):
                if i:
                    cache.insert(0, cache.pop(i))
                return compiled
        return None

    def _with_counts(self, leaves: Sequence[Any], tree: Any) -> Sequence[Any]:
        """The leaves, with what is known to change from call to call as arrays."""
        for compiled in self._cache:
            if counts := compiled._signature.changed_counts(leaves, tree):
                return [jnp.asarray(x) if i in counts else x for i, x in enumerate(leaves)]
        return leaves

    def _compile(self, args: tuple[Any, ...]) -> Compiled:
        self._cache.insert(0, self._lower(args).compile())
        return self._cache[0]

    def initialize(self, init_fn: Callable, *args: Any, rest: Sequence[Any] = ()) -> Any:
        """Makes the step's first arguments where the step reads them.

        Each rank runs only the part of `init_fn` that makes what it reads, so that the whole is
        nowhere: beside its own share, a rank holds what making one array takes. Of parameters that
        are stacked over layers it makes those of its layers, where `init_fn` makes one layer at a
        time, under `jax.vmap` or `jax.lax.map` over keys; else there is a warning.

        The values are those of `init_fn(*args)`, bit for bit, on any mesh: each operation is
        compiled by itself, as in a call outside of `jax.jit`, which would round in another way.
        Exceptions may differ in the last bit: what JAX inlines when it traces, such as `jnp.mean`,
        and what is jitted in `init_fn`, of which a rank compiles only what it needs.

        Args:
            init_fn: a function of pytrees, which does not print. It returns the step's first
                argument, or a tuple of its first arguments. Leaves that are not arrays are static,
                as in the step; a NumPy array becomes a JAX array.
            *args: its arguments, such as a random key.
            rest: the other arguments of the step, or `jax.ShapeDtypeStruct`s in place of their
                arrays: the step is compiled for them, and their values are not used.

        Returns:
            What `init_fn` returns. Each array is on the devices, or the ranks, that read it; on the
            first rank, if none does.

        Raises:
            ValueError: `init_fn` prints or has another effect, or the step cannot be placed.

        Example:
            >>> import jax, jax.numpy as jnp, jaxpp
            >>> def loss(weights, x):
            ...     h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ weights[0]))
            ...     return jnp.mean((h @ weights[1]) ** 2)
            >>> grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss)), 4)
            >>> mesh = jaxpp.MpmdMesh((2,), devices=[jax.devices()[0]] * 2)
            >>> step = jaxpp.place(jaxpp.schedule(grad, jaxpp.schedules.OneFOneB()), mesh)
            >>> def make_weights(key):
            ...     return [jax.random.normal(k, (2, 2)) for k in jax.random.split(key)]
            >>> x = jnp.ones((8, 2))
            >>> weights = step.initialize(make_weights, jax.random.key(0), rest=(x,))
            >>> grads = step(weights, x)
        """
        traced = _initialize.trace(init_fn, args)
        step_args = self._fed((*_initialize.first_arguments(traced), *rest))
        compiled = self._known(*jtu.tree_flatten(step_args)) or self._compile(step_args)
        return compiled.run_initializer(traced, args)

    def _fed(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments, with those that are loaded by a function in place of what it takes."""
        if not self._feed:
            return args
        _check_positions("feed", self._feed, args)
        # Ranks in other processes load for themselves.
        load = getattr(self._mesh, "feed", lambda load, value: load(value))
        return tuple(load(self._feed[n], x) if n in self._feed else x for n, x in enumerate(args))

    @property
    def programs(self) -> tuple[Program, ...]:
        """What each rank runs, of the last call."""
        return self.bundle.programs

    @property
    def bundle(self) -> Bundle:
        """The programs of the last call, and what they share."""
        if not self._cache:
            raise ValueError(
                "The placed function has not been called yet; use lower(*args).programs."
            )
        return self._cache[0].bundle

    def as_text(self) -> str:
        """The programs of the last call as text."""
        return self.bundle.as_text()

    def describe(self) -> Any:
        """What each rank holds, sends and reduces in a step, as it was called last.

        Returns:
            A `jaxpp.runtime.Description`: for each rank its devices, the bytes of parameters,
            optimizer state, accumulators and activations on each of them, the bytes that it sends
            to other ranks, and the collectives between its devices. `str` makes it a table,
            `as_json` JSON.

        Raises:
            ValueError: it has not been called yet.

        Example:
            >>> import jax, jax.numpy as jnp, jaxpp
            >>> def loss(w, x):
            ...     h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
            ...     return jnp.mean((h @ w[1]) ** 2)
            >>> grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss)), 4)
            >>> mesh = jaxpp.MpmdMesh((2,), devices=[jax.devices()[0]] * 2)
            >>> step = jaxpp.place(jaxpp.schedule(grad, jaxpp.schedules.OneFOneB()), mesh)
            >>> grads = step([jnp.eye(8), jnp.eye(8)], jnp.ones((16, 8)))
            >>> [(rank.parameter_bytes, rank.sent_bytes) for rank in step.describe().ranks]
            [(256, {1: 512}), (256, {0: 512})]
        """
        self.bundle  # noqa: B018  says what is wrong where there is none
        return self._cache[0].describe()

    def lower(self, *args: Any) -> Lowered:
        """Traces the step at arguments, or at `jax.ShapeDtypeStruct`s that stand for arrays."""
        return self._lower(self._fed(args))

    def _lower(self, args: tuple[Any, ...]) -> Lowered:
        inside = getattr(self._mesh, "inside", None)
        insides = getattr(self._mesh, "insides", (inside,))
        lowered = {own: self._lower_alike(args, own) for own in dict.fromkeys(insides)}
        first = lowered[insides[0]]
        if len(lowered) == 1:
            return first
        bundle = _join_ranks.join_ranks([lowered[own].bundle for own in insides])
        return dataclasses.replace(first, bundle=bundle)

    def _lower_alike(self, args: tuple[Any, ...], inside: AbstractMesh | None) -> Lowered:
        """The step as if all ranks were alike."""
        if inside is None:
            return self._lower_inside(args, None)
        # Constraints in the model name axes alone, and mean those of the rank that they run on.
        with jax.sharding.use_abstract_mesh(_automatic_axes.automatic(inside)):
            return self._lower_inside(args, inside)

    def _lower_inside(self, args: tuple[Any, ...], inside: AbstractMesh | None) -> Lowered:
        leaves, tree = jtu.tree_flatten(args)
        paths = [jtu.keystr(p) for p, _ in jtu.tree_flatten_with_path(args)[0]]
        self._check_arguments(args, leaves, paths)
        signature = Signature.of(leaves, tree)
        types = [x if a is None else a for x, a in zip(leaves, signature.avals, strict=True)]
        typed = jtu.tree_unflatten(tree, types)
        in_specs = self._specs("in_specs", self._in_specs, typed, inside)
        traced = self._trace(typed, in_specs, inside)
        _constraints.check_constraints(traced.jaxpr, inside)
        jaxpr = _flatten(traced.jaxpr)
        constants, num_closed = traced.inputs, traced.num_closed_over
        jaxpr = _bind_constants(jaxpr, constants[:num_closed])
        donated_leaves = _leaves_of(args, self._donate_argnums)
        donated = frozenset(n for n, i in enumerate(signature.arrays) if i in donated_leaves)
        pairs = _pair_state(args, self._donate_argnums, traced, jaxpr)
        # What ranks load themselves they load whole.
        fed = frozenset(n for n, i in enumerate(signature.arrays) if isinstance(leaves[i], Fed))
        parts = _distribute.distribute(jaxpr, pairs, fed)
        flat_pairs = parts.flat_pairs(pairs)
        roles = _roles.roles_of(parts.jaxpr, flat_pairs)
        split, in_tasks = None, ()
        # Ranks that differ decide alike, by sizes that those of each divide.
        sizes = axis_sizes(getattr(self._mesh, "inside", None))
        if inside is not None:
            results = traced.rebuild([_as_type(v.aval) for v in jaxpr.jaxpr.outvars])
            out_specs = self._specs("out_specs", self._out_specs, results, inside)
            split, in_tasks = _split(
                parts, in_specs, out_specs, flat_pairs, roles, inside, self._zero, sizes
            )
        jaxpr, donated = _own_results(parts.jaxpr, parts.flat_arguments(donated))
        if split is not None:
            jaxpr, axes = _batch_axes.split_slices(jaxpr, split.arguments, sizes)
            jaxpr = _parameter_shards.gather_in_tasks(jaxpr, split.arguments, in_tasks, sizes)
            scatter = set(axes) == set(self._zero[Role.OPTIMIZER])
            jaxpr = _deferred_sums.defer_sums(
                jaxpr, split.arguments, axes, sizes, own=split.sizes, scatter=scatter
            )
        placement = _placement.place_equations(
            jaxpr, flat_pairs, parts.floating, parts.gathered.keys()
        )
        names = parts.flat_names([paths[i] for i in signature.arrays])
        bundle = _lower.lower(jaxpr, placement, donated, names, parts.gathered, split)
        bundle = dataclasses.replace(
            bundle, in_cuts=parts.arguments, out_cuts=parts.results, roles=roles
        )
        mesh = self._resolve_mesh(len(bundle.programs))

        def finish(bundle: Bundle) -> Compiled:
            return Compiled(bundle, mesh, mesh.load(bundle), signature, traced.rebuild)

        return Lowered(bundle, finish)

    def _trace(
        self, args: Any, in_specs: Sequence[Spec | None], inside: AbstractMesh | None
    ) -> _jaxprs.Traced:
        """Traces the step; explicit axes are automatic from then on."""
        explicit = () if inside is None else explicit_axes(inside)
        if inside is None or not explicit:
            return _jaxprs.trace(self._fun, args)
        with jax.sharding.use_abstract_mesh(inside):
            traced = _jaxprs.trace(self._fun, _with_types(args, in_specs, inside, explicit))
        jaxpr = _automatic_axes.with_automatic_axes(traced.jaxpr)
        return dataclasses.replace(traced, jaxpr=jaxpr)

    def _specs(
        self, what: str, prefix: Any, tree: Any, inside: AbstractMesh | None
    ) -> list[Spec | None]:
        """The spec of each array of a pytree."""
        leaves = jtu.tree_leaves(tree)
        if inside is None:
            return [None] * len(leaves)
        sizes = axis_sizes(inside)
        specs = _in_specs.specs_of_leaves(prefix, tree, sizes, f"place: {what}")
        return [s for s, x in zip(specs, leaves, strict=True) if hasattr(x, "shape")]

    def _resolve_mesh(self, num_ranks: int) -> Mesh:
        mesh = default_mesh.get()(num_ranks) if self._mesh is None else self._mesh
        if mesh.num_ranks != num_ranks:
            raise ValueError(
                f"place: the schedule runs on {num_ranks} ranks, but the mesh has "
                f"{mesh.num_ranks}; make them equal (a mesh whose devices list repeats a device "
                f"lets ranks share it)."
            )
        return mesh

    def _check_arguments(self, args, leaves, paths) -> None:
        _check_positions("donate_argnums", self._donate_argnums, args)
        for leaf, path in zip(leaves, paths, strict=True):
            if _compat.is_tracer(leaf):
                raise ValueError(
                    f"place: args{path} is being traced: a placed function cannot be inside jit, "
                    f"grad, vmap or scan. Transform the function first and place the result."
                )
            if not _jaxprs.is_array(leaf):
                try:
                    hash(leaf)
                except TypeError:
                    raise ValueError(
                        f"place: args{path} is a {type(leaf).__name__}, which is neither an array "
                        f"nor hashable. Arrays are traced and all else is static: make it an "
                        f"array, or hashable."
                    ) from None


def _check_positions(name: str, positions: Iterable[int], args: Sequence[Any]) -> None:
    for n in positions:
        if not 0 <= n < len(args):
            raise ValueError(
                f"place: {name} names argument {n}, but the step was called with {len(args)} "
                f"arguments."
            )


def _split(
    parts: _distribute.Distributed,
    in_specs: Sequence[Spec | None],
    out_specs: Sequence[Spec | None],
    pairs: Mapping[int, int],
    roles: Sequence[Role],
    inside: AbstractMesh,
    zero: Mapping[Role, tuple[str, ...]],
    sizes: Mapping[str, int],
) -> tuple[_assign_specs.Inside, tuple[Spec, ...]]:
    """How the arguments and results of a step are split inside a rank, part by part.

    Also gives how tasks are to have the arguments.
    """
    avals = parts.jaxpr.in_avals
    arguments = list(_in_specs.replicated_where_none(parts.of_arguments(in_specs), avals))
    in_tasks = tuple(arguments)
    for n, role in enumerate(roles):
        if axes := zero.get(role):
            own = _optimizer_shards.scattered(arguments[n], avals[n].shape, axes, sizes)
            arguments[n] = own or arguments[n]
    results = [
        arguments[pairs[n]] if spec is None and n in pairs else spec
        for n, spec in enumerate(parts.of_results(out_specs))
    ]
    own = _automatic_axes.automatic(inside)
    return _assign_specs.Inside(own, tuple(arguments), tuple(results)), in_tasks


def _with_types(
    types: Any, specs: Sequence[Spec | None], inside: AbstractMesh, explicit: Sequence[str]
) -> Any:
    """The types of arguments, with how they are split over the explicit axes inside a rank."""
    leaves, tree = jtu.tree_flatten(types)
    rest = iter(specs)
    typed = [
        x.update(sharding=NamedSharding(inside, partition_spec(only(next(rest) or (), explicit))))
        if isinstance(x, jax.ShapeDtypeStruct)
        else x
        for x in leaves
    ]
    return jtu.tree_unflatten(tree, typed)


def _as_type(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _flatten(jaxpr):
    """The step with all calls inlined, but for the calls of stages outside of loops."""
    flat = _jaxprs.inline(jaxpr, lambda e: not _marks.is_stage_call(e))
    for eqn in flat.eqns:
        if _schedule.is_microbatch_loop(eqn):
            raise ValueError(
                f"place: the microbatch loop{_compat.at_source_line(eqn)} has no schedule; wrap "
                f"the function: schedule(grad_fn, jaxpp.schedules.OneFOneB())."
            )
        if not _loop.is_loop(eqn) and _jaxprs.contains(eqn, _loop.is_loop):
            raise ValueError(
                f"place: a scheduled loop is inside a `{eqn.primitive.name}`"
                f"{_compat.at_source_line(eqn)}; a pipeline cannot start there. Move it to "
                f"the top of the step."
            )
    return _compat.eliminate_dead_code(flat, [True] * len(flat.jaxpr.outvars))


def _bind_constants(jaxpr, values: Sequence[Any]):
    """Makes literals of what the step closed over: each rank that reads one gets it once."""
    known = _jaxprs.Substitution(
        (v, _jaxprs.jex.Literal(value, v.aval))
        for v, value in zip(jaxpr.jaxpr.invars, values, strict=False)
    )
    return _compat.make_closed_jaxpr(
        jaxpr.jaxpr.invars[len(values) :],
        [known(v) for v in jaxpr.jaxpr.outvars],
        [known.rename(e) for e in jaxpr.eqns],
    )


def _own_results(jaxpr, donated: frozenset[int]):
    """Copies a result that is another result, or an argument that stays.

    Also gives the arguments that are donated still: not those that are results as they are.
    """
    invars, eqns, outvars = jaxpr.jaxpr.invars, list(jaxpr.eqns), []
    taken = {v for n, v in enumerate(invars) if n not in donated}
    for v in jaxpr.jaxpr.outvars:
        if not _jaxprs.is_literal(v) and v in taken:
            copy = jax.make_jaxpr(jnp.copy)(v.aval).eqns[0]
            own = _jaxprs.fresh_var(v)
            eqns.append(copy.replace(invars=[v], outvars=[own]))
            v = own
        outvars.append(v)
        taken.update(() if _jaxprs.is_literal(v) else (v,))
    consumed = frozenset(n for n in donated if invars[n] not in taken)
    return _compat.make_closed_jaxpr(invars, outvars, eqns), consumed


def _leaves_of(args: Sequence[Any], numbers: Sequence[int]) -> set[int]:
    """The numbers of the leaves of the arguments with the given numbers."""
    found, start = set(), 0
    for n, arg in enumerate(args):
        size = len(jtu.tree_leaves(arg))
        if n in numbers:
            found.update(range(start, start + size))
        start += size
    return found


def _pair_state(args, donate_argnums, traced: _jaxprs.Traced, jaxpr) -> dict[int, int]:
    """The outputs that are the next step's arguments: subtrees of the result like an argument.

    An argument that is a single array is matched only if it is donated, since a scalar loss looks
    like a scalar argument.
    """
    # Plain objects stand for the outputs: what JAX asks user-defined pytrees to put up with.
    outputs = [object() for _ in jaxpr.jaxpr.outvars]
    number_of = {id(o): n for n, o in enumerate(outputs)}
    numbered = traced.rebuild(outputs)
    in_avals = [(v.aval.shape, v.aval.dtype) for v in jaxpr.jaxpr.invars]
    out_avals = [(v.aval.shape, v.aval.dtype) for v in jaxpr.jaxpr.outvars]
    candidates, start = [], 0
    for n, arg in enumerate(args):
        leaves, tree = jtu.tree_flatten(arg)
        arrays = [_jaxprs.is_array(leaf) for leaf in leaves]
        numbers = range(start, start + sum(arrays))
        start += sum(arrays)
        if numbers and (n in donate_argnums or not jtu.treedef_is_leaf(tree)):
            candidates.append((tree, arrays, numbers))
    pairs: dict[int, int] = {}

    def match(node):
        leaves, tree = jtu.tree_flatten(node)
        arrays = [id(leaf) in number_of for leaf in leaves]
        outs = [number_of[id(leaf)] for leaf in leaves if id(leaf) in number_of]
        for candidate in candidates:
            if candidate[0] == tree and candidate[1] == arrays and all(
                in_avals[i] == out_avals[o] for i, o in zip(candidate[2], outs, strict=True)
            ):  # fmt: skip
                candidates.remove(candidate)
                pairs.update(zip(outs, candidate[2], strict=True))
                return
        children = jtu.tree_leaves(node, is_leaf=lambda x: x is not node)
        if len(children) > 1 or (children and children[0] is not node):
            for child in children:
                match(child)

    match(numbered)
    return pairs
