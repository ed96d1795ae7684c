"""The U-Net in plain Equinox: each level of the way down is read again on the way up.

Unpadded convolutions and cropped skips (Ronneberger et al., "U-Net: Convolutional Networks for
Biomedical Image Segmentation", arXiv 1505.04597, section 2 and figure 1).
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from experiments.models.language import cross_entropy


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a U-Net: `width` channels at the top, doubled by each of `depth` levels."""

    width: int = 64
    depth: int = 4
    channels: int = 1
    classes: int = 2
    dropout: float = 0.5


#: Ronneberger et al., figure 1; the paper has dropout at the bottom but does not say how much.
CONFIGS = {"unet": Config()}

Features = Float[Array, "channels height width"]


class DoubleConvolution(eqx.Module):
    """Two unpadded convolutions of 3x3, each with a ReLU; each edge loses four pixels."""

    first: eqx.nn.Conv2d
    second: eqx.nn.Conv2d

    def __init__(self, channels: int, width: int, *, key: Key[Array, ""]):
        first_key, second_key = jax.random.split(key)
        self.first = eqx.nn.Conv2d(channels, width, 3, key=first_key)
        self.second = eqx.nn.Conv2d(width, width, 3, key=second_key)

    def __call__(self, x: Features) -> Features:
        """Transforms one image's features."""
        return jax.nn.relu(self.second(jax.nn.relu(self.first(x))))


class Up(eqx.Module):
    """One level of the way up: doubles the edges, and joins what the same level had before."""

    widen: eqx.nn.ConvTranspose2d
    convolve: DoubleConvolution

    def __init__(self, width: int, *, key: Key[Array, ""]):
        widen_key, convolve_key = jax.random.split(key)
        self.widen = eqx.nn.ConvTranspose2d(2 * width, width, 2, stride=2, key=widen_key)
        self.convolve = DoubleConvolution(2 * width, width, key=convolve_key)

    def __call__(self, x: Features, skip: Features) -> Features:
        """From the level below and the skip of this one, which is cropped to its centre."""
        x = self.widen(x)
        top, left = ((a - b) // 2 for a, b in zip(skip.shape[1:], x.shape[1:], strict=True))
        centre = skip[:, top : top + x.shape[1], left : left + x.shape[2]]
        return self.convolve(jnp.concatenate([centre, x]))


class UNet(eqx.Module):
    """A network that gives each pixel of an image's centre a class.

    `model.down` and `model.up` are tuples, the level at the top first; `bottom` is between them.
    Convolutions begin as Equinox draws them.
    """

    down: tuple[DoubleConvolution, ...]
    pool: eqx.nn.MaxPool2d
    bottom: DoubleConvolution
    dropout: eqx.nn.Dropout
    up: tuple[Up, ...]
    head: eqx.nn.Conv2d

    def __init__(self, config: Config, *, key: Key[Array, ""]):
        """Draws the parameters, in float32.

        Args:
            config: the sizes, e.g. `CONFIGS["unet"]`.
            key: the random key.
        """
        down_key, bottom_key, up_key, head_key = jax.random.split(key, 4)
        widths = [config.width * 2**level for level in range(config.depth + 1)]
        inputs = [config.channels, *widths]
        self.down = tuple(
            DoubleConvolution(inputs[level], widths[level], key=k)
            for level, k in enumerate(jax.random.split(down_key, config.depth))
        )
        self.pool = eqx.nn.MaxPool2d(2, stride=2)
        self.bottom = DoubleConvolution(widths[-2], widths[-1], key=bottom_key)
        self.dropout = eqx.nn.Dropout(config.dropout)
        self.up = tuple(
            Up(widths[level], key=k)
            for level, k in enumerate(jax.random.split(up_key, config.depth))
        )
        self.head = eqx.nn.Conv2d(config.width, config.classes, 1, key=head_key)

    def __call__(
        self,
        image: Float[Array, "channels height width"],
        *,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "classes inner_height inner_width"]:
        """The logits of the classes of each pixel in the image's centre.

        Args:
            image: one image; the edges at each level must be even, as for 572 and four levels.
            key: the key of the dropout; without one, nothing is dropped.

        Raises:
            ValueError: when a level has an odd edge, or nothing is left of the image.
        """
        inner_edges(image.shape[1:], len(self.down))
        skips = []
        hidden = image
        for convolve in self.down:
            hidden = convolve(hidden)
            skips.append(hidden)
            hidden = self.pool(hidden)
        hidden = self.dropout(self.bottom(hidden), key=key, inference=key is None)
        for up, skip in zip(reversed(self.up), reversed(skips), strict=True):
            hidden = up(hidden, skip)
        return self.head(hidden)


def inner_edges(edges: tuple[int, ...], depth: int) -> tuple[int, ...]:
    """The edges, in pixels, of the centre that gets classes, for an image's edges.

    Raises:
        ValueError: when a level has an odd edge, or nothing is left of the image.

    Example:
        >>> inner_edges((572, 572), depth=4)
        (388, 388)
    """
    inner = []
    for edge in edges:
        at = edge
        for level in range(depth):
            if at % 2:
                raise ValueError(
                    f"an image of edge {edge} has the odd edge {at - 4} at level {level}, which "
                    f"cannot be halved; choose edges that are even there, e.g. by adding "
                    f"{2**level}."
                )
            at = (at - 4) // 2
        at -= 4
        for _ in range(depth):
            at = 2 * at - 4
        if at < 1:
            raise ValueError(
                f"nothing is left of an image of edge {edge} after {depth} levels; use a larger "
                f"image or a smaller depth."
            )
        inner.append(at)
    return tuple(inner)


def loss_fn(
    model: UNet,
    images: Float[Array, "batch channels height width"],
    labels: Int[Array, "batch inner_height inner_width"],
    keys: Key[Array, " batch"] | None = None,
) -> Float[Array, ""]:
    """Mean cross-entropy of the pixels' classes, each pixel alike.

    Args:
        model: the model.
        images: a batch of images, [batch, channels, height, width].
        labels: the class of each pixel of the centres, [batch, inner_height, inner_width].
        keys: a dropout key for each image, [batch]; without them, nothing is dropped.

    Returns:
        the loss in nats a pixel, a float32 scalar.
    """
    logits = jax.vmap(lambda image, key: model(image, key=key))(images, keys)
    return cross_entropy(jnp.moveaxis(logits, 1, -1), labels)
