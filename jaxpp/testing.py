"""Assertions for tests of placed steps: equal to the plain function, and nothing is moved."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from jaxpp import jaxprs
from jaxpp._program import Bundle, Message

#: The kinds of arrays that ranks send each other: see `count_sends`.
KINDS = ("edge", "gradient", "scalar", "argument", "gathered")


def assert_computes_the_function(
    step: Any,
    *args: Any,
    accept_rounding: bool = False,
    accept_edits: bool = False,
    **kwargs: Any,
) -> None:
    """Asserts that the programs of a step compute its function, for all values of its arguments.

    It proves it by symbols, as `jaxpp.certify` does, and so runs and compiles nothing.

    Args:
        step: a placed step.
        *args: its arguments, or `jax.ShapeDtypeStruct`s in place of their arrays.
        accept_rounding: whether results may be cast at other places than by the definitions of the
            transforms; the certificate counts them as `rounded`.
        accept_edits: whether edits of loops (`jaxpp.extend`) may change what the step computes.
        **kwargs: its arguments by keyword.

    Raises:
        AssertionError: if the programs compute something else (`jaxpp.Refuted`), if a transform is
            not proven, or if results are rounded that may not be.
        jaxpp.Undecided: if there is no proof of such a step yet.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> def loss(w, x):
        ...     h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w))
        ...     return jnp.mean((h @ w) ** 2)
        >>> grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss)), 4)
        >>> mesh = jaxpp.MpmdMesh((2,), ("mpmd",), devices=[jax.devices()[0]] * 2)
        >>> step = jaxpp.place(jaxpp.schedule(grad, jaxpp.schedules.OneFOneB()), mesh)
        >>> assert_computes_the_function(step, jnp.eye(2), jnp.ones((8, 2)))
    """
    certificate = step.lower(*args, **kwargs).certify()
    if certificate.undecided:
        raise AssertionError(f"It is not decided: {certificate.undecided}")
    if certificate.edits and not accept_edits:
        raise AssertionError(
            f"Edits change what the step computes: {', '.join(certificate.edits)}; "
            f"accept_edits=True accepts them. {certificate}"
        )
    if certificate.rounded and not accept_rounding:
        raise AssertionError(
            f"{certificate.rounded} results are cast at other places than by the definitions of "
            f"the transforms; accept_rounding=True accepts them. {certificate}"
        )


def assert_matches_single_device(
    step: Callable,
    reference: Callable,
    *args: Any,
    steps: int = 3,
    bitwise: bool = False,
    rtol: float | None = None,
    atol: float = 0.0,
    data: Callable[[int], Sequence[Any]] | None = None,
    num_state: int | None = None,
) -> None:
    """Asserts that a step gives the same results as the function it was made of on one device.

    It runs both for some steps. Arguments that the result replaces (a model, an optimizer's state)
    are fed back, to each its own; the others are data, and differ from step to step. All arguments
    are copied, so that donation consumes none of the caller's.

    Args:
        step: a placed step.
        reference: the plain function, which is run under `equinox.filter_jit`, or a function that
            is compiled already: another placed step, e.g. the same one on a mesh of one device, or
            a jitted function.
        *args: the arguments of the first step. An argument is replaced by the first part of the
            result with the same structure, shapes and dtypes; one that is a single array only if
            it is donated. Data changes by itself: random keys are folded with the number of the
            step, other arrays rolled by it along their last axis that is longer than one.
        steps: the number of steps to run.
        bitwise: whether every bit must be equal; otherwise the tolerances hold for floating-point
            results (all others must be equal anyway).
        rtol: how far each element may be off, as a share of the largest magnitude in its array. By
            default 10 times the resolution of the narrowest floating type of arguments and results
            (1e-5 for float32), but not more than 1e-2 (bfloat16).
        atol: how far each element may be off in addition.
        data: makes the data of a step from its number, from 0: a tuple, which follows `args`. With
            it, those of `args` that are not replaced stay as they are.
        num_state: the number of first arguments that the result replaces, where structure alone
            does not tell; 0 makes all of them data.

    Raises:
        AssertionError: if a result differs; the message names the step, the path of the first such
            result, the rank that made it, and by how much it differs. Also if a result that is fed
            back has a NaN, since the steps after it then show nothing.
        ValueError: if `num_state` counts an argument that the result does not replace.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> def loss(w, x):
        ...     h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w))
        ...     return jnp.mean((h @ w) ** 2)
        >>> def train(w, x):
        ...     return w - 0.1 * jax.grad(loss)(w, x)
        >>> grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss)), 4)
        >>> grad = jaxpp.schedule(grad, jaxpp.schedules.OneFOneB())
        >>> mesh = jaxpp.MpmdMesh((2,), ("mpmd",), devices=[jax.devices()[0]] * 2)
        >>> step = jaxpp.place(lambda w, x: w - 0.1 * grad(w, x), mesh, donate_argnums=0)
        >>> w, x = jnp.eye(2), jnp.arange(16.0).reshape(8, 2)
        >>> assert_matches_single_device(step, train, w, x)
        >>> assert_matches_single_device(step, lambda w, x: w, w, x)
        Traceback (most recent call last):
        ...
        AssertionError: step 0: result (rank 0 of stage 0, rank 1 of stage 1) differs in 4 of 4 ...
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}.")
    if not hasattr(reference, "lower"):
        reference = eqx.filter_jit(reference)
    ours, theirs = list(_copied(args)), list(_copied(args))
    for i in range(steps):
        extra = () if data is None else tuple(data(i))
        got = step(*ours, *_copied(extra))
        want = reference(*theirs, *_copied(extra))
        if rtol is None:
            rtol = _default_rtol((args, extra, want))
        bundle = getattr(step, "bundle", None)
        _check_equal(i, got, want, bundle, None if bitwise else (rtol, atol))
        replaced = [
            _replacements(args, result, bundle, num_state, f"step {i}") for result in (got, want)
        ]
        for own, new in zip((ours, theirs), replaced, strict=True):
            for j, arg in enumerate(args):
                fresh = arg if data is not None else _varied(arg, i + 1)
                own[j] = new[j] if j in new else _copied(fresh)


