"""The two primitives that mark a program for pipelining; both are identities.

`enter` marks where a stage opens, and `edge` marks the outputs of an outlined stage. A parameter
of an edge says whether it was transposed: it tells a stage's backward call from its forward call.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.tree_util as jtu
from jax.interpreters import ad, batching, mlir, partial_eval

from jaxpp import _compat, jaxprs
from jaxpp.jaxprs import Eqn


def pipeline_enter_stage(x: Any, name: str | None = None, stage_id: int | None = None) -> Any:
    """Marks a value as the entrance of the next pipeline stage: its consumers are in that stage.

    It is the identity on a pytree, under `jit`, `grad`, `vmap` and `jax.checkpoint` too, and a
    no-op where nothing is pipelined. A mark at the very start of the program opens stage 0.

    Args:
        x: any pytree; its arrays, of any shape and dtype, are marked.
        name: a name for the stage, for printouts.
        stage_id: the number of the stage that opens here, from 0. By default stages are numbered
            in the order of the marks; give all marks a number or none.

    Returns:
        `x`.

    Raises:
        ValueError: if `stage_id` is negative.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> def net(w, x):
        ...     h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w))
        ...     return (h @ w).sum()
        >>> float(net(jnp.eye(2), jnp.zeros((1, 2))))
        0.0
    """
    if stage_id is not None and (isinstance(stage_id, bool) or int(stage_id) < 0):
        raise ValueError(f"pipeline_enter_stage: stage_id is a number from 0, got {stage_id!r}.")
    leaves, tree = jtu.tree_flatten(x)
    arrays = [leaf for leaf in leaves if jaxprs.is_array(leaf)]
    stage = None if stage_id is None else int(stage_id)
    marked = iter(enter_p.bind(*arrays, stage=stage, name=name) if arrays else ())
    leaves = [next(marked) if jaxprs.is_array(leaf) else leaf for leaf in leaves]
    return jtu.tree_unflatten(tree, leaves)


def edge(array: Any) -> Any:
    """Marks an output of an outlined stage."""
    return edge_p.bind(array, transposed=False)


enter_p = jex.Primitive("pipeline_enter_stage")
enter_p.multiple_results = True
enter_p.def_impl(lambda *xs, **_: list(xs))
enter_p.def_abstract_eval(lambda *avals, **_: list(avals))
mlir.register_lowering(enter_p, lambda _, *xs, **__: xs)
batching.primitive_batchers[enter_p] = lambda xs, dims, **params: (
    enter_p.bind(*xs, **params),
    dims,
)
ad.primitive_jvps[enter_p] = lambda xs, ts, **params: (enter_p.bind(*xs, **params), list(ts))

_compat.hand_on_keys(enter_p)

edge_p = jex.Primitive("stage_edge")
edge_p.def_impl(lambda x, **_: x)
edge_p.def_abstract_eval(lambda aval, **_: aval)
mlir.register_lowering(edge_p, lambda _, x, **__: [x])
batching.primitive_batchers[edge_p] = lambda xs, dims, **params: (
    edge_p.bind(*xs, **params),
    dims[0],
)


def _edge_jvp(primals, tangents, **params):
    (x,), (t,) = primals, tangents
    return edge_p.bind(x, **params), t if type(t) is ad.Zero else edge_p.bind(t, **params)


def _edge_transpose(ct, _, *, transposed, **params):
    return [ct if type(ct) is ad.Zero else edge_p.bind(ct, transposed=not transposed, **params)]


def keep_nothing(*_, **__) -> bool:
    """Tells a checkpoint, as its policy, to keep nothing: not even edges."""
    return False


def _keep_edge(policy, unknown, instantiated, eqn) -> Any:
    """Keeps an edge, but under `keep_nothing`: a stage is computed again from its edges."""
    new = [v for v, i in zip(eqn.invars, instantiated, strict=True) if not i]
    if any(unknown):
        return None, eqn, [True], [True], jaxprs.variables(new)
    if policy is keep_nothing:
        return eqn, eqn, [False], [True], jaxprs.variables(new)
    return eqn, None, [False], [False], []


partial_eval.partial_eval_jaxpr_custom_rules[edge_p] = _keep_edge
ad.primitive_jvps[edge_p] = _edge_jvp
ad.primitive_transposes[edge_p] = _edge_transpose
_compat.hand_on_keys(edge_p)


def replace_marks(jaxpr: jex.ClosedJaxpr, new: Callable[[Eqn], Eqn | None]) -> jex.ClosedJaxpr:
    """Replaces the marks in a jaxpr, at any depth; removes those for which `new` gives None."""

    def rule(eqn: Eqn) -> jaxprs.Replacement | None:
        if not is_enter(eqn):
            inside = jaxprs.contains(eqn, is_enter)
            return ([jaxprs.map_jaxprs(eqn, again)], eqn.outvars) if inside else None
        put = new(eqn)
        return ([], eqn.invars) if put is None else ([put], eqn.outvars)

    def again(inner: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
        return replace_marks(inner, new)

    known = jaxprs.Substitution()
    eqns = jaxprs.rewritten(jaxpr.eqns, rule, known)
    return _compat.with_equations(jaxpr, eqns, [known(v) for v in jaxpr.jaxpr.outvars])


def is_enter(eqn: Eqn) -> bool:
    """Tells whether an equation is a mark of `pipeline_enter_stage`."""
    return eqn.primitive is enter_p


def is_edge(eqn: Eqn) -> bool:
    """Tells whether an equation marks an output of an outlined stage."""
    return eqn.primitive is edge_p


# ---- calls with a name --------------------------------------------------------------------------

# The name of a call is all that JAX keeps for certain. Where nothing reads the outputs of a stage
# (another output of the function is differentiated), the call stays, but its body has no edges.
_STAGE_CALL = re.compile(r"pipeline_stage_(\d+)_of_(\d+)")


def _named(fun, name: str) -> Any:
    def named(*args):
        return fun(*args)

    named.__name__ = named.__qualname__ = name
    return jax.jit(named)


#: JAX traces a function once for arrays of the same types, as most parameters of layers are.
_named_once = functools.lru_cache(maxsize=16)(_named)


def call_stage(fun, stage: int, num_stages: int, args: Sequence[Any]) -> list[Any]:
    """Calls `fun` as the outlined stage `stage`: a `jax.jit` of its own, its outputs marked."""

    def outlined(*args):
        return list(map(edge, fun(*args)))

    return _named(outlined, f"pipeline_stage_{stage}_of_{num_stages}")(*args)


def call_again(call: Eqn, stage: int, num_stages: int, args: Sequence[Any]) -> list[Any]:
    """Calls what `record_stage` gave, as another stage.

    JAX differentiates and transposes a jaxpr once, so it is worth to call one for equal stages.
    """
    return _compat.bind_call(call, args, f"pipeline_stage_{stage}_of_{num_stages}")


def record_stage(fun, args: Sequence[Any]) -> Eqn | None:
    """Traces a call of a stage for such arguments; None if it needs more than these."""
    jaxpr = jax.make_jaxpr(lambda *args: call_stage(fun, 0, 1, args))(*args)
    eqn = jaxpr.eqns[0] if len(jaxpr.eqns) == 1 else None
    inside, consts = jaxpr.jaxpr, _compat.constants_of(jaxpr)
    whole = eqn and (list(eqn.invars), list(eqn.outvars)) == (inside.invars, inside.outvars)
    return eqn if whole and not consts else None


def call_as(name: str, fun: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Calls `fun` under a name: a `jax.jit` of its own, which outlives differentiation.

    There are the loop of one replica (`replica`), the tasks of a loop that may lose its schedule
    (`task_F0`), and functions that combine rows of replicas (`merge_sum`). One of ours that does is
    kept with what it was traced to; `merge_other` is a user's.
    """
    is_ours = name.startswith("merge_") and name != "merge_other"
    return (_named_once if is_ours else _named)(fun, f"pipeline_{name}")(*args)


def called_as(eqn: Eqn, kind: str) -> str | None:
    """Reads off a call of `call_as` what follows a kind in its name; None for another equation."""
    name, start = eqn.params.get("name"), f"pipeline_{kind}"
    has_kind = isinstance(name, str) and name.startswith(start)
    return str(name).removeprefix(start) if has_kind else None


def stage_of_call(eqn: Eqn) -> tuple[int, int] | None:
    """Reads the stage and the number of stages off a call of `call_stage`; None for another."""
    name = eqn.params.get("name")
    match = _STAGE_CALL.fullmatch(name) if isinstance(name, str) else None
    return (int(match[1]), int(match[2])) if match else None


def is_stage_call(eqn: Eqn) -> bool:
    """Tells whether an equation is a forward or backward call of an outlined stage."""
    return stage_of_call(eqn) is not None


def is_backward_call(eqn: Eqn) -> bool:
    """Tells whether a stage's call is a transposed one."""
    return any(
        jaxprs.contains(inner, lambda e: is_edge(e) and e.params["transposed"])
        for sub in jaxprs.sub_jaxprs(eqn)
        for inner in sub.eqns
    )
