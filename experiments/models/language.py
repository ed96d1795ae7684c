"""What several models share: how layers are held and run, initial values, and the loss."""

from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

Module = TypeVar("Module", bound=eqx.Module)
Carry = TypeVar("Carry")


# ---- layers -------------------------------------------------------------------------------------


def make_blocks(
    make: Callable[[Key[Array, ""]], Module], number: int, *, stacked: bool, key: Key[Array, ""]
) -> tuple[Module, ...] | Module:
    """Makes the layers of a model, with the same parameters in both ways to hold them.

    Args:
        make: makes one layer from its random key.
        number: the number of layers.
        stacked: whether to hold all layers in one module, whose arrays have a leading layer axis,
            instead of in a tuple.
        key: the random key of all layers.
    """
    keys = jax.random.split(key, number)
    return eqx.filter_vmap(make)(keys) if stacked else tuple(make(key) for key in keys)


def run_blocks(
    body: Callable[[Any, Carry, Key[Array, ""] | None], tuple[Carry, Any]],
    carry: Carry,
    blocks: tuple[Any, ...] | eqx.Module,
    *,
    keys: Key[Array, " layers"] | None = None,
    remat: bool = False,
) -> tuple[Carry, Any]:
    """Runs the layers one after the other: a tuple of them in a loop, stacked ones in a `lax.scan`.

    Args:
        body: `body(block, carry, key)` gives what goes to the next layer, and the layer's output.
        carry: what goes to the first layer.
        blocks: the layers, as `make_blocks` made them.
        keys: the random key of each layer; without them, `body` gets None.
        remat: whether the backward pass computes each layer again (`jax.checkpoint`).

    Returns:
        what the last layer hands on, and the outputs of all layers, stacked on a leading axis.
    """
    run = eqx.filter_checkpoint(body) if remat else body
    if isinstance(blocks, tuple):
        outputs = []
        for layer, block in enumerate(blocks):
            carry, output = run(block, carry, None if keys is None else keys[layer])
            outputs.append(output)
        return carry, jax.tree.map(lambda *layers: jnp.stack(layers), *outputs)
    arrays, rest = eqx.partition(blocks, eqx.is_array)

    def run_slice(carry, arrays_and_key):
        arrays, key = arrays_and_key
        return run(eqx.combine(arrays, rest), carry, key)

    return jax.lax.scan(run_slice, carry, (arrays, keys))


# ---- random values ------------------------------------------------------------------------------


def with_normal_weights(module: Module, deviation: float, *, key: Key[Array, ""]) -> Module:
    """The module with the weights of its linear layers drawn anew from a normal distribution.

    Args:
        module: a module of linear layers and others; a linear layer itself, too.
        deviation: the standard deviation of the new weights; biases become zero.
        key: the random key.
    """

    def is_linear(node):
        return isinstance(node, eqx.nn.Linear)

    nodes, structure = jax.tree.flatten(module, is_leaf=is_linear)
    keys = jax.random.split(key, len(nodes))

    def draw(node, key):
        weight = deviation * jax.random.normal(key, node.weight.shape, node.weight.dtype)
        bias = None if node.bias is None else jnp.zeros_like(node.bias)
        return eqx.tree_at(
            lambda linear: (linear.weight, linear.bias),
            node,
            (weight, bias),
            is_leaf=lambda x: x is None,
        )

    return structure.unflatten(
        draw(node, key) if is_linear(node) else node for node, key in zip(nodes, keys, strict=True)
    )


def normal_embedding(
    vocabulary: int, width: int, deviation: float, *, dtype: Any, key: Key[Array, ""]
) -> eqx.nn.Embedding:
    """An embedding of `vocabulary` tokens, with normally distributed features."""
    return eqx.nn.Embedding(weight=deviation * jax.random.normal(key, (vocabulary, width), dtype))


def split_or_none(key: Key[Array, ""] | None, number: int) -> list[Key[Array, ""]] | list[None]:
    """Splits `key` into `number` keys; of no key, makes as many times no key."""
    return [None] * number if key is None else list(jax.random.split(key, number))


# ---- the loss -----------------------------------------------------------------------------------


def cross_entropy(
    logits: Float[Array, "batch time vocabulary"], targets: Int[Array, "batch time"]
) -> Float[Array, ""]:
    """Mean negative log-likelihood of `targets`, in nats, computed in float32."""
    log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(log_probabilities, targets[..., None], axis=-1).mean()
