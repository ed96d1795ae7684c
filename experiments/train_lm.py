"""Trains a language model as a pipeline: does it learn, how fast, and is it the same training?

    python -m experiments.train_lm
    python -m experiments.train_lm --schedule=interleaved_1f1b --tied --dropout=0.1 --verify
    python -m experiments.train_lm --schedule='seq1f1b(slices=4)'
    python -m experiments.train_lm --model=mixtral --pp=2 --num_pipeline_microbatches=4 --profile
    python -m experiments.train_lm --model=llama2 --width=64 --pp=2 --dp=2 --mp=2 --zero1 --verify
    python -m experiments.train_lm --mesh=ray --checkpoint_every=50 --restarts=3
    python -m experiments.train_lm --mesh=ray --checkpoint_every=50 --resume
    torchrun --nproc-per-node=2 -m experiments.train_lm --mesh=launched
    python -m experiments.train_lm --log=my_logger:log --device=h100

By default the model is a byte-level GPT; `--model` takes others (see `training/models.py`), which
read the same bytes. The ranks of the pipeline are devices of this process: CPU devices, made for
the run, or the accelerators that JAX finds (shared between ranks where there are fewer). Inside a
rank there are `--dp` replicas, each with sequences of its own, and `--mp` devices of each share the
heads and features of its layers.
With `--mesh=ray` they are processes of a Ray session: of the one that is there, or of one made for
the run. With `--mesh=launched` they are shared out to the processes that torchrun (which comes with
PyTorch), mpirun or srun has started with this script, of which the first one writes and prints. The
output folder gets `metrics.jsonl`, checkpoints, pictures of the losses and of the schedule, a trace
(`--profile`), and a sample of generated text. `--log` names a function that gets the metrics of
each step: docs/logging.md has some for TensorBoard, wandb and clu.

A run that was killed goes on from its last checkpoint with `--resume` and the same other flags, and
has the losses that it would have had, to the bit: a step's batch and dropout keys follow from its
number. With `--restarts` it does so by itself when a worker of `--mesh=ray` dies.

All functions here take a `Config`, which only `main` makes of flags: they work in a notebook, too.
"""

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
import tqdm
from absl import app, logging
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Key, UInt8

import jaxpp
from experiments.models import gpt, parallel, sliced_gpt
from experiments.training import checkpoints, compare, data, flags, models, rows, sample
from experiments.training.config import Config
from experiments.training.mesh import (
    Mesh,
    device_name,
    is_first,
    make_devices,
    make_mesh,
    profiling,
)
from experiments.training.rows import Row

# The first steps compile, fill caches, and may be traced: the throughput leaves them out.
UNTIMED_STEPS = 7
EVALUATION_BATCHES = 4
REMAT_POLICIES = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
}

State = tuple[Any, optax.OptState]
Step = Callable[..., tuple[Any, optax.OptState, Float[Array, ""]]]
Loss = Callable[..., Float[Array, ""]]
#: Gets the number of a step, from 1, and its metrics.
Log = Callable[[int, dict[str, float]], None]

# ---- the train step, as for one device ----------------------------------------------------------


def random_key(config: Config, use: str) -> Key[Array, ""]:
    """The key of the run for "parameters", "dropout" or "text"."""
    uses = ["parameters", "dropout", "text"]
    return jax.random.split(jax.random.key(config.seed), len(uses))[uses.index(use)]


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """The update rule, after clipping, with a linear warm-up and a cosine decay to zero."""
    rate = optax.warmup_cosine_decay_schedule(
        init_value=0.0 if config.warmup_steps else config.learning_rate,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=max(config.steps, config.warmup_steps + 1),
    )
    rules = {"adamw": optax.adamw, "sgd": optax.sgd, "lion": optax.lion}
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), rules[config.optimizer](rate))


def initial_state(config: Config) -> State:
    key = random_key(config, "parameters")
    model = models.make(config.sizes, config.sequence_length, config.dtype, key)
    return model, make_optimizer(config).init(eqx.filter(model, eqx.is_inexact_array))


def make_train_step(config: Config, grad_fn: Callable[..., Any]) -> Step:
    """The train step that takes its gradients from `grad_fn`."""
    optimizer = make_optimizer(config)

    def train_step(model, opt_state, tokens, keys):
        loss, grads = grad_fn(model, tokens, keys)
        parameters = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, opt_state, parameters)
        return eqx.apply_updates(model, updates), opt_state, loss

    return train_step


# ---- the same as a pipeline ---------------------------------------------------------------------