def assert_no_transfers_of(step: Any, argument: Any) -> None:
    """Asserts that a step sends no array of an argument, nor its next value, between ranks.

    Args:
        step: a placed step that has been called, or the result of its `lower`.
        argument: the arrays: the position of an argument (`0`), a path below one
            (`"[0].blocks[1]"`), or a pytree that an argument is or holds (the model).

    Raises:
        AssertionError: if an array of the argument is sent (a message of kind `"argument"`), or an
            array of the same shape and dtype (kind `"gathered"`); the message names the arrays and
            the ranks.
        ValueError: if the step has no such argument.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> def loss(w, x):
        ...     h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w))
        ...     return jnp.mean((h @ w) ** 2)
        >>> grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss)), 4)
        >>> grad = jaxpp.schedule(grad, jaxpp.schedules.OneFOneB())
        >>> mesh = jaxpp.MpmdMesh((2,), ("mpmd",), devices=[jax.devices()[0]] * 2)
        >>> step = jaxpp.place(lambda w, x: w - 0.1 * grad(w, x), mesh)
        >>> assert_no_transfers_of(step.lower(jnp.eye(2), jnp.ones((8, 2))), 0)
    """
    bundle = _bundle_of(step)
    wanted = _arguments(bundle, argument)
    names = {f"args{bundle.arguments[n].name}" for n in wanted}
    types: dict[Any, str] = {}
    for n in wanted:
        types.setdefault(_type(bundle.arguments[n].aval), bundle.arguments[n].name)
    found = []
    for message, name, kind, aval in _sent_arrays(bundle):
        route = f"from rank {message.source} to rank {message.target}"
        if kind == "argument" and name in names:
            found.append(f"{name} ({aval.str_short()}) is sent {route}")
        elif kind == "gathered" and _type(aval) in types:
            like = f"args{types[_type(aval)]}"
            found.append(f"{name} ({aval.str_short()}, the type of {like}) is sent {route}")
    if found:
        more = f"; and {len(found) - 8} more" if len(found) > 8 else ""
        raise AssertionError(f"{'; '.join(found[:8])}{more}.")


