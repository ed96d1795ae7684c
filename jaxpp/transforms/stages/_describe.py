"""Says what each stage of a function has: layers, operations, parameters, and what crosses."""

import collections
import itertools
import re
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from jaxpp import jaxprs
from jaxpp._messages import warn
from jaxpp.jaxprs import Var, primitives
from jaxpp.transforms.stages import _modules, _stages


def stages_as_text(fun: Callable, *args: Any, **kwargs: Any) -> str:
    """Writes the stages of a function as a table, one stage a line.

    The columns are the layers of the first argument that a stage reads, by their paths, with
    `(part)` where other stages read other arrays of the layer; the
    floating-point operations of its forward, with its share; the bytes of its parameters, and of
    those which other stages read, too; the bytes that it gets from other stages and sends to them;
    and the first stage whose computation is the same.

    Args:
        fun: a function with stages: of `split_stages`, `wrap_forward`, or with marks.
        *args: its arguments, or `jax.ShapeDtypeStruct`s in place of their arrays.
        **kwargs: its arguments by keyword.

    Returns:
        The table.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> def net(params, x):
        ...     for layer in params["layers"]:
        ...         x = jnp.tanh(x @ layer["w"])
        ...     return x.sum()
        >>> params = {"layers": [{"w": jnp.eye(4)} for _ in range(6)]}
        >>> split = jaxpp.split_stages(net, 3)
        >>> print(jaxpp.stages_as_text(split, params, jnp.ones((2, 4))))
        stage  layers      flops  share  parameters  shared  in  out  equal to
            0  layers.0-1    144    33%         128       0   0   32
            1  layers.2-3    144    33%         128       0  32   32   stage 0
            2  layers.4-5    152    35%         128       0  32    0
    """
    traced, stages = _stages.decision_of(fun)(*args, **kwargs)
    arrays = _layers(traced, stages, args[0] if args else None)
    invars = set(stages.jaxpr.jaxpr.invars)
    readers = collections.Counter(v for part in stages.parts for v in part.inputs)
    whole = collections.Counter(arrays[v] for v in readers if v in arrays)
    flops = [sum(map(jaxprs.flops, part.jaxpr.eqns)) for part in stages.parts]
    first: dict[Hashable, int] = {}
    rows: list[tuple[str, ...]] = [
        ("stage", "layers", "flops", "share", "parameters", "shared", "in", "out", "equal to")
    ]
    for k, part in enumerate(stages.parts):
        read = {v: _read_bytes(v, part) for v in part.inputs if v in arrays}
        held = collections.Counter(arrays[v] for v in read)
        layers = _joined(n if held[n] == whole[n] else f"{n} (part)" for n in held)
        like = first.setdefault(jaxprs.without_numbers(part.jaxpr), k)
        numbers = (
            sum(read.values()),
            sum(n for v, n in read.items() if readers[v] > 1 and n == jaxprs.nbytes(v)),
            sum(jaxprs.nbytes(v) for v in part.inputs if v not in invars),
            sum(jaxprs.nbytes(v) for v in jaxprs.variables(part.outputs) if v in readers),
        )
        share = f"{flops[k] / (sum(flops) or 1.0):.0%}"
        row = (str(k), ", ".join(layers), f"{flops[k]:,.0f}", share, *(f"{n:,}" for n in numbers))
        rows.append((*row, "" if like == k else f"stage {like}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        lines.append(
            "  ".join(c.ljust(w) if n == 1 else c.rjust(w) for n, (c, w) in cells).rstrip()
        )
    return "\n".join(lines)


def warn_of_shared(traced: jaxprs.Traced, stages: _stages.Stages, model: Any) -> None:
    """Warns of parameters that are factors in several stages: a model that is called twice.

    A table that one stage looks up, and another one multiplies by (tied embeddings), is none.
    """
    arrays = _layers(traced, stages, model)
    multiplied: dict[Var, list[int]] = {}
    for k, part in enumerate(stages.parts):
        source = {v: v for v in part.inputs if v in arrays}
        factors: set[Var] = set()
        for eqn in part.jaxpr.eqns:
            read = [source[v] for v in jaxprs.variables(eqn.invars) if v in source]
            if eqn.primitive.name in primitives.CONTRACTIONS:
                factors.update(read)
            elif len(eqn.invars) == 1 and read and eqn.primitive.name in _PREPARES:
                source[eqn.outvars[0]] = read[0]
        for v in factors:
            multiplied.setdefault(v, []).append(k)
    twice = {v: readers for v, readers in multiplied.items() if len(readers) > 1}
    if twice:
        count = sum(jaxprs.nbytes(v) * (len(readers) - 1) for v, readers in twice.items())
        which = ", ".join(map(str, sorted({k for readers in twice.values() for k in readers})))
        names = _joined(dict.fromkeys(arrays[v] for v in twice))
        warn(
            f"split_stages: stages {which} multiply by the same parameters ({', '.join(names)}): "
            f"each has a copy, which takes {count:,} bytes more, and their gradients are summed "
            f"once a step. Where the model is called several times, cut it with at= or marks, "
            f"which open one stage for all calls, or call it once on all inputs, joined along the "
            f"batch."
        )


#: The primitives that leave a parameter whole on its way to a product.
_PREPARES = primitives.REORDERS | {"convert_element_type", "copy"}


def _layers(traced: jaxprs.Traced, stages: _stages.Stages, model: Any) -> dict[Var, str]:
    """Finds the layer of each array of the first argument."""
    arrays = stages.jaxpr.jaxpr.invars[traced.num_closed_over :]
    return dict(zip(arrays, map(_modules.layer_of, _modules.array_paths(model)), strict=False))


def _read_bytes(array: Var, part: jaxprs.Part) -> int:
    """Counts the bytes that a stage reads of an array: those of slices, if it only reads such."""
    inside = part.jaxpr.jaxpr.invars[part.inputs.index(array)]
    eqns = [e for e in part.jaxpr.eqns if inside in jaxprs.variables(e.invars)]
    if eqns and all(e.primitive.name == "slice" for e in eqns):
        return min(sum(jaxprs.nbytes(e.outvars[0]) for e in eqns), jaxprs.nbytes(inside))
    return jaxprs.nbytes(inside)


def _joined(names: Iterable[str]) -> list[str]:
    """Joins names that differ in their last number alone: `layers.0-3`."""
    split = [re.fullmatch(r"(.*?)(\d*)", name) for name in names]
    pairs = [(m[1], int(m[2]) if m[2] else None) for m in split if m]
    found = []
    for stem, group in itertools.groupby(sorted(pairs, key=str), key=lambda pair: pair[0]):
        numbers = sorted(n for _, n in group if n is not None)
        runs: list[list[int]] = []
        for n in numbers:
            if runs and n == runs[-1][-1] + 1:
                runs[-1].append(n)
            else:
                runs.append([n])
        shown = [str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs]
        found.append(stem + ",".join(shown))
    return found