def make_pipeline(config: Config, mesh: Mesh) -> tuple[Any, Callable[[Any, Any], Array]]:
    """The five transforms: the train step, and the loss without dropout, on a mesh."""
    staged = jaxpp.wrap_forward(split(config), policy=REMAT_POLICIES[config.remat])

    grad_fn = eqx.filter_value_and_grad(staged)
    grad_fn = jaxpp.microbatch(
        grad_fn, config.microbatches, in_axes=(None, 0, 0), replicas=config.dp
    )
    grad_fn = jaxpp.schedule(grad_fn, config.order)
    train_step = jaxpp.place(
        make_train_step(config, grad_fn),
        mesh,
        donate_argnums=(0, 1),
        in_specs=in_specs(config, states=2, batches=2),
        zero1="data" if config.zero1 else (),
    )

    loss_fn = jaxpp.microbatch(staged, config.microbatches, in_axes=(None, 0), replicas=config.dp)
    loss_fn = jaxpp.schedule(loss_fn, jaxpp.schedules.ForwardOnly(like=config.order))
    evaluation = jaxpp.place(loss_fn, mesh, in_specs=in_specs(config, states=1, batches=1))
    return train_step, evaluation


def split(config: Config) -> Loss:
    """The loss function as a sequence of stages, cut in the way that the configuration names."""
    blocks = [round(s * config.sizes.layers / config.stages) for s in range(1, config.stages)]
    if isinstance(config.order, jaxpp.schedules.Seq1F1B):
        return jaxpp.split_stages(sliced_loss(config))
    if config.cut == "path":
        return jaxpp.split_stages(models.loss_fn, at=[f"blocks.{number}" for number in blocks])
    loss_fn = annotated_loss(blocks) if config.cut == "annotation" else models.loss_fn
    return jaxpp.split_stages(loss_fn, num_stages=config.stages)


class Opening(eqx.Module):
    """A block that opens a stage."""

    block: Any
    name: str = eqx.field(static=True)

    def __call__(self, x: Float[Array, "time width"], **keywords: Any) -> Any:
        return self.block(jaxpp.pipeline_enter_stage(x, name=self.name), **keywords)


def annotated_loss(openings: Sequence[int]) -> Loss:
    """The loss of a model, with marks at the blocks where stages open."""

    def loss_fn(model, tokens, keys=None):
        blocks = list(model.blocks)
        for number in openings:
            blocks[number] = Opening(blocks[number], f"blocks.{number}")
        marked = eqx.tree_at(lambda model: model.blocks, model, tuple(blocks))
        return models.loss_fn(marked, tokens, keys)

    return loss_fn


def sliced_loss(config: Config) -> Loss:
    """The loss of a `gpt.GPT` without dropout, on one slice of the sequences after the other."""
    slices, groups = config.order.stages_per_rank, config.ranks

    def loss_fn(model, tokens, keys=None):
        del keys
        return sliced_gpt.loss_fn(model, tokens, slices=slices, groups=groups)

    return loss_fn


def in_specs(config: Config, *, states: int, batches: int) -> Any:
    """How a step's arguments are split inside a rank; None where a rank is one device.

    Args:
        config: the training.
        states: how many of them are a model or an optimizer's state, the first ones.
        batches: how many are a batch, along their first dimension.
    """
    if not config.is_split:
        return None
    vocabulary = getattr(config.sizes, "vocabulary", gpt.NUM_BYTES)
    rules = parallel.rules("model", vocabulary=vocabulary % config.mp == 0)
    return (rules,) * states + (PartitionSpec("data"),) * batches


# ---- the training -------------------------------------------------------------------------------


def training_batches(
    config: Config, corpus: data.Corpus, first: int = 0
) -> Iterator[tuple[Int[np.ndarray, "batch time_plus_1"], Key[Array, " batch"]]]:
    """For each step from `first` on its bytes, and its dropout keys, one for each sequence."""
    dropout_key = random_key(config, "dropout")
    for step in range(first, config.steps):
        keys = jax.random.split(jax.random.fold_in(dropout_key, step), config.batch_size)
        yield draw_batch(config, corpus.train, step), keys


def draw_batch(
    config: Config, text: UInt8[np.ndarray, " bytes"], step: int
) -> Int[np.ndarray, "batch time_plus_1"]:
    return data.batch(
        text,
        batch_size=config.batch_size,
        sequence_length=config.sequence_length,
        seed=config.seed,
        step=step,
    )


