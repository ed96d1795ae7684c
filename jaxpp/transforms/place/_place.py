"""`place`: compiles a step to one program per rank, and runs it on a mesh."""

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, get_args

import jax
import jax.tree_util as jtu
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import PyTree

from jaxpp import _compat, jaxprs
from jaxpp._messages import is_called_by_jaxpp, warn
from jaxpp._program import Bundle, Mesh, Role
from jaxpp._specs import axis_sizes
from jaxpp._spellings import names_ours
from jaxpp.jaxprs import P, R, check_arrays, without_collections, without_mesh
from jaxpp.transforms._signature import Signature, as_positional, positional
from jaxpp.transforms.graph import Fuse, TaskGraph
from jaxpp.transforms.initialize import first_arguments, trace_initializer
from jaxpp.transforms.place._compiled import Compiled, HasPrograms, Lowered
from jaxpp.transforms.place._lower_step import Request, as_mesh, check_positions, lower_step

#: A prefix of a pytree of specs, or rules in place of one.
Specs = PyTree[PartitionSpec | Sequence[tuple[str, PartitionSpec]]]


@names_ours
def place(
    fun: Callable[P, R],
    mesh: Mesh | jax.sharding.Mesh | None = None,
    *,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    in_specs: Specs | None = None,
    out_specs: Specs | None = None,
    zero1: str | Sequence[str] = (),
    zero3: str | Sequence[str] = (),
    replica_axis: str = "data",
    fuse: Fuse = "none",
    feed: Mapping[int, Callable[..., PyTree]] | None = None,
) -> "Placed[P, R]":
    """Partitions the whole of `fun` into one program per rank, and runs them on a mesh.

    It is the outermost transform, like `jax.jit`, around a train step whose loops `schedule` has
    partitioned. The tasks of stages run where the schedule's table puts them. An operation around
    the loops runs where its largest operand is. Parameters and optimizer state stay on the ranks
    that use them, and results stay where the next call needs them.

    Args:
        fun: a function of pytrees. JAX and NumPy arrays, of any shape and dtype, are traced, and
            Python's numbers as in `jax.jit`, but for those in an Equinox module. Every other leaf
            is static and must be hashable: another value traces again, as do other shapes, dtypes
            and settings of JAX. A keyword argument counts at its position in `fun`.
        mesh: where to run; by default a `jaxpp.MpmdMesh` over the first `jax.devices()`. A mesh of
            `jax.make_mesh` with an axis `"mpmd"` counts as the `jaxpp.MpmdMesh` of its devices.
        donate_argnums: the positions of arguments whose memory the step may reuse. Their arrays are
            deleted by the call.
        static_argnums: the positions of arguments whose numbers are static, too: where the step
            needs a value, for a shape, a branch, or as a key.
        in_specs: how the arguments are split over the axes inside a rank, on a mesh that has such:
            a prefix of the tuple of arguments, of `jax.sharding.PartitionSpec`s. In place of one
            may be a list of rules `[(pattern, spec), ...]`: a leaf takes the spec of the first
            pattern that `re.search` finds in its path, such as `blocks.0.mlp.up.weight`. With None,
            an array is whole on each device; so is one that no rule names, and one that `fun` takes
            by keyword alone.
        out_specs: the same for the results. By default a result that is the next call's argument,
            such as the parameters, is split as that argument is; others are split as the step
            makes them.
        zero1: the axis, or axes, inside a rank over which optimizer state is split, such as
            `"data"`. Optimizer state is all that the step hands on to the next one and no stage
            reads. Gradients of replicas along the axis are then scattered to their state's devices,
            and parameters gathered, once a step.
        zero3: the axis, or axes, over which parameters are split as well as optimizer state. Each
            task gathers the parameters that it reads, and drops them when it ends, unless the
            schedule has tasks for that (`jaxpp.schedules.Gather`); gradients are accumulated whole,
            and scattered once a step. Without replicas along the axis, XLA
            chooses the collectives.
        replica_axis: the axis inside a rank whose n devices have the D replicas of
            `microbatch(..., replicas=D)` to themselves, D / n each: a task has no collective over
            it, and their sums are reduced once a step. A mesh without that axis, or with one device
            along it, runs the replicas of a rank one after the other. A batch without replicas that
            is split over an axis has an all-reduce of the gradients in each backward task; there is
            a warning.
        fuse: `"pairs"` makes one computation of two tasks that the table has run together
            (`Table.overlaps`; DualPipe has such), so that XLA may run them at the same time. Notes
            in `as_text()` say which pairs stay apart, and why. `"chains"` does the same with all
            tasks of a rank that have no message between them: fewer calls, and more to compile.
        feed: for the positions of some arguments a function that loads the argument: the step is
            then called with the function's own argument, such as the number of the batch. On a
            `jaxpp.RemoteMpmdMesh` each rank that reads the argument calls the function itself, and
            nothing goes through this process; the function has to give the same everywhere.

    Returns:
        A callable with `lower(*args)`, as `jax.jit` gives. Inside `jit`, `grad`, `vmap`,
        `make_jaxpr` and `eval_shape` it is `fun`; where it then runs, a warning says that its ranks
        do not.

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
    if not isinstance(feed, Mapping | None):
        raise TypeError(
            f"place: feed is a mapping from the position of an argument to the function that loads "
            f"it, {{1: load}}, got a {type(feed).__name__}."
        )
    donated, static = (
        (n,) if isinstance(n, int) else tuple(n) for n in (donate_argnums, static_argnums)
    )
    mesh = as_mesh(mesh)
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
    if fuse not in get_args(Fuse):
        raise ValueError(f"place: fuse is one of {get_args(Fuse)}, got {fuse!r}.")
    if replica_axis != "data":
        _axes_inside("replica_axis", replica_axis, inside)
    parameter_axes = _axes_inside("zero3", zero3, inside)
    optimizer_axes = _axes_inside("zero1", zero1, inside) or parameter_axes
    if parameter_axes and optimizer_axes != parameter_axes:
        raise ValueError(
            f"place: zero3={zero3!r} splits optimizer state with the parameters, got "
            f"zero1={zero1!r}; leave zero1 out."
        )
    zero = {Role.PARAMETER: parameter_axes, Role.OPTIMIZER: optimizer_axes}
    request = Request(
        positional(fun), mesh, donated, static, in_specs, out_specs, zero, replica_axis, fuse
    )
    return Placed(request, dict(feed or {}))


def _axes_inside(
    name: str, given: str | Sequence[str], inside: AbstractMesh | None
) -> tuple[str, ...]:
    """Finds the axes that an argument of `place` names, and checks that they are inside a rank."""
    if not isinstance(given, Iterable):
        raise ValueError(f"place: {name} is the name of an axis inside a rank, got {given!r}.")
    axes = (given,) if isinstance(given, str) else tuple(given)
    known = tuple(axis_sizes(inside))
    for axis in axes:
        if axis not in known or axes.count(axis) > 1:
            twice = "twice" if axis in known else f"which is no axis inside a rank: {known}"
            raise ValueError(f"place: {name}={given!r} names {axis!r}, {twice}.")
    return axes


#: The number of compiled steps that a placed function keeps: one for each signature of a call.
KEPT = 64

#: The number of values of static leaves for which a step is compiled before it warns.
MANY = 8


class Placed(HasPrograms, Generic[P, R]):
    """A function partitioned over the ranks of a mesh; made by `place`."""

    __name__: str
    __wrapped__: Callable[..., Any]

    def __init__(self, request: Request, feed: Mapping[int, Callable[..., PyTree]]):
        functools.update_wrapper(self, request.fun)
        self._feed = feed
        self._request = request
        self._lock = threading.RLock()
        self._has_warned = False
        # The step that was called last comes first.
        self._cache: list[Compiled] = []

    @property
    def mesh(self) -> Mesh | None:
        """The mesh that `place` was given; None for the default."""
        return self._request.mesh

    def __repr__(self):
        return f"<placed {getattr(self._request.fun, '__name__', self._request.fun)}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the step; traces and compiles it where `jax.jit` would trace it anew.

        Inside a transformation of JAX, and under `jax.disable_jit`, calls the function that was
        placed: without the ranks, of which a warning tells.
        """
        if _compat.is_tracing() or _compat.is_jit_disabled():
            self._warn_of_no_pipeline()
            return self._request.fun(*self._arguments(args, kwargs, here=True))
        return self._run(*args, **kwargs)

    def _warn_of_no_pipeline(self) -> None:
        """Warns, once, where the function runs as the plain one, without its ranks."""
        devices = getattr(self.mesh, "devices", None)
        alone = devices is not None and len(set(devices)) < 2
        if self._has_warned or alone or _compat.is_jit_disabled():
            return
        if is_called_by_jaxpp() or _compat.looks_on():
            return
        self._has_warned = True
        warn(
            f"{self!r} is called inside a transformation of JAX, such as jax.jit, "
            f"eqx.filter_jit or jax.grad, where it is the plain function: it runs without its "
            f"ranks, on one device. Let place be outermost: step = jaxpp.place(train_step, mesh), "
            f"and call step itself. It compiles, and donates (donate_argnums), as jax.jit does."
        )

    @without_mesh
    def _run(self, *args: Any, **kwargs: Any) -> Any:
        compiled, leaves = self.compiled_for(*args, **kwargs)
        return compiled.call(leaves)

    @without_mesh
    def compiled_for(self, *args: Any, **kwargs: Any) -> tuple[Compiled, list[Any]]:
        """Returns the step compiled for such arguments, and their leaves."""
        args = self._arguments(args, kwargs)
        leaves, tree = jtu.tree_flatten(args)
        context = _compat.trace_context()
        cache = self._cache
        with self._lock:
            for i, compiled in enumerate(cache):
                if compiled.context == context and compiled.signature.matches(leaves, tree):
                    if i:
                        cache.insert(0, cache.pop(i))
                    return compiled, leaves
            self._check(args)
            compiled = dataclasses.replace(self._lower(args).compile(), context=context)
            self._warn_of_static_values(compiled, args)
            cache.insert(0, compiled)
            del cache[KEPT:]
            return compiled, leaves

    def _check(self, args: tuple[Any, ...]) -> None:
        """Checks the arrays of a call before anything is compiled for them."""
        donated = self._request.donate_argnums
        leaves = jtu.tree_leaves_with_path(args)
        check_arrays((jtu.keystr(path), path[0].idx in donated, leaf) for path, leaf in leaves)

    def _lower(self, args: tuple[Any, ...]) -> Lowered:
        jaxprs.warn_of_shared("place", args)
        try:
            with without_collections():
                return lower_step(self._request, args)
        except TypeError as error:  # such as those of JAX about values that are not known
            leaves = jtu.tree_leaves_with_path(args)
            arrays = Signature.of(args, self._request.static_argnums).arrays
            numbers = [i for i in arrays if not jaxprs.is_array(leaves[i][1])]
            if numbers:
                named = ", ".join(f"args{jtu.keystr(leaves[i][0])}" for i in numbers)
                error.add_note(
                    f"place: the step is traced for any value of the Python numbers {named}, as by "
                    f"jax.jit. Where it needs their values, give their positions as static_argnums."
                )
            raise

    def _warn_of_static_values(self, compiled: Compiled, args: tuple[Any, ...]) -> None:
        alike = [
            known.signature
            for known in self._cache
            if known.context == compiled.context and known.signature.is_like(compiled.signature)
        ]
        if len(alike) + 1 == MANY:
            warn(
                f"{self!r} has been compiled for {MANY} values of what is static: "
                f"{alike[0].difference(args)}, as it was before. An array (jnp.asarray) in its "
                f"place is traced, and compiled once."
            )

    @without_mesh
    def initialize(self, init_fn: Callable, *args: Any, rest: Sequence[Any] = ()) -> Any:
        """Makes the step's first arguments where the step reads them.

        Each rank runs only the part of `init_fn` that makes the arrays it reads. So no rank ever
        holds all of them: beside its own share, it holds what making one array takes. Of parameters
        that are stacked over layers it makes its own layers, where `init_fn` makes one layer at a
        time, under `jax.vmap` or `jax.lax.map` over keys; else there is a warning.

        The values are those of `init_fn(*args)`, bit for bit, on any mesh: each operation is
        compiled by itself, as in a call outside of `jax.jit`, which would round in another way.
        There are exceptions, which may differ in the last bit: functions that JAX inlines when it
        traces, such as `jnp.mean`, and functions that are jitted in `init_fn`, of which a rank
        compiles only the part that it needs.

        Args:
            init_fn: a function of pytrees, which does not print. It returns the step's first
                argument, or a tuple of its first arguments. Leaves that the step traces become
                arrays of JAX; other leaves are static.
            *args: its arguments, such as a random key.
            rest: the other arguments of the step, or `jax.ShapeDtypeStruct`s in place of their
                arrays: the step is compiled for them, and their values are not used.

        Returns:
            The result of `init_fn`. Each array is on the devices, or the ranks, that read it; on
            the first rank, if none does.

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
        traced = trace_initializer(init_fn, args, self._request.static_argnums)
        compiled, _ = self.compiled_for(*first_arguments(traced), *rest)
        return compiled.run_initializer(traced, args)

    def _arguments(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, here: bool = False
    ) -> tuple[Any, ...]:
        """Puts the arguments at their positions, and loads those of `feed`, `here` if asked to."""
        args = as_positional(self._request.fun, args, kwargs)
        if not self._feed:
            return args
        check_positions("feed", self._feed, args)
        load: Any = None if here else getattr(self.mesh, "feed", None)
        load = load or (lambda load, value: load(value))
        # A list: out of a generator a StopIteration of a feed would come as another error.
        return tuple([load(self._feed[n], x) if n in self._feed else x for n, x in enumerate(args)])

    @property
    def bundle(self) -> Bundle:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The programs of the last call, and what they share."""
        return self._last.bundle

    @property
    def _last(self) -> Compiled:
        if not self._cache:
            raise ValueError(
                "The placed function has not been called yet; use lower(*args) for as_text() and "
                "programs, and lower(*args).compile() for describe(), flops and mfu()."
            )
        return self._cache[0]

    def describe(self) -> Any:
        """Tells what each rank holds and sends in a step, as it was called last.

        Returns:
            A `jaxpp.runtime.Description`: for each rank its devices, the bytes of parameters,
            optimizer state, accumulators and activations on each of them, and the bytes that it
            sends to other ranks. `str` makes it a table, `as_json` JSON.

        Raises:
            ValueError: the step has not been called yet.

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
        return self._last.describe()

    @property  # not cached: the last call may be another
    def flops(self) -> tuple[float, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The model FLOPs of each rank in a step, as it was called last: see `Compiled.flops`."""
        return self._last.flops

    def mfu(self, seconds: float, device: Any, *, rank: int | None = None) -> float:
        """Returns the model FLOPs utilization of the step as it was called last.

        Args:
            seconds: the time of a step, as measured.
            device: a `jaxpp.Device`, or a name of `jaxpp.planning.DEVICES`.
            rank: the rank whose operations and devices count; None for all.

        Returns:
            A fraction; 1 is the peak. `Compiled.mfu` says what counts.

        Raises:
            ValueError: `seconds` is no time, there is no such device or rank, or the step has not
                been called yet.
        """
        return self._last.mfu(seconds, device, rank=rank)

    def with_edit(self, edit: Callable[[TaskGraph], TaskGraph]) -> "Placed[P, R]":
        """Returns the same placed function, whose tasks an edit changes: see `edit_tasks`."""
        edits = (*self._request.edits, edit)
        return Placed(dataclasses.replace(self._request, edits=edits), self._feed)

    @without_mesh
    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Traces the step at arguments, or at `jax.ShapeDtypeStruct`s that stand for arrays."""
        return self._lower(self._arguments(args, kwargs))
