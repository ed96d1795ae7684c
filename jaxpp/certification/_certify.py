"""`certify`: proves that the programs of a placed step compute what its function does."""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from jaxpp import _compat, jaxprs
from jaxpp._program import PROVIDED
from jaxpp.certification import _definition
from jaxpp.certification._certificate import Certificate
from jaxpp.certification._proof import EDITED, How, LoweredStep, Proof, retraced
from jaxpp.certification._refuted import Refuted, Undecided
from jaxpp.jaxprs import without_collections, without_mesh


def certify(step: Any, *args: Any, passes: bool = True, **kwargs: Any) -> Certificate:
    """Proves that the programs of a placed step compute what its function does, effects included.

    Nothing is compiled, and no array is read: the function and the programs of all ranks run on
    symbols, and the symbols of their results are compared. It is a proof for these shapes and for
    all values. First the function runs with each transform by its definition: `split_stages`,
    `wrap_forward` and `schedule` are the identity, and `microbatch` is a loop that keeps each
    output, and combines them after the last slice. `jaxpp.extend.edit_loops` is the identity, too;
    if an edit changes or rounds values, or adds results, the programs have to compute the edited
    function.
    Then follow the scheduled function, the step after each pass of `place`, and the programs. They
    run on a machine that also refutes a deadlock, a message that is lost or mixed up, a value that
    is read after it was freed or its memory reused, and an effect that happens too often, not at
    all, or in the wrong order.

    Programs that do the same operations in the same order are equal bit by bit. Where sums are in
    another order, such as those of a parameter that several stages read, they are equal for all
    floating-point numbers but where a sum overflows on its way: they have the same value in a model
    of random numbers, in which nothing cancels and a cast is an unknown function. Different values
    are equal in the model with a chance below one in a million million. The transforms before
    `place` may also be equal over the real numbers alone, which the headline says.

    It does not see what comes after: XLA, which may round in another way, and transfers. If it has
    no rule for an operation, such as a custom call, it takes the operation for the same function
    wherever it is.

    Args:
        step: a placed step.
        *args: its arguments, or `jax.ShapeDtypeStruct`s in place of their arrays.
        passes: whether the step is compared after each pass, which tells which one is wrong.
        **kwargs: its arguments by keyword.

    Returns:
        The certificate. Its text has one headline.

    Raises:
        TypeError: `step` is no placed step.
        Refuted: the step does not compute its function; it has the pass, the result, the rank, the
            task and the user's line.
        Undecided: JAX's settings are not those under which it was lowered, or a loop over devices
            that share a microbatch is not proven yet.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> def loss(w, x):
        ...     h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w))
        ...     return jnp.mean((h @ w) ** 2)
        >>> grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss)), 4)
        >>> grad = jaxpp.schedule(grad, jaxpp.schedules.OneFOneB())
        >>> mesh = jaxpp.MpmdMesh((2,), ("mpmd",), devices=[jax.devices()[0]] * 2)
        >>> step = jaxpp.place(lambda w, x: w - 0.1 * grad(w, x), mesh)
        >>> certificate = jaxpp.certify(step, jnp.eye(2), jnp.ones((8, 2)))
        >>> print(str(certificate).splitlines()[0])
        1 results of 2 ranks are those of the function, bit by bit: place; but for the order of ...
    """
    lowered: Any = step.lower(*args, **kwargs) if hasattr(step, "lower") else None
    if not hasattr(lowered, "bundle"):
        way_out = "apply jaxpp.place first"
        if hasattr(step, "bundle"):
            way_out = "it is lowered already: step.lower(...).certify(), or certify(step, ...)"
        raise TypeError(
            f"certify: takes a placed step, got {jaxprs.describe_function(step)}; {way_out}"
        )
    return certify_lowered(lowered, passes=passes)