def count_sends(step: Any, kind: str | None = None) -> int:
    """Counts the messages that the ranks send each other in one call of a step.

    A message is one `Send` instruction of `step.programs`: all arrays that one run makes for one
    other rank. So a message is one transfer, however many arrays it has.

    Args:
        step: a placed step that has been called, or the result of its `lower`.
        kind: counts only messages with an array of this kind: `"edge"` (between stages),
            `"gradient"` (of a shared parameter), `"scalar"`, `"argument"` (an input of the step
            that another rank holds) or `"gathered"` (anything else). A message with arrays of two
            kinds counts for both.

    Raises:
        ValueError: if there is no such kind.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> def loss(w, x):
        ...     h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w))
        ...     return jnp.mean((h @ w) ** 2)
        >>> grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss)), 4)
        >>> grad = jaxpp.schedule(grad, jaxpp.schedules.OneFOneB())
        >>> mesh = jaxpp.MpmdMesh((2,), ("mpmd",), devices=[jax.devices()[0]] * 2)
        >>> lowered = jaxpp.place(grad, mesh).lower(jnp.eye(2), jnp.ones((8, 2)))
        >>> count_sends(lowered, "edge")  # 4 microbatches, there and back
        8
    """
    if kind is not None and kind not in KINDS:
        raise ValueError(f"there is no kind {kind!r} of message; use one of {', '.join(KINDS)}.")
    messages = [s.message for p in _bundle_of(step).programs for s in p.sends]
    return sum(kind is None or kind in m.kinds for m in messages)


# ---- results ------------------------------------------------------------------------------------


#: The way out where only rounding differs.
_ADAM = (
    " An optimizer that divides by the size of a gradient, as Adam does, magnifies rounding where "
    "that is near 0: compare gradients, or steps of SGD; jaxpp.certify(step, *args) needs no "
    "tolerances."
)


def _check_equal(step: int, got, want, bundle: Bundle | None, tolerance) -> None:
    """Raises for the first result that differs; `tolerance` is (rtol, atol), None for bitwise."""
    ours, tree = jtu.tree_flatten_with_path(got)
    theirs, wanted_tree = jtu.tree_flatten(want)
    if tree != wanted_tree:
        raise AssertionError(
            f"step {step}: the result has the structure {tree}, but the reference's {wanted_tree}."
        )
    number = itertools.count()
    differences = []
    for (path, x), y in zip(ours, theirs, strict=True):
        place = _place_of(bundle, next(number)) if jaxprs.is_array(x) else ""
        if difference := _difference(x, y, tolerance):
            differences.append(f"result{jtu.keystr(path)}{place} {difference}")
    if differences:
        more = f" {len(differences) - 1} more results differ." if len(differences) > 1 else ""
        adam = "" if tolerance is None else _ADAM
        raise AssertionError(f"step {step}: {differences[0]}{more}{adam}")


def _place_of(bundle: Bundle | None, number: int) -> str:
    """Names the ranks that give a result, and their stages."""
    if bundle is None:
        return ""
    flat = {n for n, r in enumerate(bundle.results) if r.array == number}
    ranks = [p for p in bundle.programs if any(n in flat for n, _ in p.outputs)]
    named = [
        f"rank {p.rank} of stage{'s' * (len(p.stages) > 1)} {', '.join(map(str, p.stages))}"
        for p in ranks
    ]
    return f" ({', '.join(named)})" if named else ""


