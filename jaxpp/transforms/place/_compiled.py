"""`Lowered` and `Compiled`: a step for arguments of given types, as programs and on a mesh."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.tree_util as jtu

from jaxpp import _compat, jaxprs
from jaxpp._program import PROVIDED, Bundle, LoadedStep, Mesh, Program, Receive, Run
from jaxpp._specs import axis_sizes
from jaxpp.jaxprs import without_mesh
from jaxpp.transforms._signature import Signature, as_positional
from jaxpp.transforms._step import Step, changes
from jaxpp.transforms.initialize import (
    check_initializer,
    first_arguments,
    lower_initializer,
    trace_initializer,
)


class HasPrograms:
    """A step that has the programs of its ranks, in its `bundle`."""

    @property
    def programs(self: Any) -> tuple[Program, ...]:
        """The program of each rank; of a placed function, those of its last call."""
        return self.bundle.programs

    def as_text(self: Any) -> str:
        """Writes the programs as text, one instruction a line."""
        return self.bundle.as_text()

    @functools.cached_property
    def flops(self: Any) -> tuple[float, ...]:
        """The model FLOPs of a step: floating-point operations of each rank, on all its devices.

        Their sum is that of the step. They are those of products of matrices (2mkn for an m x k by
        a k x n array) and of convolutions, forward and backward, in the update too. What a rank
        computes again, with the same operands, counts once: recomputation of checkpoints does not
        count. A conditional counts its dearest branch, a `while_loop` its
        body once, and a kernel what its cost estimate says, or nothing. `cost_analysis` has what
        XLA counts, with recomputation and elementwise operations.

        Example:
            >>> import jax, jax.numpy as jnp, jaxpp
            >>> def loss(w, x):
            ...     h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
            ...     return jnp.mean((h @ w[1]) ** 2)
            >>> grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss)), 4)
            >>> mesh = jaxpp.MpmdMesh((2,), devices=[jax.devices()[0]] * 2)
            >>> step = jaxpp.place(jaxpp.schedule(grad, jaxpp.schedules.OneFOneB()), mesh)
            >>> compiled = step.lower([jnp.eye(8), jnp.eye(8)], jnp.ones((16, 8))).compile()
            >>> compiled.flops  # 2 * 16 * 8 * 8, for w[0] two times, for w[1] three times
            (4096.0, 6144.0)
            >>> compiled.mfu(seconds=1e-6, device=jaxpp.Device(flops=1e12, bandwidth=1e11))
            0.01024
        """
        products, totals = jaxprs.Products(), [0.0]
        for program in self.programs:
            _count_products(self.bundle, program, products)
            totals.append(products.flops)
        return tuple(after - before for before, after in itertools.pairwise(totals))


@dataclasses.dataclass(frozen=True)
class Lowered(HasPrograms):
    """A step lowered to programs, before it is compiled.

    Args:
        bundle: the programs of all ranks.
        passes: the step after tracing (under `"trace"`), and after each pass, by the pass's name;
            each has `as_text()`.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> loss = jaxpp.wrap_forward(lambda w, x: jnp.mean((x @ w) ** 2))
        >>> grad = jaxpp.microbatch(jax.grad(loss), 2)
        >>> step = jaxpp.place(jaxpp.schedule(grad, jaxpp.schedules.OneFOneB()))
        >>> lowered = step.lower(jnp.eye(2), jnp.ones((4, 2)))
        >>> print(lowered.passes["find_roles"].as_text().splitlines()[0])
        argument 0: args[0] float32[2,2] parameter
    """

    bundle: Bundle
    passes: Mapping[str, Step]
    _finish: Callable[[Bundle], "Compiled"]
    #: Traces the function again, as when it was lowered.
    retrace: Callable[[], jaxprs.Traced]
    #: JAX's settings when it was lowered.
    context: Any = None
    #: The positions of the arguments that the user donates.
    donate_argnums: tuple[int, ...] = ()

    def __repr__(self):
        return f"Lowered({self.bundle.summary}; as_text() shows them)"

    def passes_as_text(self) -> str:
        """Writes the traced step as text, then the lines that each pass changed, as a diff."""
        return changes({name: step.as_text() for name, step in self.passes.items()})

    def certify(self, *, passes: bool = True) -> Any:
        """Proves that the programs compute the step's function, as `jaxpp.certify` does.

        Args:
            passes: whether the step is compared after each pass, which tells which one is wrong.

        Returns:
            A `jaxpp.Certificate`.

        Raises:
            jaxpp.Refuted: the step does not compute its function.
        """
        return PROVIDED["certify"](self, passes)

    @without_mesh
    def compile(self) -> "Compiled":
        """Compiles the computations and loads the programs on the mesh."""
        return self._finish(self.bundle)


def load(mesh: Mesh, bundle: Bundle) -> LoadedStep:
    """Loads programs on a mesh; the settings that check a user's function do not hold for them.

    These are `jax.transfer_guard`, for constants go to their ranks, and `jax.debug_key_reuse`.
    """
    with jax.transfer_guard("allow"), jax.debug_key_reuse(False):
        return mesh.load(bundle)


@dataclasses.dataclass(frozen=True)
class Compiled(HasPrograms):
    """A step compiled for arguments of given types."""

    fun: Callable
    bundle: Bundle
    _mesh: Mesh
    _run: LoadedStep
    signature: Signature
    _rebuild: Callable[[list[Any]], Any]
    _keys: _compat.KeyUse
    #: JAX's settings under which a placed function has compiled the step.
    context: Any = None

    def __repr__(self):
        return f"Compiled({self.bundle.summary}; as_text() shows them)"

    def mfu(self, seconds: float, device: Any, *, rank: int | None = None) -> float:
        """Returns the model FLOPs utilization: the share of the devices' peak that a step has used.

        It is `sum(flops)` over what all devices could do in the time of a step (Chowdhery et al.,
        "PaLM", 2022, appendix B). On an `MpmdMesh` a device that ranks share counts once, on other
        meshes each rank has devices of its own.

        Args:
            seconds: the time of a step, as measured.
            device: the device, as a `jaxpp.Device`, or a name of `jaxpp.planning.DEVICES`, such as
                `"h100"`, whose peak is that in bfloat16.
            rank: the rank whose operations and devices count; None for all.

        Returns:
            A fraction; 1 is the peak.

        Raises:
            ValueError: `seconds` is no time, or there is no such device or rank.

        Example:
            See `flops`.
        """
        if not 0 < seconds < math.inf:
            raise ValueError(
                f"mfu: seconds is the time of a step, finite and more than 0, got {seconds!r}."
            )
        flops = self.flops
        if rank is not None and rank not in range(len(flops)):
            raise ValueError(f"mfu: rank is one of 0 to {len(flops) - 1}, or None, got {rank!r}.")
        of_rank = math.prod(axis_sizes(self.bundle.inside).values())
        count = of_rank * len(flops)
        if (devices := getattr(self._mesh, "devices", None)) is not None:
            count = len(set(devices))  # ranks may share them
        done, count = (sum(flops), count) if rank is None else (flops[rank], of_rank)
        return done / (seconds * count * PROVIDED["device"](device).flops)

    @property
    def input_shardings(self) -> tuple[Any, ...]:
        """The shardings with which the step reads its arguments: a pytree for each argument.

        Its leaves are `jax.sharding.Sharding`s, or `RemoteSharding`s on a `RemoteMpmdMesh`. Leaves
        that are not arrays, and arrays that nothing reads, are None.
        """
        leaves: list[Any] = [None] * len(self.signature.avals)
        for n, sharding in zip(self.signature.arrays, self._run.input_shardings(), strict=True):
            leaves[n] = sharding
        return jtu.tree_unflatten(self.signature.tree, leaves)

    def describe(self) -> Any:
        """Tells what each rank holds, sends and reduces in a step, as `Placed.describe` does."""
        return self._run.describe()

    def inspect(self) -> Any:
        """Returns for each rank its devices, its axes, and XLA's analysis of what it runs."""
        return self._run.inspect()

    def memory_analysis(self) -> list[dict[str, int]]:
        """Returns for each rank the bytes of one device: temporary ones of XLA, and all at once.

        The keys are names of `jax.stages.Compiled.memory_analysis`; `describe` tells more.
        """
        return [
            {"temp_size_in_bytes": rank.temporary_bytes, "peak_memory_in_bytes": rank.peak_bytes}
            for rank in self.describe().ranks
        ]

    def cost_analysis(self) -> list[dict[str, float]]:
        """Returns for each rank what one device computes and reads in a step, as XLA counts it.

        The keys are those of `jax.stages.Compiled.cost_analysis`: "flops", "bytes accessed".
        """
        found = []
        for program, rank in zip(self.programs, self.inspect(), strict=True):
            runs = [i for i in program.instructions if isinstance(i, Run)]
            costs = [rank.analyses[run.computation] for run in runs]
            flops, accessed = sum(a.flops for a in costs), sum(a.accessed_bytes for a in costs)
            found.append({"flops": flops, "bytes accessed": accessed})
        return found

    @without_mesh
    def initialize(self, init_fn: Callable, *args: Any) -> Any:
        """Makes the step's first arguments where the step reads them, as `Placed.initialize` does.

        Raises:
            TypeError: `init_fn` makes something else than the step was compiled for; the message
                names the first leaf that differs.
        """
        traced = trace_initializer(init_fn, args, self.signature.static_argnums)
        check_initializer(first_arguments(traced), self.signature)
        return self.run_initializer(traced, args)

    def run_initializer(self, traced: jaxprs.Traced, args: Sequence[Any]) -> Any:
        """Runs an initialiser that is known to match the step; `traced` is its trace at `args`."""
        paths = [jtu.keystr(p) for p, x in jtu.tree_leaves_with_path(args) if jaxprs.is_array(x)]
        names = [*(f" closed over, {n}" for n in range(traced.num_closed_over)), *paths]
        bundle = lower_initializer(traced, self.bundle, names)
        return traced.rebuild(load(self._mesh, bundle)(traced.inputs))

    @without_mesh
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step; the arguments must have the types that it was compiled for."""
        args = as_positional(self.fun, args, kwargs)
        leaves, tree = jtu.tree_flatten(args)
        if not self.signature.matches(leaves, tree):
            raise TypeError(
                "The step was compiled for other arguments: "
                + self.signature.difference(args)
                + ". Call the placed function itself, which compiles for each."
            )
        return self.call(leaves)

    def call(self, leaves: Sequence[Any]) -> Any:
        """Runs the step on leaves that are known to have the types it was compiled for."""
        arrays = [leaves[i] for i in self.signature.arrays]
        return self._rebuild(self._keys.call(self._run, arrays))


def _count_products(bundle: Bundle, program: Program, products: jaxprs.Products) -> None:
    """Counts the products of a program; slots have the numbers of their values."""
    rank = program.rank
    slots = {slot: products.number(("argument", n)) for n, slot in program.inputs}
    slots |= {
        slot: products.number(("constant", rank, n))
        for n, (slot, _) in enumerate(program.constants)
    }
    for place, instruction in enumerate(program.instructions):
        match instruction:
            case Receive(received, _):
                slots |= {s: products.number(("received", rank, place, s)) for s in received}
            case Run(number, inputs, outputs):
                jaxpr = bundle.computations[number].jaxpr
                results = products.run(jaxpr, [slots[s] for s in inputs], rank)
                slots |= dict(zip(outputs, results, strict=True))
