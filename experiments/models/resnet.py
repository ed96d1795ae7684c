"""ResNets in plain Equinox, with the running statistics of their BatchNorms as a state.

He et al., "Deep Residual Learning for Image Recognition", arXiv 1512.03385, section 3 and table 1;
Ioffe and Szegedy, "Batch Normalization", arXiv 1502.03167, algorithms 1 and 2. As in torchvision, a
bottleneck halves the edges in its 3x3 convolution.
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from experiments.models.language import cross_entropy

#: The name of the axis over which BatchNorm takes its statistics.
BATCH = "batch"


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a ResNet: `groups` has the number of blocks at each size of the image.

    `width` is that of the first group; each further one has twice as many channels. `momentum` is
    how much of the running statistics a batch leaves as it was.
    """

    groups: tuple[int, ...]
    bottleneck: bool
    width: int = 64
    channels: int = 3
    classes: int = 1000
    momentum: float = 0.9


#: He et al., table 1.
CONFIGS = {
    "resnet18": Config(groups=(2, 2, 2, 2), bottleneck=False),
    "resnet50": Config(groups=(3, 4, 6, 3), bottleneck=True),
}

Features = Float[Array, "channels height width"]


class Convolution(eqx.Module):
    """A convolution without a bias, and the BatchNorm of its channels."""

    convolve: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm

    def __init__(
        self,
        channels: int,
        width: int,
        size: int,
        *,
        stride: int = 1,
        momentum: float,
        key: Key[Array, ""],
    ):
        self.convolve = eqx.nn.Conv2d(
            channels, width, size, stride, padding=size // 2, use_bias=False, key=key
        )
        self.norm = eqx.nn.BatchNorm(width, BATCH, momentum=momentum, mode="batch")

    def __call__(self, x: Features, state: eqx.nn.State) -> tuple[Features, eqx.nn.State]:
        """Transforms one image's features, and updates the statistics by those of the batch."""
        return self.norm(self.convolve(x), state)


class Block(eqx.Module):
    """Some convolutions, with a ReLU after each, added to what entered before the last ReLU."""

    convolutions: tuple[Convolution, ...]
    shortcut: Convolution | None

    def __init__(
        self, channels: int, width: int, *, stride: int, config: Config, key: Key[Array, ""]
    ):
        shortcut_key, *keys = jax.random.split(key, 4)
        if config.bottleneck:
            result = 4 * width
            sizes = [(channels, width, 1, 1), (width, width, 3, stride), (width, result, 1, 1)]
        else:
            result = width
            sizes = [(channels, width, 3, stride), (width, width, 3, 1)]
        self.convolutions = tuple(
            Convolution(a, b, size, stride=step, momentum=config.momentum, key=k)
            for (a, b, size, step), k in zip(sizes, keys, strict=False)
        )
        self.shortcut = None
        if stride > 1 or channels != result:
            self.shortcut = Convolution(
                channels, result, 1, stride=stride, momentum=config.momentum, key=shortcut_key
            )

    def __call__(self, x: Features, state: eqx.nn.State) -> tuple[Features, eqx.nn.State]:
        """Transforms one image's features, and updates the statistics."""
        *inner, last = self.convolutions
        hidden = x
        for convolution in inner:
            hidden, state = convolution(hidden, state)
            hidden = jax.nn.relu(hidden)
        hidden, state = last(hidden, state)
        if self.shortcut is not None:
            x, state = self.shortcut(x, state)
        return jax.nn.relu(x + hidden), state


class ResNet(eqx.Module):
    """A classifier of images, made with `eqx.nn.make_with_state(ResNet)(config, key=key)`.

    `model.blocks` has the blocks of all groups, one after the other. Convolutions begin as Equinox
    draws them.
    """

    first: Convolution
    pool: eqx.nn.MaxPool2d
    blocks: tuple[Block, ...]
    head: eqx.nn.Linear

    def __init__(self, config: Config, *, key: Key[Array, ""]):
        """Draws the parameters, in float32.

        Args:
            config: the sizes, e.g. `CONFIGS["resnet50"]`.
            key: the random key.
        """
        first_key, head_key, *keys = jax.random.split(key, 2 + sum(config.groups))
        self.first = Convolution(
            config.channels, config.width, 7, stride=2, momentum=config.momentum, key=first_key
        )
        self.pool = eqx.nn.MaxPool2d(3, stride=2, padding=1)
        blocks = []
        channels = config.width
        for group, count in enumerate(config.groups):
            width = config.width * 2**group
            for n in range(count):
                stride = 2 if group > 0 and n == 0 else 1
                key = keys[len(blocks)]
                blocks.append(Block(channels, width, stride=stride, config=config, key=key))
                channels = 4 * width if config.bottleneck else width
        self.blocks = tuple(blocks)
        self.head = eqx.nn.Linear(channels, config.classes, key=head_key)

    def __call__(
        self, image: Float[Array, "channels height width"], state: eqx.nn.State
    ) -> tuple[Float[Array, " classes"], eqx.nn.State]:
        """The logits of one image of a batch, which is mapped over an axis named `BATCH`.

        Args:
            image: [channels, height, width].
            state: the statistics so far.

        Returns:
            logits, [classes], and the statistics with this batch's in them.
        """
        hidden, state = self.first(image, state)
        hidden = self.pool(jax.nn.relu(hidden))
        for block in self.blocks:
            hidden, state = block(hidden, state)
        return self.head(jnp.mean(hidden, axis=(1, 2))), state


def loss_fn(
    model: ResNet,
    state: eqx.nn.State,
    images: Float[Array, "batch channels height width"],
    labels: Int[Array, " batch"],
) -> tuple[Float[Array, ""], eqx.nn.State]:
    """Mean cross-entropy of the labels, and the statistics with this batch's in them.

    Args:
        model: the model.
        state: the statistics so far.
        images: a batch of images, [batch, channels, height, width].
        labels: the class of each, [batch].

    Returns:
        the loss in nats an image, a float32 scalar; and the state.
    """
    run = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name=BATCH)
    logits, state = run(images, state)
    return cross_entropy(logits, labels), state