def _difference(got: Any, want: Any, tolerance: tuple[float, float] | None) -> str | None:
    """Says in words how a leaf differs from the reference's; None if it does not."""
    if not (jaxprs.is_array(got) and jaxprs.is_array(want)):
        same = got is want or (type(got) is type(want) and got == want)
        return None if same else f"is {got!r}, but {want!r} in the reference."
    if _type(got) != _type(want):
        return f"has the type {_describe(got)}, but {_describe(want)} in the reference."
    x, y = _fetch(got), _fetch(want)
    is_float = jnp.issubdtype(x.dtype, jnp.inexact)
    wide = np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64
    a, b = x.astype(wide), y.astype(wide)
    with np.errstate(invalid="ignore"):  # infinities
        gap = np.where(a == b, 0.0, np.abs(a - b))
    gap = np.where(np.isnan(a) & np.isnan(b), 0.0, np.where(np.isnan(gap), np.inf, gap))
    scale = float(np.max(np.abs(b), initial=0.0, where=np.isfinite(b)))
    allowed = 0.0
    if tolerance is not None and is_float:
        allowed = tolerance[1] + tolerance[0] * scale
    off = _bits_differ(x, y) if tolerance is None else (gap > allowed if is_float else x != y)
    if not off.any():
        return None
    at = np.unravel_index(np.argmax(np.where(off, gap, -1.0)), gap.shape)
    share = f", which is {gap[at] / scale:.1e} of its largest magnitude" if scale else ""
    rule = (
        "every bit must be equal"
        if tolerance is None or not is_float
        else f"{allowed:.1e} is allowed"
    )
    return (
        f"differs in {off.sum()} of {off.size} elements, most at {list(map(int, at))}: it is "
        f"{x[at]!s}, but {y[at]!s} in the reference, {gap[at]:.1e} away{share}; {rule}."
    )