def train(
    config: Config,
    step_fn: Step,
    state: State,
    corpus: data.Corpus,
    *,
    evaluate: Callable[[Any], float] | None = None,
    title: str,
    metrics: Sequence[Row] = (),
    around_step: Callable[[int], contextlib.AbstractContextManager] = contextlib.nullcontext,
    after_step: Callable[[Row, State], None] = lambda row, state: None,
    log: Log = lambda number, values: None,
    mfu: Callable[[float], float] | None = None,
    quiet: bool = False,
) -> tuple[Any, list[Row]]:
    """Trains, and shows how it goes.

    Args:
        config: the training.
        step_fn: `(model, opt_state, tokens, keys)` to the new model and state, and the loss.
        state: the model and the optimizer state to start from; consumed.
        corpus: the text.
        evaluate: gives the held-out loss of a model; None to leave it out.
        title: what the progress bar is called.
        metrics: the rows of the steps that led to `state`.
        around_step: gives what surrounds a step, from its number among those of this call, from 1.
        after_step: gets the row and the new state of each step.
        log: gets the number of each step and its metrics: the "loss", what it took ("seconds"),
            "tokens_per_second", with `mfu` its "mfu", and where it was evaluated the
            "held_out_loss".
        mfu: gives the model FLOPs utilization of a step that took so many seconds.
        quiet: whether it shows nothing.

    Returns:
        the trained model, and a row for each step: its number, its loss (nats a byte), what it
        took (seconds) and, where it was evaluated, the held-out loss.
    """
    model, opt_state = state
    metrics = list(metrics)
    first = len(metrics)
    batches = training_batches(config, corpus, first)
    progress = tqdm.tqdm(
        batches, initial=first, total=config.steps, desc=title, disable=quiet or None
    )
    for number, (tokens, keys) in enumerate(progress, start=first + 1):
        with around_step(number - first):
            start = time.perf_counter()
            model, opt_state, loss = step_fn(model, opt_state, tokens, keys)
            loss = float(loss)  # waits for the step, so that its time is its own
            seconds = time.perf_counter() - start
        metrics.append({"step": number, "loss": loss, "seconds": seconds})
        if evaluate and (number % config.eval_every == 0 or number == config.steps):
            metrics[-1]["held_out_loss"] = evaluate(model)
        after_step(metrics[-1], (model, opt_state))
        log(number, logged(config, metrics[-1], mfu))
        speed = throughput(config, metrics)
        if (
            progress.disable
            and not quiet
            and (number % config.eval_every == 0 or number == config.steps)
        ):
            print(f"{title}: step {number}, loss {loss:.3f}, {speed:.0f} tokens a second")
        progress.set_postfix(loss=f"{loss:.3f}", tokens_per_second=f"{speed:.0f}")
    return model, metrics


def logged(config: Config, row: Row, mfu: Callable[[float], float] | None) -> dict[str, float]:
    """The metrics of a step, as a logger gets them."""
    seconds = row["seconds"]
    values = {name: value for name, value in row.items() if name != "step"}
    values["tokens_per_second"] = config.batch_size * config.sequence_length / seconds
    return values | ({"mfu": mfu(seconds)} if mfu else {})


def throughput(config: Config, metrics: list[Row]) -> float:
    """Tokens trained on in a second, in the median step; the first steps are left out."""
    timed = metrics[UNTIMED_STEPS:] or metrics[-1:]
    seconds = statistics.median(row["seconds"] for row in timed)
    return config.batch_size * config.sequence_length / seconds


def held_out_loss(config: Config, loss_fn: Loss, model: Any, corpus: data.Corpus) -> float:
    """The mean of `loss_fn` over some batches of held-out text, the same each time."""
    batches = [draw_batch(config, corpus.held_out, n) for n in range(EVALUATION_BATCHES)]
    return statistics.mean(float(loss_fn(model, tokens)) for tokens in batches)


