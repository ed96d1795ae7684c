"""A residual network in Flax NNX, with batch norms and dropouts; the cost model cuts it.

The train step is that of NNX's functional training loop: what `nnx.split` gives goes in and out.

    python -m examples.libraries.flax_nnx --schedule=interleaved_1f1b
"""

import jax
import numpy as np
import optax
from flax import nnx

import jaxpp
from examples.libraries import training
from jaxpp.schedules import Schedule

WIDTH, CLASSES = 16, 5


class Block(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.norm = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm(x)))))


class Net(nnx.Module):
    def __init__(self, layers: int, rngs: nnx.Rngs):
        self.embed = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(WIDTH, rngs) for _ in range(layers)])
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_model(layers: int):
    """The model and its optimizer, as NNX users hold them."""
    model = nnx.jit(lambda rngs: Net(layers, rngs))(nnx.Rngs(0))
    # The large epsilon keeps the noise of gradients near zero from becoming a whole step.
    return model, nnx.Optimizer(model, optax.adam(1e-2, eps=1e-3), wrt=nnx.Param)


def make_state(num_stages: int):
    return nnx.state(make_model(num_stages))


def make_train_step(schedule: Schedule | None, num_stages: int, num_microbatches: int):
    """The train step, as a pipeline or on one device; see `training.Example`."""
    graphdef, _ = nnx.split(make_model(num_stages))

    def train_step(state, batch):
        model, optimizer = nnx.merge(graphdef, state)
        structure, params, rest = nnx.split(model, nnx.Param, ...)

        def loss_fn(params, rest, batch):
            model = nnx.merge(structure, params, rest, copy=True)  # to mutate it under `grad`
            losses = optax.softmax_cross_entropy_with_integer_labels(
                model(batch["x"]), batch["label"]
            )
            return losses.mean(), nnx.state(model, nnx.Not(nnx.Param))

        if schedule is None:
            grad_fn = training.in_a_loop_with_state(loss_fn, num_microbatches)
        else:
            staged = jaxpp.wrap_forward(jaxpp.split_stages(loss_fn, num_stages))
            # The statistics of the batch norms and the counts of the dropouts' keys go from each
            # microbatch to the next.
            grad_fn = jaxpp.microbatch(
                jax.value_and_grad(staged, has_aux=True),
                num_microbatches,
                in_axes=(None, "carry", 0),
                reduce=(("mean", "carry"), "mean"),
            )
            grad_fn = jaxpp.schedule(grad_fn, schedule)
        (loss, rest), grads = grad_fn(params, rest, batch)
        nnx.update(model, rest)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    return train_step


def draw_batch(step: int, num_microbatches: int):
    """Points near the corners of a cube, labelled by the corner."""
    random = np.random.default_rng(step)
    label = random.integers(CLASSES, size=4 * num_microbatches)
    x = np.eye(CLASSES, WIDTH)[label] + 0.3 * random.normal(size=(len(label), WIDTH))
    return {"x": x.astype(np.float32), "label": label.astype(np.int32)}


EXAMPLE = training.Example(make_state, make_train_step, draw_batch)

if __name__ == "__main__":
    training.run(EXAMPLE)