def _bits_differ(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Tells for each element whether the bits differ (two zeros of different sign do)."""
    raw = [np.ascontiguousarray(z).view(np.uint8).reshape(*z.shape, -1) for z in (x, y)]
    return (raw[0] != raw[1]).any(axis=-1)


def _fetch(x: Any) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def _type(x: Any) -> Any:
    return x.shape, x.dtype


def _describe(x: Any) -> str:
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def _default_rtol(tree: Any) -> float:
    types = {x.dtype for x in jtu.tree_leaves(tree) if jaxprs.is_array(x)}
    resolutions = [float(jnp.finfo(d).resolution) for d in types if jnp.issubdtype(d, jnp.inexact)]
    return min(10 * max(resolutions, default=0.0), 1e-2)


# ---- arguments ----------------------------------------------------------------------------------


def _replacements(
    args: Sequence[Any], result: Any, bundle: Bundle | None, num_state: int | None, where: str
) -> dict[int, Any]:
    """Finds the parts of a result that are the next step's arguments, by argument's position."""
    donated, arguments = _donated(args, bundle), {}
    for j, tree in enumerate(jaxprs.Tree.of(tuple(args)).children):
        may_be = tree.numbers and (j in donated or not tree.is_array)
        if may_be if num_state is None else j < num_state:
            arguments[j] = tree
    arrays = list(filter(jaxprs.is_array, jtu.tree_leaves(result)))
    found = {
        j: part.filled(arrays)
        for j, part in jaxprs.next_values(arguments, jaxprs.Tree.of(result)).items()
    }
    if num_state is not None and (others := arguments.keys() - found):
        raise ValueError(
            f"num_state={num_state}, but no part of the result is like argument {min(others)}; "
            f"count only the arguments that the result replaces."
        )
    for j, node in found.items():
        for path, x in jtu.tree_leaves_with_path(node):
            is_float = jaxprs.is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)
            if is_float and np.isnan(_fetch(x)).any():
                raise AssertionError(
                    f"{where}: what replaces args[{j}]{jtu.keystr(path)} has a NaN, so that "
                    f"further steps show nothing; give data= that the function takes."
                )
    return found


def _donated(args: Sequence[Any], bundle: Bundle | None) -> set[int]:
    """Finds the positions of donated arguments."""
    if bundle is None:
        return set()
    owners = [j for j, arg in enumerate(args) for x in jtu.tree_leaves(arg) if jaxprs.is_array(x)]
    return {owners[a.array] for a in bundle.arguments if a.donated}


def _copied(tree: Any) -> Any:
    def copy(x):
        return x.copy() if isinstance(x, jax.Array | np.ndarray) else x

    return jtu.tree_map(copy, tree)


def _varied(tree: Any, step: int) -> Any:
    """Makes other data of the same types: folds keys with the step, rolls other arrays by it."""

    def vary(x):
        if not jaxprs.is_array(x):
            return x
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            folded = jax.vmap(lambda key: jax.random.fold_in(key, step))(x.reshape(-1))
            return folded.reshape(x.shape)
        axis = next((a for a in reversed(range(x.ndim)) if x.shape[a] > 1), None)
        if axis is None:
            return x
        return (np if isinstance(x, np.ndarray) else jnp).roll(x, step, axis)

    return jtu.tree_map(vary, tree)


# ---- programs -----------------------------------------------------------------------------------


def _bundle_of(step: Any) -> Bundle:
    return step if isinstance(step, Bundle) else step.bundle


def _sent_arrays(bundle: Bundle) -> Iterator[tuple[Message, str, str, Any]]:
    """Yields the message, name, kind and type of each array that is sent."""
    for program in bundle.programs:
        for send in program.sends:
            m = send.message
            for name, kind, aval in zip(m.names, m.kinds, m.avals, strict=True):
                yield m, name, kind, aval


def _arguments(bundle: Bundle, argument: Any) -> list[int]:
    """Finds the numbers of the step's flat arguments that `argument` means."""
    paths = [a.name for a in bundle.arguments]
    if isinstance(argument, int):
        argument = f"[{argument}]"
    if isinstance(argument, str):
        prefix = argument.removeprefix("args")
        found = [n for n, p in enumerate(paths) if _is_below(p, prefix)]
        what = f"args{prefix}"
    else:
        leaves = [
            (jtu.keystr(path), _type(x))
            for path, x in jtu.tree_leaves_with_path(argument)
            if jaxprs.is_array(x)
        ]
        whole = _whole_arguments(bundle)
        types = {path: own for path, (own, _) in whole.items()}
        first = leaves[0][0] if leaves else ""
        prefixes = {p.removesuffix(first) for p in whole if leaves and p.endswith(first)}
        wanted = {
            prefix + path
            for prefix in prefixes
            if all(types.get(prefix + path) == own for path, own in leaves)
            for path, _ in leaves
        }
        found = [n for path in whole if path in wanted for n in whole[path][1]]
        what = f"a {type(argument).__name__} with these {len(leaves)} arrays"
    if not found:
        shown = ", ".join(paths[:8]) + (", ..." if len(paths) > 8 else "")
        raise ValueError(f"the step has no argument {what}; the paths of its arrays are {shown}.")
    return found


def _whole_arguments(bundle: Bundle) -> dict[str, tuple[Any, list[int]]]:
    """Finds by path the type of each array of the caller, and the numbers of its flat arguments."""
    found: dict[str, tuple[Any, list[int]]] = {}
    for n, own in enumerate(bundle.arguments):
        shape, dtype = _type(own.aval)
        if own.rows is not None:
            shape = (own.rows[1], *shape[1:])
        _, numbers = found.get(own.path, (None, []))
        found[own.path] = (shape, dtype), [*numbers, n]
    return found


def _is_below(path: str, prefix: str) -> bool:
    return path.startswith(prefix) and (path == prefix or path[len(prefix)] in ".[")
