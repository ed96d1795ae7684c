"""Mutations of how a function is cut into stages, stacked layers among them."""

from tests.mutations.mutation import Mutation

MUTATIONS = (
    Mutation(
        "a policy is ignored",
        "jaxpp/transforms/stages/_wrap_forward.py",
        "if own is None:",
        "if True:",
        tests=("wrap_forward::a_policy_keeps_less_and_computes_again",),
        kept="the same values in more memory",
    ),
    Mutation(
        "a backward call is taken for a forward",
        "jaxpp/transforms/stages/_marks.py",
        "transposed=not transposed",
        "transposed=transposed",
        tests=("marks::calls_know_their_stage_and_direction",),
        refuted_on="layers, ZB-H1",
    ),
)
