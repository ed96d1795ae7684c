"""The facts about primitives, by name: each fact is declared once, here.

To add a primitive, write its name into each group for which the sentence above the group is true; a
test holds each group against JAX. A primitive in no group is treated with care: its arrays are made
whole, and it is not moved. A rule that looks at the parameters of an equation is a function, and
stands in the module that needs it.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxpp.jaxprs._typing import Atom, Eqn, Literal, Var

# ---- calls --------------------------------------------------------------------------------------

#: They run their body once, as it is. The values of these tables name the parameter that has it.
PLAIN_CALLS = {"jit": "jaxpr", "closed_call": "call_jaxpr", "eval_jaxpr": "call_jaxpr"}
#: They run their body once more for the backward pass.
CHECKPOINTS = {"remat2": "jaxpr"}
#: They have a derivative that is not that of their body.
CUSTOM_RULES = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
#: All that run a body once; a task is one of a loop's body.
CALLS = {
    **PLAIN_CALLS,
    **CHECKPOINTS,
    **CUSTOM_RULES,
    "custom_lin": "call_jaxpr",
    "pipeline_task": "jaxpr",
}

# ---- elements -----------------------------------------------------------------------------------

#: They make each element of their results of the elements at the same place. Operands that are
#: scalars, or of size 1 along an axis, serve for all places.
ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp
    clz complex conj convert_element_type copy cos cosh digamma div eq eq_to erf erf_inv erfc exp
    exp2 expm1 floor ge gt imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt
    lt_to max min mul mulhi name ne neg nextafter not one_minus_square or polygamma polynomial
    population_count pow random_clone random_fold_in random_seed real reduce_precision rem round
    rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    stop_gradient sub tan tanh threefry2x32 xor zeros_like zeta
    """.split()
)
#: They hand on their operand with a note to the compiler, such as one about its devices.
HANDS_ON = frozenset(
    "device_put layout_constraint reshard stage_edge tie with_memory_space_constraint".split()
)
#: They give all elements of their operand, each once, in another order or shape.
REORDERS = frozenset("copy reshape rev squeeze transpose".split())
#: They give elements of their operand, and nothing else; the operand's values do not say which.
MOVES = REORDERS | {"broadcast_in_dim", "slice"}

# ---- costs --------------------------------------------------------------------------------------

#: They compute nothing.
FREE = (
    REORDERS
    | {"broadcast_in_dim", "iota"}
    | {"optimization_barrier", "pipeline_enter_stage", "stage_edge", "stop_gradient"}
)
#: They are work of a stage's own, and not the preparation of an argument.
HEAVY = frozenset("cond conv_general_dilated dot_general dynamic_slice gather scan while".split())

# ---- sums ---------------------------------------------------------------------------------------

#: They add two values up.
ADDS = frozenset({"add", "add_any"})
#: They combine two values in any order, without rounding.
EXTREMES = frozenset({"and", "max", "min", "or"})
#: They sum products, and round in another way for another number of rows: XLA tiles them.
CONTRACTIONS = frozenset({"conv_general_dilated", "dot_general"})
#: They make zeros if one of their first two operands is zeros.
PRODUCTS = CONTRACTIONS | {"mul"}

_ALL = slice(None)
#: For each primitive the operands that make zeros if all of them are zeros.
KEEPS_ZEROS: Mapping[str, slice] = {
    **dict.fromkeys(ADDS, _ALL),
    **dict.fromkeys(MOVES, slice(1)),
    "concatenate": _ALL,
    "convert_element_type": _ALL,
    "cumsum": _ALL,
    "div": slice(1),
    "dynamic_slice": slice(1),
    "dynamic_update_slice": slice(2),
    "gather": slice(1),
    "imag": _ALL,
    "name": _ALL,
    "neg": _ALL,
    "optimization_barrier": _ALL,
    "pad": _ALL,
    "real": _ALL,
    "reduce_precision": _ALL,
    "reduce_sum": _ALL,
    "reduce_window_sum": _ALL,
    "scatter-add": slice(0, None, 2),
    "select_n": slice(1, None),
    "sharding_constraint": _ALL,
    "sub": _ALL,
}


def keeps_zeros(eqn: Eqn, zero: Sequence[bool]) -> bool:
    """Tells whether an equation makes zeros of operands that are zeros, whatever the others are."""
    name = eqn.primitive.name
    if name in PRODUCTS:
        return any(zero[:2])
    return name in KEEPS_ZEROS and all(zero[KEEPS_ZEROS[name]])


def is_zero(atom: Atom, maker: Mapping[Var, Eqn]) -> bool:
    """Tells whether an atom is zeros, as far as the equations that make variables show."""
    while not isinstance(atom, Literal):
        eqn = maker.get(atom)
        if eqn is None or eqn.primitive.name not in MOVES | {"convert_element_type"}:
            return False
        atom = eqn.invars[0]
    return np.ndim(atom.val) == 0 and atom.val == 0
