"""Takes rows of a jaxpr's outputs before they are made: moves slices back through equations.

A rank that owns some layers of a stacked parameter makes the keys of all layers, which are small,
takes its own keys, and computes its layers from them.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.extend.core as jex

from jaxpp import _compat, _jaxprs
from jaxpp.transforms.stacked import Bounds, Rows, of_rows, row_by_row, with_rows

#: Arrays of fewer elements may be made whole, such as the keys of all layers.
SMALL = 1 << 16


def with_parts(
    jaxpr: jex.ClosedJaxpr, cuts: Sequence[Bounds | None]
) -> tuple[jex.ClosedJaxpr, dict[int, Any]]:
    """Divides outputs of a jaxpr into parts.

    Args:
        jaxpr: the jaxpr; its own equations stay, for others that need them.
        cuts: for each output where its rows are cut, or None where it stays whole.

    Returns:
        The jaxpr with parts in place of outputs. Also the equation to blame for each large output
        of which all rows have to be made before some can be taken.
    """
    slicer = _Slicer(jaxpr.eqns)
    outputs: list[Any] = []
    blamed: dict[int, Any] = {}
    for n, (output, bounds) in enumerate(zip(jaxpr.jaxpr.outvars, cuts, strict=True)):
        if bounds is None:
            outputs.append(output)
            continue
        slicer.large, slicer.blamed = max(output.aval.size, SMALL), None
        outputs += [slicer.rows(output, low, high) for low, high in pairwise(bounds)]
        if slicer.blamed is not None:
            blamed[n] = slicer.blamed
    eqns = [*jaxpr.eqns, *slicer.eqns]
    return _compat.make_closed_jaxpr(jaxpr.jaxpr.invars, outputs, eqns), blamed


class _Slicer:
    """Makes rows of variables; its `eqns` are the new equations that do so.

    Args:
        eqns: the equations that make the variables.
        outer: for the body of a call, the slicer of the call and the operands of the body's inputs.
    """

    def __init__(self, eqns: Sequence[Any], outer: "tuple[_Slicer, dict[Any, Any]] | None" = None):
        self.eqns: list[Any] = []
        #: Operands of the call, by the new inputs of its body that stand for rows of them.
        self.inputs: dict[Any, Any] = {}
        #: An equation that made an array of at least so many elements whole.
        self.blamed: Any = None
        self.large = outer[0].large if outer else 0
        self._outer = outer
        self._maker = {v: eqn for eqn in eqns for v in eqn.outvars}
        self._known: dict[tuple[Any, int, int], Any] = {}

    def rows(self, var: Any, low: int, high: int) -> Any:
        """Gives a variable for rows `low` to `high` of another, made of as few rows as can be."""
        if _jaxprs.is_literal(var):  # an array that a jitted function closes over
            return _jaxprs.literal(var.val[low:high], _with_rows(var, high - low).aval)
        key = var, low, high
        if key in self._known:
            return self._known[key]
        eqn = self._maker.get(var)
        rule = None if eqn is None else row_by_row(eqn)
        if eqn is None and self._outer is not None:
            self._of_operand(var, low, high)
        elif rule is not None:
            self._row_by_row(eqn, rule, low, high)
        elif eqn is not None and _jaxprs.called_jaxpr(eqn) is not None:
            self._of_call(eqn, var, low, high)
        elif eqn is not None and eqn.primitive.name == "cond":
            self._of_conditional(eqn, var, low, high)
        elif eqn is not None and eqn.primitive.name == "scan" and _compat.scan_parts(eqn)[1] == 0:
            self._of_map(eqn, low, high)
        else:
            self._of_whole(eqn, var, low, high)
        return self._known[key]

    def _of_operand(self, var: Any, low: int, high: int) -> None:
        assert self._outer is not None
        outer, operands = self._outer
        own = _with_rows(var, high - low)
        self.inputs[own] = outer.rows(operands[var], low, high)
        self._known[var, low, high] = own

    def _row_by_row(self, eqn: Any, rule: Rows, low: int, high: int) -> None:
        operands = [
            self.rows(v, low, high) if has_rows else v
            for v, has_rows in zip(eqn.invars, rule.operands, strict=True)
        ]
        self._blame_for(eqn, [v for v, r in zip(eqn.invars, rule.operands, strict=True) if not r])
        own = of_rows(eqn, rule, operands, high - low)
        self.eqns.append(own)
        pairs = zip(eqn.outvars, own.outvars, strict=True)
        self._known.update(((v, low, high), r) for v, r in pairs)

    def _of_call(self, eqn: Any, var: Any, low: int, high: int) -> None:
        """Calls the part of a function that makes rows of one of its results."""
        result = eqn.outvars.index(var)
        called = _jaxprs.called_jaxpr(eqn)
        body, operands = self._body(eqn, called, eqn.invars, result, low, high)
        fun = _named(jex.jaxpr_as_fun(body), eqn.params.get("name", "rows"))
        traced = jax.make_jaxpr(jax.jit(fun))(*(v.aval for v in body.jaxpr.invars))
        (call,) = _jaxprs.without_constants(traced)[0].eqns
        self._add(call.replace(source_info=eqn.source_info), operands, var, low, high)

    def _of_conditional(self, eqn: Any, var: Any, low: int, high: int) -> None:
        result = eqn.outvars.index(var)
        parts = [
            self._body(eqn, branch, eqn.invars[1:], result, low, high)
            for branch in eqn.params["branches"]
        ]
        # Each branch is given the operands that any of them reads.
        branches = []
        for k, (body, _) in enumerate(parts):
            invars = [
                v if own == k else _jaxprs.fresh_var(v)
                for own, (other, _) in enumerate(parts)
                for v in other.jaxpr.invars
            ]
            whole = _compat.make_closed_jaxpr(invars, body.jaxpr.outvars, body.eqns)
            branches.append(_compat.with_closed_type(whole, eqn.params["branches"][k]))
        operands = [eqn.invars[0], *(x for _, own in parts for x in own)]
        params = {**eqn.params, "branches": tuple(branches)}
        self._add(eqn.replace(params=params), operands, var, low, high)

    def _of_map(self, eqn: Any, low: int, high: int) -> None:
        """Makes rows of the results of a scan without carries, by a scan over these rows."""
        num_consts, _ = _compat.scan_parts(eqn)
        operands = [
            v if i < num_consts else self.rows(v, low, high) for i, v in enumerate(eqn.invars)
        ]
        self._blame_for(eqn, eqn.invars[:num_consts])
        results = [_with_rows(v, high - low) for v in eqn.outvars]
        params = {**eqn.params, "length": high - low}
        self.eqns.append(eqn.replace(invars=operands, outvars=results, params=params))
        self._known.update(((v, low, high), r) for v, r in zip(eqn.outvars, results, strict=True))

    def _body(
        self, eqn: Any, body: Any, operands: Sequence[Any], result: int, low: int, high: int
    ) -> tuple[jex.ClosedJaxpr, list[Any]]:
        """Makes the jaxpr of rows of a result of a called jaxpr, and finds its operands."""
        opened = body.jaxpr if isinstance(body, jex.ClosedJaxpr) else body
        given = dict(zip(opened.invars, operands, strict=True))
        constants = zip(opened.constvars, _compat.constants_of(body), strict=True)
        given.update((v, _jaxprs.literal(x, v.aval)) for v, x in constants)
        inner = _Slicer(opened.eqns, (self, given))
        output = inner.rows(opened.outvars[result], low, high)
        self.blamed = self.blamed or inner.blamed
        given |= inner.inputs
        eqns = [*opened.eqns, *inner.eqns]
        keep = _jaxprs.ancestors(eqns, [output])
        part = _jaxprs.part([e for e, k in zip(eqns, keep, strict=True) if k], [output])
        self._blame_for(eqn, [given[v] for v in part.inputs if v not in inner.inputs])
        return part.jaxpr, [given[v] for v in part.inputs]

    def _add(self, eqn: Any, operands: Sequence[Any], var: Any, low: int, high: int) -> None:
        self._known[var, low, high] = own = _with_rows(var, high - low)
        self.eqns.append(eqn.replace(invars=list(operands), outvars=[own]))

    def _of_whole(self, eqn: Any, var: Any, low: int, high: int) -> None:
        if eqn is not None:
            self._blame_for(eqn, [var])
        eqns, (rows,) = _jaxprs.record(lambda x: jax.lax.slice_in_dim(x, low, high), [var])
        self._known[var, low, high] = rows
        self.eqns += eqns

    def _blame_for(self, eqn: Any, atoms: Sequence[Any]) -> None:
        """Notes an equation that wants some atoms whole, if that takes a large array."""
        if self.blamed is None and any(map(self._needs_large, _jaxprs.variables(atoms))):
            self.blamed = eqn

    def _needs_large(self, var: Any) -> bool:
        """Tells whether a variable is a large array, or made of one."""
        stack, seen = [var], set()
        while stack:
            var = stack.pop()
            if var.aval.size >= self.large:
                return True
            if var in self._maker and var not in seen:
                stack.extend(_jaxprs.variables(self._maker[var].invars))
            seen.add(var)
        return False


def _with_rows(var: Any, rows: int) -> Any:
    """Makes a new variable of the same type, but for the number of rows."""
    return jex.Var(with_rows(var.aval, rows))


def _named(fun: Any, name: str) -> Any:
    def named(*args):
        return fun(*args)

    named.__name__ = named.__qualname__ = name
    return named
