"""The Vision Transformer in plain Equinox.

Pre-norm blocks over patches of an image and a class token (Dosovitskiy et al., "An Image is Worth
16x16 Words", arXiv 2010.11929, section 3.1).
"""

import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from experiments.models.language import cross_entropy, split_or_none


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a ViT; `image` and `patch` are edges in pixels, `mlp` is a width."""

    layers: int
    width: int
    heads: int
    mlp: int
    patch: int
    image: int = 224
    channels: int = 3
    classes: int = 1000
    dropout: float = 0.0


#: Dosovitskiy et al., table 1; images and classes of ImageNet-1k, as torchvision has them.
CONFIGS = {
    "vit_b_16": Config(layers=12, width=768, heads=12, mlp=3072, patch=16),
    "vit_l_16": Config(layers=24, width=1024, heads=16, mlp=4096, patch=16),
}


def exact_gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The GELU by the error function, not by its approximation with a tanh."""
    return jax.nn.gelu(x, approximate=False)


class Block(eqx.Module):
    """One transformer layer: each half normalises, transforms, drops out and adds."""

    attention_norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp_norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    activation: Callable = eqx.field(static=True)

    def __init__(
        self,
        width: int,
        heads: int,
        mlp: int,
        *,
        dropout: float = 0.0,
        activation: Callable = exact_gelu,
        eps: float = 1e-6,
        key: Key[Array, ""],
    ):
        attention_key, up_key, down_key = jax.random.split(key, 3)
        self.attention_norm = eqx.nn.LayerNorm(width, eps=eps)
        self.attention = eqx.nn.MultiheadAttention(
            heads,
            width,
            use_query_bias=True,
            use_key_bias=True,
            use_value_bias=True,
            use_output_bias=True,
            key=attention_key,
        )
        self.mlp_norm = eqx.nn.LayerNorm(width, eps=eps)
        self.up = eqx.nn.Linear(width, mlp, key=up_key)
        self.down = eqx.nn.Linear(mlp, width, key=down_key)
        self.dropout = eqx.nn.Dropout(dropout)
        self.activation = activation

    def __call__(
        self,
        x: Float[Array, "time width"],
        mask: Bool[Array, "time time"] | None = None,
        *,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "time width"]:
        """Applies the layer; keeps shape and dtype.

        Args:
            x: the features of each position, [time, width].
            mask: which position (row) attends to which (column), [time, time]; without it, to all.
            key: the key of the dropout; without one, nothing is dropped.
        """
        attention_key, inner_key, mlp_key = split_or_none(key, 3)
        drop = eqx.Partial(self.dropout, inference=key is None)
        normed = jax.vmap(self.attention_norm)(x)
        x = x + drop(self.attention(normed, normed, normed, mask), key=attention_key)
        inner = self.activation(jax.vmap(self.up)(jax.vmap(self.mlp_norm)(x)))
        return x + drop(jax.vmap(self.down)(drop(inner, key=inner_key)), key=mlp_key)


class ViT(eqx.Module):
    """A classifier of images: patches and a class token, blocks, and a linear head.

    Linear layers and the convolution begin as Equinox draws them.
    """

    embed: eqx.nn.Conv2d
    class_token: Float[Array, " width"]
    position: Float[Array, "positions width"]
    dropout: eqx.nn.Dropout
    blocks: tuple[Block, ...]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, config: Config, *, key: Key[Array, ""]):
        """Draws the parameters, in float32.

        Args:
            config: the sizes, e.g. `CONFIGS["vit_b_16"]`.
            key: the random key.

        Raises:
            ValueError: when `patch` does not divide `image`.
        """
        count = num_patches(config.image, config.patch)
        embed_key, position_key, head_key, *block_keys = jax.random.split(key, 3 + config.layers)
        self.embed = eqx.nn.Conv2d(
            config.channels, config.width, config.patch, stride=config.patch, key=embed_key
        )
        self.class_token = jnp.zeros(config.width)
        self.position = 0.02 * jax.random.normal(position_key, (1 + count, config.width))
        self.dropout = eqx.nn.Dropout(config.dropout)
        self.blocks = tuple(
            Block(config.width, config.heads, config.mlp, dropout=config.dropout, key=k)
            for k in block_keys
        )
        self.norm = eqx.nn.LayerNorm(config.width, eps=1e-6)
        self.head = eqx.nn.Linear(config.width, config.classes, key=head_key)

    def __call__(
        self, image: Float[Array, "channels height width"], *, key: Key[Array, ""] | None = None
    ) -> Float[Array, " classes"]:
        """The logits of one image's classes; no key: no dropout."""
        embed_key, *block_keys = split_or_none(key, 1 + len(self.blocks))
        hidden = embed_patches(self.embed, self.class_token, self.position, image)
        hidden = self.dropout(hidden, key=embed_key, inference=key is None)
        for block, block_key in zip(self.blocks, block_keys, strict=True):
            hidden = block(hidden, key=block_key)
        return self.head(self.norm(hidden[0]))


def num_patches(image: int, patch: int) -> int:
    """How many patches a square image has, both given by their edge.

    Raises:
        ValueError: when `patch` does not divide `image`.

    Example:
        >>> num_patches(224, 16)
        196
    """
    if image % patch:
        raise ValueError(
            f"the image must be a multiple of the patch, got image={image} and patch={patch}; "
            f"use image={image - image % patch + patch}, or a divisor of {image} as patch."
        )
    return (image // patch) ** 2


def embed_patches(
    embed: eqx.nn.Conv2d,
    class_token: Float[Array, " width"],
    position: Float[Array, "positions width"],
    image: Float[Array, "channels height width"],
) -> Float[Array, "positions width"]:
    """The class token and then the patches of an image, row by row, each with its position."""
    features = embed(image)
    patches = features.reshape(features.shape[0], -1).T
    return jnp.concatenate([class_token[None], patches]) + position


def loss_fn(
    model: ViT,
    images: Float[Array, "batch channels height width"],
    labels: Int[Array, " batch"],
    keys: Key[Array, " batch"] | None = None,
) -> Float[Array, ""]:
    """Mean cross-entropy of the labels.

    Args:
        model: the model.
        images: a batch of images, [batch, channels, height, width].
        labels: the class of each, [batch].
        keys: a dropout key for each image, [batch]; without them, nothing is dropped.

    Returns:
        the loss in nats an image, a float32 scalar.
    """
    logits = jax.vmap(lambda image, key: model(image, key=key))(images, keys)
    return cross_entropy(logits, labels)
