"""Trains a language model as a pipeline: does it learn, how fast, and is it the same training?

    python -m experiments.train_lm
    python -m experiments.train_lm --schedule=interleaved_1f1b --tied --dropout=0.1 --verify
    python -m experiments.train_lm --schedule='seq1f1b(slices=4)'
    python -m experiments.train_lm --model=mixtral --pp=2 --num_pipeline_microbatches=4 --profile
    python -m experiments.train_lm --model=llama2 --width=64 --pp=2 --dp=2 --mp=2 --zero1 --verify
    python -m experiments.train_lm --mesh=ray --checkpoint_every=50 --restarts=3
    python -m experiments.train_lm --mesh=ray --checkpoint_every=50 --resume

By default the model is a byte-level GPT; `--model` takes others (see `training_model`), which read
the same bytes. The ranks of the pipeline are devices of this process: CPU devices, made for the
run, or the accelerators that JAX finds (shared between ranks where there are fewer). Inside a rank
`--dp` devices share each microbatch, and `--mp` devices the heads and features of its layers. With
`--mesh=ray` they are processes of a Ray session: of the one that is there, or of one made for the
run. The output folder gets `metrics.jsonl`, checkpoints, pictures of the losses and of the
schedule, a trace (`--profile`), and a sample of generated text.

A run that was killed goes on from its last checkpoint with `--resume` and the same other flags, and
has the losses that it would have had, to the bit: a step's batch and dropout keys follow from its
number. With `--restarts` it does so by itself when a worker of `--mesh=ray` dies.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
import tqdm
from absl import app, flags, logging
from jaxtyping import Array, Float, Int, Key, UInt8

import jaxpp
from experiments import (
    data,
    text_sample,
    training_checkpoints,
    training_log,
    training_mesh,
    training_model,
    training_pipeline,
)
from experiments.training_log import Row

# So that --help shows the flags of all parts.
for part in (training_model, training_mesh, training_pipeline, training_checkpoints, text_sample):
    flags.adopt_module_key_flags(part)

_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", None, "Sequences in a step; by default 32.", lower_bound=1
)
_BATCH_SIZE_PER_DEVICE = flags.DEFINE_integer(
    "batch_size_per_device", None, "The same for each of the dp * pp * mp devices.", lower_bound=1
)
_STEPS = flags.DEFINE_integer("steps", 300, "Optimizer steps.", lower_bound=1)
_OPTIMIZER = flags.DEFINE_enum("optimizer", "adamw", ["adamw", "sgd", "lion"], "Update rule.")
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 2e-3, "At the peak of the schedule.")
_WARMUP_STEPS = flags.DEFINE_integer("warmup_steps", 20, "Steps until the peak.", lower_bound=0)
_CLIP_NORM = flags.DEFINE_float("clip_norm", 1.0, "Largest global norm of the gradient.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the parameters, the batches and the dropout.")

_DATA = flags.DEFINE_string(
    "data", None, "A file or folder of text; by default Python's own library."
)
_EVAL_EVERY = flags.DEFINE_integer("eval_every", 50, "Steps between held-out losses.", 1)
_VERIFY = flags.DEFINE_bool(
    "verify", False, "Whether to train again on one device and to compare losses and parameters."
)

# The first steps compile, fill caches, and may be traced: the throughput leaves them out.
UNTIMED_STEPS = 7
EVALUATION_BATCHES = 4
# Relative. The training amplifies roundings, and in bfloat16 these are 2^-9 of each parameter.
TOLERANCES = {
    "float32": {"loss": 1e-4, "parameters": 1e-3},
    "bfloat16": {"loss": 2e-2, "parameters": 0.5},
}

State = tuple[Any, optax.OptState]
Step = Callable[..., tuple[Any, optax.OptState, Float[Array, ""]]]


def batch_size() -> int:
    if _BATCH_SIZE_PER_DEVICE.value is None:
        return _BATCH_SIZE.value or 32
    return _BATCH_SIZE_PER_DEVICE.value * training_mesh.devices()


def random_key(use: str) -> Key[Array, ""]:
    """The key of the run for "parameters", "dropout" or "text"."""
    uses = ["parameters", "dropout", "text"]
    return jax.random.split(jax.random.key(_SEED.value), len(uses))[uses.index(use)]


def make_optimizer() -> optax.GradientTransformation:
    """The update rule, after clipping, with a linear warm-up and a cosine decay to zero."""
    rate = optax.warmup_cosine_decay_schedule(
        init_value=0.0 if _WARMUP_STEPS.value else _LEARNING_RATE.value,
        peak_value=_LEARNING_RATE.value,
        warmup_steps=_WARMUP_STEPS.value,
        decay_steps=max(_STEPS.value, _WARMUP_STEPS.value + 1),
    )
    rules = {"adamw": optax.adamw, "sgd": optax.sgd, "lion": optax.lion}
    return optax.chain(optax.clip_by_global_norm(_CLIP_NORM.value), rules[_OPTIMIZER.value](rate))


def initial_state(optimizer: optax.GradientTransformation) -> State:
    model = training_model.make(random_key("parameters"))
    return model, optimizer.init(eqx.filter(model, eqx.is_inexact_array))


def train_step_of(grad_fn: Callable[..., Any], optimizer: optax.GradientTransformation) -> Step:
    """The train step that takes its gradients from `grad_fn`."""

    def train_step(model, opt_state, tokens, keys):
        loss, grads = grad_fn(model, tokens, keys)
        parameters = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, opt_state, parameters)
        return eqx.apply_updates(model, updates), opt_state, loss

    return train_step


def training_batches(
    corpus: data.Corpus, first: int = 0
) -> Iterator[tuple[Int[np.ndarray, "batch time_plus_1"], Key[Array, " batch"]]]:
    """For each step from `first` on its bytes, and its dropout keys, one for each sequence."""
    dropout_key = random_key("dropout")
    for step in range(first, _STEPS.value):
        keys = jax.random.split(jax.random.fold_in(dropout_key, step), batch_size())
        yield draw_batch(corpus.train, step), keys


def draw_batch(
    text: UInt8[np.ndarray, " bytes"], step: int
) -> Int[np.ndarray, "batch time_plus_1"]:
    return data.batch(
        text,
        batch_size=batch_size(),
        sequence_length=training_model.sequence_length(),
        seed=_SEED.value,
        step=step,
    )


def train(
    step_fn: Step,
    state: State,
    corpus: data.Corpus,
    *,
    evaluate: Callable[[Any], float] | None = None,
    title: str,
    metrics: Sequence[Row] = (),
    around_step: Callable[[int], contextlib.AbstractContextManager] = contextlib.nullcontext,
    after_step: Callable[[Row, State], None] = lambda row, state: None,
) -> tuple[Any, list[Row]]:
    """Trains, and shows how it goes.

    Args:
        step_fn: `(model, opt_state, tokens, keys)` to the new model and state, and the loss.
        state: the model and the optimizer state to start from; consumed.
        corpus: the text.
        evaluate: gives the held-out loss of a model; None to leave it out.
        title: what the progress bar is called.
        metrics: the rows of the steps that led to `state`.
        around_step: gives what surrounds a step, from its number among those of this call, from 1.
        after_step: gets the row and the new state of each step.

    Returns:
        the trained model, and a row for each step: its number, its loss (nats a byte), what it
        took (seconds) and, where it was evaluated, the held-out loss.
    """
    model, opt_state = state
    metrics = list(metrics)
    first = len(metrics)
    batches = training_batches(corpus, first)
    progress = tqdm.tqdm(batches, initial=first, total=_STEPS.value, desc=title)
    for number, (tokens, keys) in enumerate(progress, start=first + 1):
        with around_step(number - first):
            start = time.perf_counter()
            model, opt_state, loss = step_fn(model, opt_state, tokens, keys)
            loss = float(loss)  # waits for the step, so that its time is its own
            seconds = time.perf_counter() - start
        metrics.append({"step": number, "loss": loss, "seconds": seconds})
        if evaluate and (number % _EVAL_EVERY.value == 0 or number == _STEPS.value):
            metrics[-1]["held_out_loss"] = evaluate(model)
        after_step(metrics[-1], (model, opt_state))
        progress.set_postfix(loss=f"{loss:.3f}", tokens_per_second=f"{throughput(metrics):.0f}")
    return model, metrics


def throughput(metrics: list[Row]) -> float:
    """Tokens trained on in a second, in the median step; the first steps are left out."""
    timed = metrics[UNTIMED_STEPS:] or metrics[-1:]
    seconds = statistics.median(row["seconds"] for row in timed)
    return batch_size() * training_model.sequence_length() / seconds


def held_out_loss(
    loss_fn: Callable[..., Float[Array, ""]], model: Any, corpus: data.Corpus
) -> float:
    """The mean of `loss_fn` over some batches of held-out text, the same each time."""
    batches = [draw_batch(corpus.held_out, number) for number in range(EVALUATION_BATCHES)]
    return statistics.mean(float(loss_fn(model, tokens)) for tokens in batches)


# What comes after the training: text, pictures, and the comparison with one device.


def verify(corpus: data.Corpus, model: Any, metrics: list[Row]) -> None:
    """Trains the same steps on one device, and compares all losses and the final parameters.

    Args:
        corpus: the text.
        model: the model that the pipeline trained, on one device.
        metrics: the losses of the pipeline.

    Raises:
        SystemExit: when the trainings differ by more than `TOLERANCES`.
    """
    optimizer = make_optimizer()
    grad_fn = accumulated(eqx.filter_value_and_grad(training_model.loss_fn))
    step_fn = eqx.filter_jit(train_step_of(grad_fn, optimizer))
    expected_model, expected_metrics = train(
        step_fn, initial_state(optimizer), corpus, title="one device"
    )
    compare("loss", losses_of(metrics), losses_of(expected_metrics))
    compare("parameters", parameters_of(model), parameters_of(expected_model))


def accumulated(grad_fn: Callable[..., Any]) -> Callable[..., Any]:
    """`grad_fn` over slices of its batch, one after the other: the mean of what it returns."""

    def accumulated_grad_fn(model, *batch):
        slices = jax.tree.map(
            lambda x: x.reshape(training_pipeline.microbatches(), -1, *x.shape[1:]), batch
        )
        results = jax.lax.map(lambda batch: grad_fn(model, *batch), slices)
        return jax.tree.map(lambda x: sum(x) / training_pipeline.microbatches(), results)

    return accumulated_grad_fn


def losses_of(metrics: list[Row]) -> list[np.ndarray]:
    return [np.asarray(row["loss"]) for row in metrics]


def parameters_of(model: Any) -> list[np.ndarray]:
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(eqx.filter(model, eqx.is_array))]


def compare(name: str, actual: list[np.ndarray], expected: list[np.ndarray]) -> None:
    """Prints the largest difference, and how it compares to its array's largest entry.

    An array may be nothing but roundings, as a bias of attention's keys, which no loss depends on:
    it counts as if it had a thousandth of the largest entry of all.
    """
    absolute = np.array([np.abs(a - e).max() for a, e in zip(actual, expected, strict=True)])
    largest = np.array([np.abs(e).max() for e in expected])
    relative = absolute / np.maximum(largest, 1e-3 * largest.max())
    tolerance = TOLERANCES[training_model.dtype()][name]
    found = f"largest difference {absolute.max():.1e}, relative {relative.max():.1e}"
    if not relative.max() <= tolerance:  # written so that NaN fails
        raise SystemExit(f"verify: {name}: FAILED: {found}, above the tolerance {tolerance:.0e}")
    print(f"verify: {name}: {found}, within the tolerance {tolerance:.0e}")


def check_flags() -> None:
    """Says what is wrong with the flags before anything is compiled."""
    training_model.check()
    training_mesh.check(_STEPS.value)
    training_pipeline.check()
    training_checkpoints.check()
    if None not in (_BATCH_SIZE.value, _BATCH_SIZE_PER_DEVICE.value):
        raise app.UsageError("Give --batch_size or --batch_size_per_device, not both.")
    if batch_size() % training_pipeline.microbatches():
        raise app.UsageError(
            f"--batch_size must be a multiple of --microbatches, got {batch_size()} and "
            f"{training_pipeline.microbatches()}."
        )
    sequences = batch_size() // training_pipeline.microbatches()
    if sequences % training_mesh.replicas():
        raise app.UsageError(
            f"--dp={training_mesh.replicas()} shares the sequences of each microbatch, and does "
            f"not divide their number, {sequences}; use a larger --batch_size, or fewer "
            f"--microbatches."
        )


def run(mesh: training_mesh.Mesh, corpus: data.Corpus) -> tuple[Any, list[Row]]:
    """Trains on a mesh, and goes on from the last checkpoint when a process of it dies."""
    optimizer = make_optimizer()
    like = eqx.filter_eval_shape(initial_state, optimizer)
    step_fn = training_pipeline.placed_train_step(
        lambda grad_fn: train_step_of(grad_fn, optimizer), mesh
    )
    step_fn = step_fn.lower(*like, *next(training_batches(corpus))).compile()
    loss_fn = training_pipeline.placed_evaluation(mesh)
    profile = str(training_checkpoints.output() / "profile")

    def attempt():
        with training_checkpoints.checkpointer() as checkpoints:
            if (last := checkpoints.latest()) is None:
                state, metrics = initial_state(optimizer), []
            else:
                state = checkpoints.restore(like, shardings=step_fn.input_shardings[:2])
                metrics = training_log.read(training_checkpoints.metrics_file(), last)
            with training_checkpoints.recording(checkpoints, metrics, _STEPS.value) as after_step:
                return train(
                    step_fn,
                    state,
                    corpus,
                    evaluate=lambda model: held_out_loss(loss_fn, model, corpus),
                    title=f"{training_mesh.ranks()} ranks",
                    metrics=metrics,
                    around_step=lambda step: training_mesh.profiling(mesh, step, profile),
                    after_step=after_step,
                )

    for restarts_left in reversed(range(training_checkpoints.restarts())):
        try:
            return attempt()
        except jaxpp.RankError as error:
            assert isinstance(mesh, jaxpp.RemoteMpmdMesh)
            print(f"\n{error}\nRestarting the mesh; {restarts_left} more restarts are left.")
            mesh.restart()
    return attempt()


def main(_: list[str]) -> None:
    check_flags()
    logging.set_verbosity(logging.WARNING)
    training_mesh.make_devices()
    output = training_checkpoints.output()
    output.mkdir(parents=True, exist_ok=True)
    corpus = data.load(_DATA.value)
    training_checkpoints.check_output()
    draw_batch(corpus.held_out, 0)  # too little text is an error now, not at the first evaluation
    training_pipeline.plot_schedule(output / "timeline.png")

    with training_mesh.make_mesh() as mesh:
        model, metrics = run(mesh, corpus)
        model = jaxpp.gather(model)
    training_log.plot_losses(metrics, output / "loss.png")
    last = metrics[-1]
    print(f"loss {last['loss']:.3f}, held out {last['held_out_loss']:.3f} nats a byte")
    print(f"{throughput(metrics):.0f} tokens a second; metrics and pictures are in {output}")

    if text_sample.number_of_bytes():
        text = text_sample.sample(model, random_key("text"))
        (output / "sample.txt").write_text(text, encoding="utf-8")
        print(f"sample:\n{text}")
    if _VERIFY.value:
        verify(corpus, model, metrics)


if __name__ == "__main__":
    app.run(main)