@without_mesh
def certify_lowered(lowered: LoweredStep, passes: bool = True) -> Certificate:
    """Does as `certify`, for a step that has been lowered."""
    start = time.perf_counter()
    _check_decidable(lowered)
    rules: list[str] = []
    with without_collections(), _deep_recursion():
        try:
            function = retraced(lowered, _definition.PLAIN, rules)
        except _definition.Edited:
            function = None
        whole = _uncut_lengths(lowered, function)
        try:
            proof, undecided = _prove(lowered, function, rules, whole, passes)
        except Refuted:
            # Scans of different loops may have one length.
            if not whole or min(whole) > _TRIED_AGAIN:
                raise
            cut = frozenset(n for n in whole if n > _TRIED_AGAIN)
            proof, undecided = _prove(lowered, function, rules, cut, passes)
    transforms = ("split_stages", "wrap_forward", "microbatch", "schedule")
    transforms = () if undecided else (*transforms, *["edit_loops"] * bool(rules))
    regrouped = sum(how is not How.BITS for how in proof.placed)
    return Certificate(
        results=len(lowered.bundle.results),
        ranks=len(lowered.bundle.programs),
        tasks=proof.tasks,
        messages=proof.messages,
        effects=proof.effects.total(),
        terms=len(proof.terms.terms),
        equations=proof.evaluator.equations,
        exact=not regrouped,
        regrouped=regrouped,
        reordered=sum(how is How.SUMS for how in proof.scheduled),
        rescaled=sum(how is How.REALS for how in proof.scheduled),
        rounded=sum(how is How.ROUNDED for how in proof.scheduled),
        transforms=(*transforms, "place"),
        undecided="" if undecided == EDITED else undecided,
        passes=tuple(proof.passes),
        seconds=time.perf_counter() - start,
        edits=tuple(rules) if undecided == EDITED else (),
    )


PROVIDED["certify"] = certify_lowered


@contextlib.contextmanager
def _deep_recursion() -> Iterator[None]:
    """Lets rewrites follow long chains of operations, each of which is one of Python's calls."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, 100_000))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def _prove(
    lowered: LoweredStep,
    function: jaxprs.Traced | None,
    rules: list[str],
    whole: frozenset[int],
    passes: bool,
) -> tuple[Proof, str]:
    """Proves a step; also says why the transforms before `place` are not decided.

    Args:
        lowered: the step.
        function: its function by definition; None if edits of loops add results.
        rules: who edits loops.
        whole: the lengths of scans that are not unrolled.
        passes: whether the step is compared after each pass.
    """
    if function is None:
        proof, undecided = Proof(lowered, lowered.retrace(), whole, scheduled=True), EDITED
    else:
        proof = Proof(lowered, function, whole)
        undecided = proof.of_transforms(rules)
    proof.of_programs(passes)
    return proof, undecided


#: The iterations of a scan up to which it is unrolled wherever it is, and up to which it is where a
#: proof that takes it whole has failed.
_UNROLLED, _TRIED_AGAIN = 8, 128


def _uncut_lengths(lowered: LoweredStep, function: jaxprs.Traced | None) -> frozenset[int]:
    """The lengths of scans that are in the function, the step after each pass, and the programs.

    A scan that a pass cuts is shorter after it.
    """
    seen = dict[int, set[int]]()

    def lengths(jaxpr):
        opened = jaxprs.opened(jaxpr)
        if id(opened) not in seen:
            own = seen[id(opened)] = set()
            for eqn in opened.eqns:
                if eqn.primitive.name == "scan" and eqn.params["length"] > _UNROLLED:
                    own.add(eqn.params["length"])
                for inner in jaxprs.sub_jaxprs(eqn):
                    own |= lengths(inner)
        return seen[id(opened)]

    forms = [lengths(step.jaxpr) for step in lowered.passes.values()]
    forms.append(set().union(*(lengths(c.jaxpr) for c in lowered.bundle.computations)))
    forms += [lengths(function.jaxpr)] if function is not None else []
    return frozenset(set.intersection(*forms))


def _check_decidable(lowered: LoweredStep) -> None:
    if not _compat.is_in_context(lowered.context):
        raise Undecided(
            "certify: the step was lowered under other settings of JAX (such as jax.enable_x64 or "
            "jax.set_mesh), under which its function is another one. Certify it under the same."
        )
