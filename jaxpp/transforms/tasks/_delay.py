"""`delay`: a step that takes the gradient of the weights of some steps ago."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.tree_util as jtu

from jaxpp import _compat, jaxprs
from jaxpp._messages import check_number
from jaxpp.jaxprs import Eqn, Var
from jaxpp.transforms.tasks._loop import is_loop
from jaxpp.transforms.tasks._schedule import is_microbatch_loop


def delay(step: Callable[..., Any], steps: int = 1) -> Callable[..., Any]:
    """Lets a train step take its gradients at the weights of some steps ago.

    So a pipeline need not drain between two steps (PipeDream-2BW, Narayanan et al., arXiv
    2006.09503, section 3): the loops of microbatches read the oldest weights, and all that comes
    after them, such as the optimizer's update, has the newest. It is a function to a function: it
    runs on one device, and can be placed and certified, as any other step.

    Args:
        step: a train step with loops of `microbatch`, scheduled or not. Its first argument has the
            weights, and its first result, or its only one, is what becomes of them.
        steps: how many steps ago.

    Returns:
        A step that takes a tuple of `steps + 1` versions of the first argument, the newest one
        first, in its place. It returns such a tuple in the place of the first result.

    Raises:
        TypeError: `step` is not a function.
        ValueError: `steps` is negative, or no integer; the first argument is no such tuple, or its
            versions, or the first result, differ in more than the values of arrays; or the step
            has no loop of microbatches, or one whose operands are computed with effects.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> loss = jaxpp.wrap_forward(lambda w, x: jnp.mean((x @ w) ** 2))
        >>> grad = jaxpp.microbatch(jax.grad(loss), 2)
        >>> step = jaxpp.delay(lambda w, x: w - 0.1 * grad(w, x))
        >>> new, old = step((jnp.eye(2), jnp.zeros((2, 2))), jnp.ones((4, 2)))
        >>> bool((new == old).all())  # the gradient at the old weights is 0
        True
    """
    if not callable(step):
        raise TypeError(f"delay takes a function, got {step!r}; write delay(train_step, 1).")
    check_number("delay", "steps", steps, "an integer of at least 0")

    @functools.wraps(step)
    def delayed(versions: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(versions, tuple | list) or len(versions) != steps + 1:
            raise ValueError(
                f"delay: a step that is delayed by {steps} takes a tuple of {steps + 1} versions "
                f"of the weights, the newest one first; begin with (weights,) * {steps + 1}."
            )
        for n, version in enumerate(versions[1:], 1):
            _check_alike(f"version {n} of the weights", versions[0], version)
        if jaxprs.definition_of("microbatch"):
            return _with_newest(_by_definition(step, versions, args, kwargs), versions)
        traced = jaxprs.trace(step, (versions[0], *args), kwargs)
        flat = jaxprs.inline(traced.jaxpr, lambda e: jaxprs.contains(e, _is_any_loop))
        new, old = (
            [leaf for leaf in jtu.tree_leaves(weights) if jaxprs.is_array(leaf)]
            for weights in (versions[0], versions[-1])
        )
        first = traced.num_closed_over
        jaxpr = _reading(flat, flat.jaxpr.invars[first : first + len(new)])
        with jax.debug_key_reuse(False):  # what prepares weights may be there twice
            result = traced.rebuild(jaxprs.run(jaxpr, *old, *traced.inputs))
        return _with_newest(result, versions)

    return delayed


def _aval(x: Any) -> tuple[Any, Any]:
    return x.shape, jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)


def _check_alike(name: str, newest: Any, other: Any) -> None:
    """Checks that two versions differ only in the values of their arrays."""
    trees = jtu.tree_structure(other), jtu.tree_structure(newest)
    if trees[0] != trees[1]:
        raise ValueError(
            f"delay: {name} has another structure than the newest one, {trees[0]} for {trees[1]}; "
            f"give trees of one structure: earlier results of the step, which returns the new "
            f"weights first, in a tuple with the rest."
        )
    known = dict(jtu.tree_leaves_with_path(newest))
    for path, leaf in jtu.tree_leaves_with_path(other):
        kinds = [_aval(x) if jaxprs.is_array(x) else x for x in (known[path], leaf)]
        if kinds[0] is not kinds[1] and kinds[0] != kinds[1]:
            new, old = (
                f"{x.dtype}{list(x.shape)}" if jaxprs.is_array(x) else f"the constant {x!r}"
                for x in (known[path], leaf)
            )
            raise ValueError(
                f"delay: weights{jtu.keystr(path)} is {new} in the newest version, and {old} in "
                f"{name}. Versions differ in the values of arrays alone: give arrays of one shape "
                f"and dtype, and jnp.asarray(x) for a number that is a weight."
            )


def _with_newest(result: Any, versions: Any) -> Any:
    """Returns the result of a step with a tuple of versions for the first result."""
    new, *rest = result if isinstance(result, tuple) else (result,)
    _check_alike("the step's first result, which is what becomes of the weights,", versions[0], new)
    newest = (new, *versions[:-1])
    return (newest, *rest) if isinstance(result, tuple) else newest


def _by_definition(step: Callable[..., Any], versions: Any, args: Any, kwargs: Any) -> Any:
    """Runs the step with the newest weights, in which loops return what they do with the oldest.

    This is what `delay` means.
    """
    define: Any = jaxprs.definition_of("microbatch")
    returned: list[Any] = []

    def noting(*given: Any) -> Callable[..., Any]:
        def loop(*args: Any, **kwargs: Any) -> Any:
            returned.append(define(*given)(*args, **kwargs))
            return returned[-1]

        return loop

    def again(*given: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: returned.pop(0)

    with jaxprs.with_definition("microbatch", noting):
        step(versions[-1], *args, **kwargs)
    with jaxprs.with_definition("microbatch", again):
        return step(versions[0], *args, **kwargs)


def _is_any_loop(eqn: Eqn) -> bool:
    return is_loop(eqn) or is_microbatch_loop(eqn)


def _reading(flat: jex.ClosedJaxpr, weights: list[Var]) -> jex.ClosedJaxpr:
    """Returns the program whose loops read other weights, which are its first arguments."""
    loops = [eqn for eqn in flat.eqns if _is_any_loop(eqn)]
    if not loops:
        raise ValueError(
            "delay: the step has no loop of microbatches whose weights could be older; give one "
            "with a gradient of jaxpp.microbatch, of a loss in jaxpp.wrap_forward: "
            "jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss)), 4)."
        )
    old = [jaxprs.fresh_var(v) for v in weights]
    known = jaxprs.Substitution(zip(weights, old, strict=True))
    read = jaxprs.variables(v for loop in loops for v in loop.invars)
    feeds = {id(e) for e in jaxprs.needed(flat.eqns, read)}
    eqns: list[Eqn] = []
    for eqn in flat.eqns:
        if _is_any_loop(eqn):
            eqns.append(known.rename(eqn))
            continue
        eqns.append(eqn)
        if id(eqn) in feeds and any(v in known.of for v in jaxprs.variables(eqn.invars)):
            if eqn.effects:
                raise ValueError(
                    f"delay: {eqn.primitive} has effects and prepares the weights that a loop "
                    f"reads; move it into the loop, or behind it."
                )
            outvars = [jaxprs.fresh_var(v) for v in eqn.outvars]
            eqns.append(known.rename(eqn).replace(outvars=outvars))
            known.of.update(zip(eqn.outvars, outvars, strict=True))
    invars = [*old, *flat.jaxpr.invars]
    return _compat.make_closed_jaxpr(invars, flat.jaxpr.outvars, eqns)
