"""Trains a GPT-2 on one device and on a mesh of pipeline, data and tensor parallel devices.

    python -m examples.data_parallel_gpt2
    python -m examples.data_parallel_gpt2 --pp=4 --dp=2 --mp=1 --zero1

Dropout, weight decay for matrices alone, metrics and a state in one bundle: the two trainings have
the same losses, which are printed side by side. CPU devices are made for the run.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Key

import jaxpp
from experiments.models import gpt2, language, parallel
from experiments.training import data

_PP = flags.DEFINE_integer("pp", 2, "Ranks of the pipeline.", lower_bound=1)
_DP = flags.DEFINE_integer("dp", 2, "Replicas, each with devices of its own.", lower_bound=1)
_MP = flags.DEFINE_integer("mp", 2, "Devices of a rank that share its layers.", lower_bound=1)
_ZERO1 = flags.DEFINE_bool("zero1", False, "Whether the --dp devices share the optimizer state.")
_LAYERS = flags.DEFINE_integer("layers", 4, "Transformer blocks.", lower_bound=1)
_WIDTH = flags.DEFINE_integer("width", 64, "Features of each position.", lower_bound=1)
_HEADS = flags.DEFINE_integer("heads", 4, "Attention heads of a block.", lower_bound=1)
_DROPOUT = flags.DEFINE_float("dropout", 0.1, "Probability of dropping a feature.", 0.0, 1.0)
_SEQUENCE_LENGTH = flags.DEFINE_integer("sequence_length", 32, "In bytes.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 32, "Sequences in a step.", lower_bound=1)
_MICROBATCHES = flags.DEFINE_integer("microbatches", 4, "Slices of each replica.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 10, "Optimizer steps.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the parameters, the batches and the dropout.")
_DATA = flags.DEFINE_string("data", None, "A file or folder of text; by default Python's library.")

#: The largest difference of two losses of a step, relative.
TOLERANCE = 1e-5


class TrainState(eqx.Module):
    """All that goes from one step to the next."""

    step: Int[Array, ""]
    model: gpt2.GPT2
    opt_state: optax.OptState
    dropout_key: Key[Array, ""]


class Metrics(NamedTuple):
    """What a step tells, as float32 scalars: means over its tokens, and a global norm."""

    loss: Float[Array, ""]
    accuracy: Float[Array, ""]
    gradient_norm: Float[Array, ""]


Batch = Int[Array, "batch time_plus_1"] | Int[np.ndarray, "batch time_plus_1"]
Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def decayed(parameters: Any) -> Any:
    """The mask of weight decay: matrices, but not embeddings, positions, norms and biases."""

    def is_decayed(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return leaf.ndim > 1 and not name.startswith(("embed", "position"))

    return jax.tree_util.tree_map_with_path(is_decayed, parameters)


def make_optimizer() -> optax.GradientTransformation:
    """AdamW after clipping, with the settings of GPT-3 (arXiv 2005.14165, appendix B)."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(1e-3, b2=0.95, weight_decay=0.1, mask=decayed),
    )


def initial_state(optimizer: optax.GradientTransformation, key: Key[Array, ""]) -> TrainState:
    config = gpt2.Config(
        _LAYERS.value,
        _WIDTH.value,
        _HEADS.value,
        context=_SEQUENCE_LENGTH.value,
        vocabulary=256,
        dropout=_DROPOUT.value,
    )
    parameters_key, dropout_key = jax.random.split(key)
    model = gpt2.GPT2(config, key=parameters_key)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    return TrainState(jnp.zeros((), jnp.int32), model, opt_state, dropout_key)


