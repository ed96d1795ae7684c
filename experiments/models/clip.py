"""CLIP in plain Equinox: two towers, of images and of text, and a contrastive loss over a batch.

Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", arXiv
2103.00020, sections 2.3 to 2.5 and figure 3. The towers read nothing of each other.
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from experiments.models.language import cross_entropy
from experiments.models.vit import Block, embed_patches, num_patches


@dataclasses.dataclass(frozen=True)
class Tower:
    """The sizes of one tower; its blocks are four times as wide inside."""

    layers: int
    width: int
    heads: int


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a CLIP; `image` and `patch` are edges in pixels, `features` what is compared."""

    vision: Tower
    language: Tower
    features: int
    patch: int
    image: int = 224
    channels: int = 3
    vocabulary: int = 49408
    context: int = 77


#: Radford et al., table 20 (ViT-B/32).
CONFIGS = {
    "clip_vit_b_32": Config(
        vision=Tower(layers=12, width=768, heads=12),
        language=Tower(layers=12, width=512, heads=8),
        features=512,
        patch=32,
    )
}


def quick_gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The approximation of the GELU by a sigmoid (Hendrycks and Gimpel, arXiv 1606.08415).

    The published models were trained with it.
    """
    return x * jax.nn.sigmoid(1.702 * x)


def _blocks(tower: Tower, key: Key[Array, ""]) -> tuple[Block, ...]:
    return tuple(
        Block(
            tower.width,
            tower.heads,
            4 * tower.width,
            activation=quick_gelu,
            eps=1e-5,
            key=block_key,
        )
        for block_key in jax.random.split(key, tower.layers)
    )


class ImageTower(eqx.Module):
    """A Vision Transformer with a norm before its blocks, and a projection of the class token."""

    embed: eqx.nn.Conv2d
    class_token: Float[Array, " width"]
    position: Float[Array, "positions width"]
    first_norm: eqx.nn.LayerNorm
    blocks: tuple[Block, ...]
    norm: eqx.nn.LayerNorm
    project: eqx.nn.Linear

    def __init__(self, config: Config, *, key: Key[Array, ""]):
        width = config.vision.width
        count = num_patches(config.image, config.patch)
        embed_key, class_key, position_key, block_key, project_key = jax.random.split(key, 5)
        self.embed = eqx.nn.Conv2d(
            config.channels, width, config.patch, config.patch, use_bias=False, key=embed_key
        )
        self.class_token = width**-0.5 * jax.random.normal(class_key, (width,))
        self.position = width**-0.5 * jax.random.normal(position_key, (1 + count, width))
        self.first_norm = eqx.nn.LayerNorm(width)
        self.blocks = _blocks(config.vision, block_key)
        self.norm = eqx.nn.LayerNorm(width)
        self.project = eqx.nn.Linear(width, config.features, use_bias=False, key=project_key)

    def __call__(self, image: Float[Array, "channels height width"]) -> Float[Array, " features"]:
        """The features of one image, of any length."""
        hidden = embed_patches(self.embed, self.class_token, self.position, image)
        hidden = jax.vmap(self.first_norm)(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return self.project(self.norm(hidden[0]))


class TextTower(eqx.Module):
    """A causal transformer over tokens, and a projection of the last one."""

    embed: eqx.nn.Embedding
    position: Float[Array, "context width"]
    blocks: tuple[Block, ...]
    norm: eqx.nn.LayerNorm
    project: eqx.nn.Linear

    def __init__(self, config: Config, *, key: Key[Array, ""]):
        width = config.language.width
        embed_key, position_key, block_key, project_key = jax.random.split(key, 4)
        self.embed = eqx.nn.Embedding(
            weight=0.02 * jax.random.normal(embed_key, (config.vocabulary, width))
        )
        self.position = 0.01 * jax.random.normal(position_key, (config.context, width))
        self.blocks = _blocks(config.language, block_key)
        self.norm = eqx.nn.LayerNorm(width)
        self.project = eqx.nn.Linear(width, config.features, use_bias=False, key=project_key)

    def __call__(self, tokens: Int[Array, " time"]) -> Float[Array, " features"]:
        """The features of one text, of any length; it ends at its largest token."""
        time = len(tokens)
        hidden = jax.vmap(self.embed)(tokens) + self.position[:time]
        is_causal = jnp.tri(time, dtype=bool)
        for block in self.blocks:
            hidden = block(hidden, is_causal)
        return self.project(self.norm(hidden[jnp.argmax(tokens)]))


class CLIP(eqx.Module):
    """Both towers, and the logarithm of the factor on their similarities."""

    image: ImageTower
    text: TextTower
    log_scale: Float[Array, ""]

    def __init__(self, config: Config, *, key: Key[Array, ""]):
        """Draws the parameters, in float32.

        Args:
            config: the sizes, e.g. `CONFIGS["clip_vit_b_32"]`.
            key: the random key.
        """
        image_key, text_key = jax.random.split(key)
        self.image = ImageTower(config, key=image_key)
        self.text = TextTower(config, key=text_key)
        self.log_scale = jnp.asarray(np.log(1 / 0.07), jnp.float32)

    def __call__(
        self,
        images: Float[Array, "batch channels height width"],
        tokens: Int[Array, "batch time"],
    ) -> Float[Array, "batch batch"]:
        """How much each image (row) is like each text (column): scaled cosines, as logits."""
        seen = _normalise(jax.vmap(self.image)(images))
        read = _normalise(jax.vmap(self.text)(tokens))
        return jnp.exp(self.log_scale) * seen @ read.T


def _normalise(x: Float[Array, "batch features"]) -> Float[Array, "batch features"]:
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def loss_fn(
    model: CLIP,
    images: Float[Array, "batch channels height width"],
    tokens: Int[Array, "batch time"],
) -> Float[Array, ""]:
    """Symmetric contrastive loss: each image finds its text in the batch, each text its image.

    Radford et al., figure 3. It is no mean over examples: all of a batch are compared.

    Args:
        model: the model.
        images: a batch of images, [batch, channels, height, width].
        tokens: the text of each, [batch, time].

    Returns:
        the loss in nats, a float32 scalar.
    """
    logits = model(images, tokens)
    own = jnp.arange(len(images))
    return (cross_entropy(logits, own) + cross_entropy(logits.T, own)) / 2
