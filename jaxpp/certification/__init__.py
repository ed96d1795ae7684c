"""Proves of a placed step, before it is compiled, that it computes its function.

It takes tracing from the compiler: `LoweredStep.retrace` traces the function, and transforms ask
`jaxprs.by_definition` for what stands in their place. From the files below it takes types of data
(`_program`), helpers for jaxprs (`jaxprs`, `_specs`) and `_compat`. It shares no rule
and no table with the passes: what is elementwise is asked of `jax.vmap`.
"""

from jaxpp.certification._certificate import Certificate as Certificate
from jaxpp.certification._certify import certify as certify
from jaxpp.certification._refuted import Refuted as Refuted
from jaxpp.certification._refuted import Undecided as Undecided
