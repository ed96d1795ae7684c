"""Tensor and expert parallelism for the language models, as rules on the paths of their parameters.

Of two matrices in a row the first is split by its columns and the second by its rows, so that the
devices exchange activations once for both (Shoeybi et al., "Megatron-LM", arXiv 1909.08053,
section 3): queries, keys and values by their heads before the output of attention, and the first
matrix of a feed-forward layer before the second. Embeddings and output layers are split over the
vocabulary, or over features. Mixtures of experts may also be split by their experts (Lepikhin et
al., "GShard", arXiv 2006.16668, section 3.2). Norms, positions and routers are whole.

The models have no line about this. A rule speaks of all leaves whose path contains the parameter's,
which are those of the optimizer's moments, too.
"""

from jax.sharding import PartitionSpec

Rules = list[tuple[str, PartitionSpec]]

# The matrices are as Equinox has them, [out, in]: columns are the first dimension.
# The byte-level GPT's `attention.qkv` is whole: it has all queries before all keys, so that no
# split of it follows the heads.
_BY_COLUMNS = [
    r"attention\.(query|key|value)_proj",  # GPT-2
    r"attention\.(queries|keys|values)",  # Llama, Mixtral
    r"(mlp\.)?(gate|up)",
]
_BY_ROWS = [r"attention\.(output_proj|out)", r"(mlp\.)?down"]
_EXPERTS = r"mixture\.experts\."


def rules(
    axis: str | None = "model",
    *,
    experts: str | None = None,
    vocabulary: bool = True,
) -> Rules:
    """Rules for `jaxpp.place`'s `in_specs`, for each GPT, GPT-2, Llama, Mistral and Mixtral.

    For the arguments that are a model or an optimizer's state. Layers may be a tuple of modules or
    one stacked module.

    Args:
        axis: the axis to split heads, feed-forward features and embeddings over; None not to. As
            many devices should divide the heads; of keys and values too.
        experts: the axis to split experts over; each expert is then split over `axis`, if that is
            another one.
        vocabulary: whether embeddings and output layers are split over the vocabulary, which has to
            be a multiple of the size of `axis`; otherwise over features.

    Example:
        >>> from experiments.models import parallel
        >>> found = {spec for name, spec in parallel.rules("model") if "down" in name}
        >>> PartitionSpec(None, "model") in found
        True
    """
    inside = None if axis == experts else axis
    columns, rows = PartitionSpec(axis), PartitionSpec(None, axis)
    expert_columns = PartitionSpec(experts, inside)
    expert_rows = PartitionSpec(experts, None, inside)
    of_blocks = [
        (_EXPERTS + r"(gate|up)\.weight$", expert_columns),
        (_EXPERTS + r"down\.weight$", expert_rows),
        *((name + r"\.(weight|bias)$", columns) for name in _BY_COLUMNS),
        *((name + r"\.weight$", rows) for name in _BY_ROWS),
    ]
    table = columns if vocabulary else rows
    return [
        *((r"blocks\.\d+\." + name, spec) for name, spec in of_blocks),
        *((r"blocks\.(?!\d)" + name, PartitionSpec(None, *spec)) for name, spec in of_blocks),
        (r"(^|\.)(embed|head)\.weight$", table),
    ]
