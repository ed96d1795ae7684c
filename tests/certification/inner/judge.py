"""Judges an edit: what the proof says of it, and whether it changes what the programs give."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxpp
from tests.certification.inner import drawn, places, small_steps, types
from tests.certification.inner.interpreter import Interpreter, Outcome, Taken

#: The kinds of edits that change where something is rounded.
_OF_TYPES = {kind.__name__ for kind in types.KINDS}


@dataclasses.dataclass
class Case:
    """A step with what its edits need: its programs, its equations, and arguments for runs."""

    name: str
    step: Any
    args: Any
    lowered: Any
    sites: list[places.Site]
    interpreter: Interpreter
    inputs: dict[str, list[Any]]
    wanted: dict[str, Outcome]

    def certify(self, bundle: Any) -> Any:
        return dataclasses.replace(self.lowered, bundle=bundle).certify(passes=False)

    def eps(self, edit: drawn.Edit) -> float:
        """The precision of sums in another order; an edit of a type leaves them as they are."""
        is_narrow = any(word in self.name for word in ("half", "narrow"))
        return 2.0**-9 if is_narrow and edit.kind not in _OF_TYPES else 2.0**-20

    def draw(self, key: Any) -> drawn.Edit:
        return drawn.draw(f"{self.name}/{key}", self.lowered.bundle, self.sites)

    def difference(self, bundle: Any, eps: float) -> str:
        """Runs programs on all arguments; says where they differ from the unedited ones."""
        for name, arrays in self.inputs.items():
            if name not in self.wanted:
                self.wanted[name] = self.interpreter.run(self.lowered.bundle, arrays)
            found = difference(self.interpreter.run(bundle, arrays), self.wanted[name], eps)
            if found:
                return f"{name}: {found}"
        return ""


@functools.cache
def case(name: str) -> Case:
    step, args = small_steps.CASES[name]()
    lowered = step.lower(*args)
    bundle, inputs = lowered.bundle, inputs_of(jax.tree.leaves(args))
    if any(c.jaxpr.effects for c in bundle.computations):  # which run again for each edit
        inputs = {k: x for k, x in inputs.items() if " in " not in k or k in _WITH_EFFECTS}
    sites, interpreter = places.sites_of(bundle), Interpreter(bundle.inside)
    return Case(name, step, args, lowered, sites, interpreter, inputs, {})


#: The special values with which a step with effects runs.
_WITH_EFFECTS = ("NaN in 0", "inf in 1")


# ---- arguments ----------------------------------------------------------------------------------

#: The special values of floats, by name.
SPECIAL = {
    "NaN": np.nan,
    "inf": np.inf,
    "-inf": -np.inf,
    "zero": 0.0,
    "minus zero": -0.0,
    "largest": "max",
    "tiny": "smallest_subnormal",
}


#: The arguments of which a proof over the real numbers does not speak.
BEYOND = ("NaN", "inf", "-inf", "largest", "tiny", "large", "huge", "small")


def inputs_of(leaves: Sequence[Any]) -> dict[str, list[Any]]:
    """Arguments for runs: as given, random, with special values, with ties, of extreme sizes."""
    rng = np.random.default_rng(7)

    def each(change):
        return [_like(leaf, change(np.array(leaf))) if _is_plain(leaf) else leaf for leaf in leaves]

    def random_values(x):
        if x.dtype.kind == "b":
            return rng.random(x.shape) < 0.5
        if _is_float(x.dtype):
            return 2 * rng.normal(size=x.shape)
        return rng.permutation(x.reshape(-1)).reshape(x.shape)

    def ties(x):
        return rng.integers(-1, 2, x.shape) if _is_float(x.dtype) else x

    def signed_zeros(x):
        return np.where(rng.random(x.shape) < 0.5, 0.0, -0.0) if _is_float(x.dtype) else x

    def scaled(factor):
        def change(x):
            with np.errstate(all="ignore"):
                return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64) * factor

        return lambda x: change(x) if _is_float(x.dtype) else x

    def extreme(x):
        if x.dtype.kind not in "iu":
            return x
        info = np.iinfo(x.dtype)
        some = np.array([info.max, info.min, info.max - 1, 0, -1 & info.max], x.dtype)
        return np.where(rng.random(x.shape) < 0.5, rng.choice(some, x.shape), x)

    found = {
        "as given": list(leaves),
        "random": each(random_values),
        "ties": each(ties),
        "zeros": each(signed_zeros),
        "large": each(scaled(1e6)),
        "huge": each(scaled(1e25)),
        "small": each(scaled(1e-25)),
        "extreme": each(extreme),
        "negative": each(lambda x: -np.abs(x) if _is_float(x.dtype) else x),
    }
    floats = [n for n, x in enumerate(leaves) if _is_plain(x) and _is_float(x.dtype) and x.size]
    for name, value in SPECIAL.items():
        for n in floats:  # one element of one argument, so that others can still be told apart
            x = np.array(leaves[n])
            info: Any = jnp.finfo(x.dtype)
            one = float(getattr(info, value)) if isinstance(value, str) else value
            x.reshape(-1)[rng.integers(x.size)] = one
            found[f"{name} in {n}"] = [_like(a, x) if k == n else a for k, a in enumerate(leaves)]
    return found


def _is_float(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def _is_plain(x: Any) -> bool:
    return not jnp.issubdtype(x.dtype, jax.dtypes.extended)


def _like(x: Any, value: Any) -> Any:
    with np.errstate(all="ignore"):
        if not np.ndim(value) and getattr(x, "weak_type", False):
            return jnp.asarray(np.asarray(value).astype(x.dtype).item())
        return jnp.asarray(value, x.dtype)


# ---- comparison ---------------------------------------------------------------------------------


def difference(own: Outcome, wanted: Outcome, eps: float) -> str:
    """Says where two outcomes differ; empty if they do not.

    Args:
        own: the outcome of the edited programs.
        wanted: that of the unedited ones.
        eps: 0 where each bit counts; where sums may be in another order, the precision of the
            narrowest type in which there are some.
    """
    if len(own.results) != len(wanted.results):
        return f"{len(own.results)} results for {len(wanted.results)}"
    for n, ((record, values), (old, before)) in enumerate(
        zip(own.results, wanted.results, strict=True)
    ):
        if said := _of_records(record, old):
            return f"result {n}: {said}"
        if values.keys() != before.keys():
            return f"result {n}: on ranks {[*values]} for {[*before]}"
        for rank in values:
            if said := of_values(values[rank][0], before[rank][0], eps):
                return f"result {n} on rank {rank}: {said}"
            if values[rank][1] != before[rank][1]:
                return f"result {n} on rank {rank}: in {values[rank][1]} for {before[rank][1]}"
        if not eps and len({id(v) for v, _ in values.values()}) > len(
            {id(v) for v, _ in before.values()}
        ):
            return f"result {n}: its ranks do not agree"
    if said := _of_events(own.ordered, wanted.ordered, eps):
        return f"ordered effects: {said}"
    key = repr if not eps else lambda e: repr(e)[:24]
    if said := _of_events(sorted(own.unordered, key=key), sorted(wanted.unordered, key=key), eps):
        return f"effects: {said}"
    return ""


def _of_records(own: Any, old: Any) -> str:
    names = ("array", "rows")
    types = ("shape", "dtype", "weak_type", "memory_space")
    pairs = [(k, getattr(own, k), getattr(old, k)) for k in names]
    pairs += [(k, getattr(own.aval, k, None), getattr(old.aval, k, None)) for k in types]
    return "; ".join(f"{k} {a} for {b}" for k, a, b in pairs if a != b)


def of_values(own: Any, old: Any, eps: float) -> str:
    """Says where two arrays differ: their types, what is not finite, and numbers."""
    if own is old:
        return ""
    for name in ("dtype", "shape", "weak_type"):
        a, b = getattr(own, name, None), getattr(old, name, None)
        if a != b:
            return f"{name} {a} for {b}"
    if not _is_plain(old):
        return "other keys"
    if not _is_float(old.dtype):
        return _example(own, old, np.asarray(own) != np.asarray(old))
    a, b = (_parts(x) for x in (own, old))
    strange = ~np.isfinite(b) | ~np.isfinite(a)
    wrong = strange & ~((a == b) | (np.isnan(a) & np.isnan(b)))
    if wrong.any():
        return "not finite: " + _example(a, b, wrong)
    with np.errstate(all="ignore"):
        apart = np.where(strange, 0.0, np.abs(a - b))
    if not eps:
        if (apart > 0).any():
            return _example(a, b, apart > 0)
        return _signs(a, b)
    most = np.max(np.where(strange, 0, np.abs(b)), initial=0)
    return _example(a, b, apart > max(16 * eps * most, 1e-30))


def _signs(a: Any, b: Any) -> str:
    wrong = (np.signbit(a) != np.signbit(b)) & ~np.isnan(a)
    return "signs of zeros: " + _example(a, b, wrong) if wrong.any() else ""


def _parts(x: Any) -> Any:
    x = np.asarray(x)
    if x.dtype.kind == "c":
        return np.stack([x.real, x.imag]).astype(np.float64)
    return x.astype(np.float64)


def _example(a: Any, b: Any, wrong: Any) -> str:
    a, b, wrong = np.asarray(a), np.asarray(b), np.asarray(wrong)
    if not wrong.any():
        return ""
    return (
        f"{a[wrong].reshape(-1)[0]} for {b[wrong].reshape(-1)[0]} ({wrong.sum()} of {wrong.size})"
    )


def _of_events(own: Sequence[Any], old: Sequence[Any], eps: float) -> str:
    if len(own) != len(old):
        return f"{len(own)} for {len(old)}"
    for a, b in zip(own, old, strict=True):
        if isinstance(a, str) or isinstance(b, str):
            if a != b:
                return f"{a!r} for {b!r}"
        elif a[0] != b[0] or len(a) != len(b):
            return f"{a[0]} for {b[0]}"
        else:
            for x, y in zip(a[1:], b[1:], strict=True):
                if said := of_values(x, y, eps):
                    return f"{a[0]}: {said}"
    return ""


# ---- verdicts -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What came of an edit.

    Args:
        edit: the edit.
        said: what the proof says: `"exact"`, `"regrouped"`, `"refuted"` or the name of an error.
        difference: where what the programs give differs; `"does not run: ..."` if they do not run,
            None if they were not run.
    """

    edit: drawn.Edit
    said: str
    difference: str | None

    @property
    def is_error(self) -> bool:
        """Whether the proof neither accepts nor refutes it."""
        return self.said not in ("exact", "regrouped", "refuted")

    @property
    def is_accepted(self) -> bool:
        return self.said in ("exact", "regrouped")

    @property
    def is_false(self) -> bool:
        """Whether the proof accepts what gives something else."""
        if not self.is_accepted or not self.difference:
            return False
        return not self.difference.startswith("does not run") and not self.is_beyond

    @property
    def is_beyond(self) -> bool:
        """Whether they differ where the proof does not speak of: it is over the real numbers.

        So it is if an argument is not finite, very large, or very small.
        """
        beyond = bool(self.difference) and self.difference.startswith(BEYOND)
        return beyond and self.said == "regrouped"


def judge(own: Case, edit: drawn.Edit, run_refuted: bool = False) -> Verdict:
    """Asks the proof, and runs what it accepts."""
    try:
        said = "exact" if own.certify(edit.bundle).exact else "regrouped"
    except jaxpp.Refuted:
        said = "refuted"
    except Exception as error:
        said = type(error).__name__
    if said not in ("exact", "regrouped") and not run_refuted:
        return Verdict(edit, said, None)
    try:
        found = own.difference(edit.bundle, own.eps(edit) if said == "regrouped" else 0.0)
    except Taken as error:
        found = f"memory: {error}"
    except Exception as error:
        found = f"does not run: {type(error).__name__}: {str(error)[:200]}"
    return Verdict(edit, said, found)