def loss_fn(
    model: gpt2.GPT2, tokens: Int[Array, "batch time_plus_1"], keys: Key[Array, " batch"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Mean cross-entropy of the next byte, and how often the likeliest byte is the next one."""
    logits = jax.vmap(lambda sequence, key: model(sequence, key=key))(tokens[:, :-1], keys)
    accuracy = jnp.mean(jnp.argmax(logits, axis=-1) == tokens[:, 1:])
    return language.cross_entropy(logits, tokens[:, 1:]), accuracy


def train_step_of(loss_fn: Callable[..., Any], optimizer: Any, schedule: Any = None) -> Step:
    """The train step: microbatches of replicas, whose gradients are added up once at the end.

    Without a schedule, it is for one device, which runs one replica after the other.
    """
    grad_fn = jaxpp.microbatch(
        eqx.filter_value_and_grad(loss_fn, has_aux=True),
        _MICROBATCHES.value,
        in_axes=(None, 0, 0),
        replicas=_DP.value,
    )
    if schedule is not None:
        grad_fn = jaxpp.schedule(grad_fn, schedule)

    def train_step(state, tokens):
        # A key for each sequence: what is dropped does not depend on where a sequence is.
        keys = jax.random.split(jax.random.fold_in(state.dropout_key, state.step), tokens.shape[0])
        (loss, accuracy), grads = grad_fn(state.model, tokens, keys)
        parameters = eqx.filter(state.model, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, state.opt_state, parameters)
        model = eqx.apply_updates(state.model, updates)
        metrics = Metrics(loss, accuracy, optax.global_norm(grads))
        return TrainState(state.step + 1, model, opt_state, state.dropout_key), metrics

    return train_step


def make_devices() -> None:
    """CPU devices for the mesh, where there is no accelerator."""
    jax.config.update("jax_num_cpu_devices", _PP.value * _DP.value * _MP.value)


def placed_step(optimizer: optax.GradientTransformation) -> Any:
    """The train step on the mesh: state by the rules of tensor parallelism, batches over `data`."""
    mesh = jaxpp.MpmdMesh((_PP.value, _DP.value, _MP.value), ("mpmd", "data", "model"))
    staged = jaxpp.wrap_forward(jaxpp.split_stages(loss_fn, num_stages=_PP.value))
    return jaxpp.place(
        train_step_of(staged, optimizer, jaxpp.schedules.OneFOneB()),
        mesh,
        donate_argnums=0,
        in_specs=(parallel.rules("model"), PartitionSpec("data")),
        zero1="data" if _ZERO1.value else (),
    )


def batches() -> Iterator[Batch]:
    text = data.load(_DATA.value).train
    for step in range(_STEPS.value):
        yield data.batch(
            text,
            batch_size=_BATCH_SIZE.value,
            sequence_length=_SEQUENCE_LENGTH.value,
            seed=_SEED.value,
            step=step,
        )


def train(step: Step, state: TrainState) -> list[dict[str, float]]:
    """The metrics of each step, as numbers."""
    history = []
    for tokens in batches():
        state, metrics = step(state, tokens)
        history.append({name: float(value) for name, value in metrics._asdict().items()})
    return history


def main(_: list[str]) -> None:
    make_devices()
    optimizer = make_optimizer()
    init = functools.partial(initial_state, optimizer)
    key = jax.random.key(_SEED.value)
    alone = train(eqx.filter_jit(train_step_of(loss_fn, optimizer)), init(key))
    placed = placed_step(optimizer)
    # Made in its shards, from the same key: initial values do not depend on the mesh either.
    state = placed.initialize(init, key, rest=(next(batches()),))
    on_mesh = train(placed, state)

    shape = f"{_PP.value}x{_DP.value}x{_MP.value}"
    print(f"{'step':>4}  {'one device':>12}  {shape:>12}  {'accuracy':>8}  {'gradient norm':>13}")
    for number, (one, other) in enumerate(zip(alone, on_mesh, strict=True), start=1):
        print(
            f"{number:4}  {one['loss']:12.7f}  {other['loss']:12.7f}  {other['accuracy']:8.4f}"
            f"  {other['gradient_norm']:13.6f}"
        )
    differences = [abs(a["loss"] / b["loss"] - 1) for a, b in zip(on_mesh, alone, strict=True)]
    print(f"largest relative difference of two losses: {np.max(differences):.1e}")
    if not np.max(differences) <= TOLERANCE:  # written so that NaN fails
        raise SystemExit(f"The losses differ by more than {TOLERANCE:.0e}.")


if __name__ == "__main__":
    app.run(main)