def run(
    config: Config, mesh: Mesh, corpus: data.Corpus, log: Log | None = None
) -> tuple[Any, list[Row]]:
    """Trains on a mesh, and goes on from the last checkpoint when a process of it dies.

    Args:
        config: the training.
        mesh: where it runs.
        corpus: the text.
        log: gets the number and the metrics of each step, as `train` says; by default that of the
            configuration. Steps that are done again, after a checkpoint, are logged again.

    Returns:
        the trained model, on one device, and the rows of `train`.
    """
    like = eqx.filter_eval_shape(initial_state, config)
    step_fn, loss_fn = make_pipeline(config, mesh)
    step_fn = step_fn.lower(*like, *next(training_batches(config, corpus))).compile()
    first = is_first(mesh)
    log = (log or config.logger) if first else (lambda number, values: None)
    mfu = None
    if device := device_name(config):
        mfu = functools.partial(step_fn.mfu, device=device)

    def attempt():
        with checkpoints.manager(config) as saved:
            if (last := saved.latest_step()) is None:
                state, metrics = initial_state(config), []
            else:
                places = step_fn.input_shardings[:2]
                state = saved.restore(last, args=jaxpp.restore_args(like, places))
                metrics = rows.read(checkpoints.metrics_file(config), last)
            with checkpoints.recording(config, saved, metrics, first) as after_step:
                return train(
                    config,
                    step_fn,
                    state,
                    corpus,
                    evaluate=lambda model: held_out_loss(config, loss_fn, model, corpus),
                    title=f"{config.ranks} ranks",
                    metrics=metrics,
                    around_step=lambda step: profiling(config, mesh, step),
                    after_step=after_step,
                    log=log,
                    mfu=mfu,
                    quiet=not first,
                )

    for restarts_left in reversed(range(config.restarts + 1)):
        try:
            model, metrics = attempt()
            return jaxpp.gather(model), metrics
        except jaxpp.RankError as error:
            if not restarts_left:
                raise
            assert isinstance(mesh, jaxpp.RemoteMpmdMesh)
            print(f"\n{error}\nRestarting the mesh; {restarts_left - 1} more restarts are left.")
            mesh.restart()
    raise AssertionError("the last attempt returns or raises")


# ---- what comes after the training --------------------------------------------------------------


def verify(config: Config, corpus: data.Corpus, model: Any, metrics: list[Row]) -> None:
    """Trains the same steps on one device, and compares all losses and the final parameters.

    Args:
        config: the training.
        corpus: the text.
        model: the model that the pipeline trained, on one device.
        metrics: the losses of the pipeline.

    Raises:
        SystemExit: when the trainings differ by more than `compare.TOLERANCES`.
    """
    slices = config.microbatches * config.dp
    grad_fn = accumulated(eqx.filter_value_and_grad(models.loss_fn), slices)
    step_fn = eqx.filter_jit(make_train_step(config, grad_fn))
    expected_model, expected_metrics = train(
        config, step_fn, initial_state(config), corpus, title="one device"
    )
    tolerances = compare.TOLERANCES[config.dtype]
    compare.losses(metrics, expected_metrics, tolerances["loss"])
    compare.parameters(model, expected_model, tolerances["parameters"])


def accumulated(grad_fn: Callable[..., Any], number: int) -> Callable[..., Any]:
    """`grad_fn` over slices of its batch, one after the other: the mean of what it returns."""

    def accumulated_grad_fn(model, *batch):
        slices = jax.tree.map(lambda x: x.reshape(number, -1, *x.shape[1:]), batch)
        results = jax.lax.map(lambda batch: grad_fn(model, *batch), slices)
        return jax.tree.map(lambda x: sum(x) / number, results)

    return accumulated_grad_fn


def plot_schedule(config: Config) -> None:
    """Draws the schedule, where a forward takes one, a backward two, and each half of it one."""
    table = config.order.table(config.stages, config.microbatches)
    title = f"{config.schedule}, {config.stages} stages, unit costs"
    timelines = {title: jaxpp.schedules.simulate(table)}
    jaxpp.schedules.plot(timelines, config.folder / "timeline.png")


def report(config: Config, corpus: data.Corpus, model: Any, metrics: list[Row]) -> None:
    """Leaves pictures and text in the output folder, and tells how the training went."""
    rows.plot_losses(metrics, config.folder / "loss.png")
    last = metrics[-1]
    print(f"loss {last['loss']:.3f}, held out {last['held_out_loss']:.3f} nats a byte")
    speed = throughput(config, metrics)
    print(f"{speed:.0f} tokens a second; metrics and pictures are in {config.output}")
    if config.sample_bytes:
        text = sample.sample(config, model, random_key(config, "text"))
        (config.folder / "sample.txt").write_text(text, encoding="utf-8")
        print(f"sample:\n{text}")
    if config.verify:
        verify(config, corpus, model, metrics)


def main(read_flags: Callable[[], Config], _: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    try:
        config = read_flags()
        corpus = data.load(config.data)
        draw_batch(config, corpus.held_out, 0)  # too little text is an error before the training
        checkpoints.open_output(config)
    except (FileNotFoundError, ValueError) as error:
        raise SystemExit(f"train_lm: {error}") from error
    make_devices(config)
    with make_mesh(config) as mesh:
        first = is_first(mesh)
        if first:
            plot_schedule(config)
        model, metrics = run(config, mesh, corpus)
    if first:
        report(config, corpus, model, metrics)


if __name__ == "__main__":
    app.run(functools.partial(main, flags.define()))
