"""Trains a byte-level GPT as a pipeline: does it learn, how fast, and is it the same training?

    python -m experiments.train_lm
    python -m experiments.train_lm --schedule=interleaved_1f1b --tied --dropout=0.1 --verify
    python -m experiments.train_lm --schedule=seq1f1b --knobs=slices=4
    python -m experiments.train_lm --mesh=ray --checkpoint_every=50 --restarts=3
    python -m experiments.train_lm --mesh=ray --checkpoint_every=50 --resume

The ranks of the pipeline are devices of this process: CPU devices, made for the run, or the
accelerators that JAX finds (shared between ranks where there are fewer). With `--mesh=ray` they are
processes of a Ray session: of the one that is there, or of one made for the run. The output folder
gets `metrics.jsonl`, checkpoints, pictures of the losses and of the schedule, and a sample of
generated text.

A run that was killed goes on from its last checkpoint with `--resume` and the same other flags, and
has the losses that it would have had, to the bit: a step's batch and dropout keys follow from its
number. With `--restarts` it does so by itself when a worker of `--mesh=ray` dies.
"""

import contextlib
import itertools
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm
from absl import app, flags, logging
from jaxtyping import Array, Float, Int, Key, UInt8

import jaxpp
from experiments import data, training_log
from experiments.models import gpt, sliced_gpt
from experiments.training_log import Row

_LAYERS = flags.DEFINE_integer("layers", 8, "Transformer blocks.", lower_bound=1)
_WIDTH = flags.DEFINE_integer("width", 64, "Features of each position.", lower_bound=1)
_HEADS = flags.DEFINE_integer("heads", 4, "Attention heads of each block.", lower_bound=1)
_SEQUENCE_LENGTH = flags.DEFINE_integer("sequence_length", 64, "In bytes.", lower_bound=1)
_DROPOUT = flags.DEFINE_float("dropout", 0.0, "Probability of dropping a feature.", 0.0, 1.0)
_TIED = flags.DEFINE_bool("tied", False, "Whether the output layer is the embedding's matrix.")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Type of the parameters.")

_MESH = flags.DEFINE_enum(
    "mesh", "local", ["local", "ray"], "Whether ranks are devices of this process, or processes."
)
_CORES = flags.DEFINE_integer(
    "cores", None, "CPU cores that a process of --mesh=ray is bound to; by default it has all.", 1
)
_GPUS_PER_RANK = flags.DEFINE_float(
    "gpus_per_rank", 0.0, "GPUs of each process of --mesh=ray; below 1 they share them.", 0.0
)
_HOSTS = flags.DEFINE_bool(
    "several_hosts", False, "Whether the processes of --mesh=ray may be on several hosts."
)
_WORKER_ENVIRONMENT = flags.DEFINE_list(
    "worker_environment", [], "Variables for the processes of --mesh=ray, as NAME=value."
)
_RESTARTS = flags.DEFINE_integer(
    "restarts", 0, "How often --mesh=ray goes on from the last checkpoint when a process dies.", 0
)
_RANKS = flags.DEFINE_integer("ranks", 4, "Ranks of the pipeline.", lower_bound=1)
_MICROBATCHES = flags.DEFINE_integer("microbatches", 8, "Slices of the batch.", lower_bound=1)
_SCHEDULE = flags.DEFINE_enum(
    "schedule",
    "1f1b",
    [name for name in jaxpp.schedules.CATALOGUE if name != "forward_only"],
    "Order in which a rank runs its tasks, and so the number of stages on each rank.",
)
_KNOBS = flags.DEFINE_list(
    "knobs", [], "Fields of the schedule, as name=number: stages_per_rank=2, for instance."
)
_CUT = flags.DEFINE_enum(
    "cut",
    "auto",
    ["auto", "path", "annotation"],
    "What makes the stages: their cost, the names of blocks, or marks in the forward pass.",
)
_REMAT = flags.DEFINE_enum(
    "remat",
    "none",
    ["none", "full", "dots"],
    "What the backward pass computes again: nothing, everything, or all but matrix products.",
)

_BATCH_SIZE = flags.DEFINE_integer("batch_size", 32, "Sequences in a step.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 300, "Optimizer steps.", lower_bound=1)
_OPTIMIZER = flags.DEFINE_enum("optimizer", "adamw", ["adamw", "sgd", "lion"], "Update rule.")
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 2e-3, "At the peak of the schedule.")
_WARMUP_STEPS = flags.DEFINE_integer("warmup_steps", 20, "Steps until the peak.", lower_bound=0)
_CLIP_NORM = flags.DEFINE_float("clip_norm", 1.0, "Largest global norm of the gradient.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the parameters, the batches and the dropout.")

_DATA = flags.DEFINE_string(
    "data", None, "A file or folder of text; by default Python's own library."
)
_OUTPUT = flags.DEFINE_string("output", "outputs/train_lm", "Folder for metrics and pictures.")
_CHECKPOINT_EVERY = flags.DEFINE_integer(
    "checkpoint_every", 0, "Steps between checkpoints, of which the last is kept; 0 for none.", 0
)
_RESUME = flags.DEFINE_bool(
    "resume", False, "Whether to go on from the last checkpoint in the output folder."
)
_EVAL_EVERY = flags.DEFINE_integer("eval_every", 50, "Steps between held-out losses.", 1)
_SAMPLE_BYTES = flags.DEFINE_integer("sample_bytes", 256, "Bytes of text generated at the end.", 0)
_TEMPERATURE = flags.DEFINE_float(
    "temperature", 0.8, "Of the generated text; 1 is the model's own."
)
_VERIFY = flags.DEFINE_bool(
    "verify", False, "Whether to train again on one device and to compare losses and parameters."
)

# The first steps compile, and fill caches: the throughput leaves them out.
UNTIMED_STEPS = 3
EVALUATION_BATCHES = 4
REMAT_POLICIES = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
}
# Relative. The training amplifies roundings, and in bfloat16 these are 2^-9 of each parameter.
TOLERANCES = {
    "float32": {"loss": 1e-4, "parameters": 1e-3},
    "bfloat16": {"loss": 2e-2, "parameters": 0.5},
}

State = tuple[gpt.GPT, optax.OptState]
Mesh = jaxpp.MpmdMesh | jaxpp.RemoteMpmdMesh
Step = Callable[..., tuple[gpt.GPT, optax.OptState, Float[Array, ""]]]


# The pipeline: from here to `placed_evaluation` is all that makes the training a pipeline.


def training_schedule() -> jaxpp.schedules.Schedule:
    knobs = dict(knob.split("=", 1) for knob in _KNOBS.value)
    return jaxpp.schedules.by_name(
        _SCHEDULE.value, **{name: int(value) for name, value in knobs.items()}
    )


def number_of_stages() -> int:
    return _RANKS.value * training_schedule().stages_per_rank


def first_blocks() -> list[int]:
    """The block that opens each stage but the first, for cuts that are made by hand."""
    stages = number_of_stages()
    return [round(stage * _LAYERS.value / stages) for stage in range(1, stages)]


def annotated_loss_fn(
    model: gpt.GPT,
    tokens: Int[Array, "batch time_plus_1"],
    keys: Key[Array, " batch"] | None = None,
) -> Float[Array, ""]:
    """`gpt.loss_fn`, with the loop over the blocks written out and marked where stages open."""

    openings = first_blocks()

    def predict(sequence, key):
        embed_key, *block_keys = gpt.split_or_none(key, 1 + len(model.blocks))
        hidden = model.embed_tokens(sequence, key=embed_key)
        for number, (block, block_key) in enumerate(zip(model.blocks, block_keys, strict=True)):
            if number in openings:
                hidden = jaxpp.pipeline_enter_stage(hidden, name=f"blocks.{number}")
            hidden = block(hidden, key=block_key)
        return model.predict(hidden)

    return gpt.cross_entropy(jax.vmap(predict)(tokens[:, :-1], keys), tokens[:, 1:])


def sliced_loss_fn(
    model: gpt.GPT,
    tokens: Int[Array, "batch time_plus_1"],
    keys: Key[Array, " batch"] | None = None,
) -> Float[Array, ""]:
    """`gpt.loss_fn` without dropout, on one slice of the sequences after the other."""
    del keys
    slices = training_schedule().stages_per_rank
    return sliced_gpt.loss_fn(model, tokens, slices=slices, groups=_RANKS.value)


def staged_loss_fn() -> Callable[..., Float[Array, ""]]:
    """The loss function as a sequence of stages, cut in the way that `--cut` names."""
    if isinstance(training_schedule(), jaxpp.schedules.Seq1F1B):
        split = jaxpp.split_stages(sliced_loss_fn)
    elif _CUT.value == "annotation":
        split = jaxpp.split_stages(annotated_loss_fn)
    elif _CUT.value == "path":
        paths = [f"blocks.{number}" for number in first_blocks()]
        split = jaxpp.split_stages(gpt.loss_fn, at=paths)
    else:
        split = jaxpp.split_stages(gpt.loss_fn, num_stages=number_of_stages())
    return jaxpp.wrap_forward(split, policy=REMAT_POLICIES[_REMAT.value])


def make_mesh() -> contextlib.AbstractContextManager[Mesh]:
    return remote_mesh() if _MESH.value == "ray" else contextlib.nullcontext(local_mesh())


def make_devices() -> None:
    """Gives the ranks of the local mesh a CPU device each, where there is no accelerator."""
    if _MESH.value == "local":
        jax.config.update("jax_num_cpu_devices", _RANKS.value)


def local_mesh() -> jaxpp.MpmdMesh:
    """A device for each rank, in turn, so that ranks share devices where these are too few."""
    devices = list(itertools.islice(itertools.cycle(jax.devices()), _RANKS.value))
    return jaxpp.MpmdMesh((_RANKS.value,), ("mpmd",), devices=devices)


def remote_mesh() -> jaxpp.RemoteMpmdMesh:
    """A process for each rank, wherever the Ray session has room for it."""
    return jaxpp.RemoteMpmdMesh(
        (_RANKS.value,),
        ("mpmd",),
        gpus_per_rank=_GPUS_PER_RANK.value,
        cores=_CORES.value,
        address="auto" if _HOSTS.value else None,
        environment=dict(variable.split("=", 1) for variable in _WORKER_ENVIRONMENT.value),
    )


def placed_train_step(optimizer: optax.GradientTransformation, mesh: Mesh) -> Any:
    """The train step, one program on each rank; lowered and compiled as `jax.jit` would be."""
    grad_fn = jaxpp.microbatch(
        eqx.filter_value_and_grad(staged_loss_fn()), _MICROBATCHES.value, in_axes=(None, 0, 0)
    )
    grad_fn = jaxpp.schedule(grad_fn, training_schedule())
    return jaxpp.place(train_step_of(grad_fn, optimizer), mesh, donate_argnums=(0, 1))


def placed_evaluation(mesh: Mesh) -> Callable[..., Float[Array, ""]]:
    """The loss without dropout, forward only, of the parameters where they live."""
    loss_fn = jaxpp.microbatch(staged_loss_fn(), _MICROBATCHES.value, in_axes=(None, 0))
    schedule = jaxpp.schedules.ForwardOnly(like=training_schedule())
    return jaxpp.place(jaxpp.schedule(loss_fn, schedule), mesh)


# The training: nothing from here on knows about the pipeline.


def random_key(use: str) -> Key[Array, ""]:
    """The key of the run for "parameters", "dropout" or "text"."""
    uses = ["parameters", "dropout", "text"]
    return jax.random.split(jax.random.key(_SEED.value), len(uses))[uses.index(use)]


def make_model(key: Key[Array, ""]) -> gpt.GPT:
    return gpt.GPT(
        layers=_LAYERS.value,
        width=_WIDTH.value,
        heads=_HEADS.value,
        context=_SEQUENCE_LENGTH.value,
        dropout=_DROPOUT.value,
        tied=_TIED.value,
        dtype=jnp.dtype(_DTYPE.value),
        key=key,
    )


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
    model = make_model(random_key("parameters"))
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
        keys = jax.random.split(jax.random.fold_in(dropout_key, step), _BATCH_SIZE.value)
        yield draw_batch(corpus.train, step), keys


def draw_batch(
    text: UInt8[np.ndarray, " bytes"], step: int
) -> Int[np.ndarray, "batch time_plus_1"]:
    return data.batch(
        text,
        batch_size=_BATCH_SIZE.value,
        sequence_length=_SEQUENCE_LENGTH.value,
        seed=_SEED.value,
        step=step,
    )


def train(
    step_fn: Step,
    state: State,
    corpus: data.Corpus,
    *,
    evaluate: Callable[[gpt.GPT], float] | None = None,
    title: str,
    metrics: Sequence[Row] = (),
    after_step: Callable[[Row, State], None] = lambda row, state: None,
) -> tuple[gpt.GPT, list[Row]]:
    """Trains, and shows how it goes.

    Args:
        step_fn: `(model, opt_state, tokens, keys)` to the new model and state, and the loss.
        state: the model and the optimizer state to start from; consumed.
        corpus: the text.
        evaluate: gives the held-out loss of a model; None to leave it out.
        title: what the progress bar is called.
        metrics: the rows of the steps that led to `state`.
        after_step: gets the row and the new state of each step.

    Returns:
        the trained model, and a row for each step: its number, its loss (nats a byte), what it
        took (seconds) and, where it was evaluated, the held-out loss.
    """
    model, opt_state = state
    metrics = list(metrics)
    batches = training_batches(corpus, first=len(metrics))
    progress = tqdm.tqdm(batches, initial=len(metrics), total=_STEPS.value, desc=title)
    for number, (tokens, keys) in enumerate(progress, start=len(metrics) + 1):
        start = time.perf_counter()
        model, opt_state, loss = step_fn(model, opt_state, tokens, keys)
        loss = float(loss)  # waits for the step, so that its time is its own
        metrics.append({"step": number, "loss": loss, "seconds": time.perf_counter() - start})
        if evaluate and (number % _EVAL_EVERY.value == 0 or number == _STEPS.value):
            metrics[-1]["held_out_loss"] = evaluate(model)
        after_step(metrics[-1], (model, opt_state))
        progress.set_postfix(loss=f"{loss:.3f}", tokens_per_second=f"{throughput(metrics):.0f}")
    return model, metrics


def throughput(metrics: list[Row]) -> float:
    """Tokens trained on in a second, in the median step; the first steps are left out."""
    timed = metrics[UNTIMED_STEPS:] or metrics[-1:]
    seconds = statistics.median(row["seconds"] for row in timed)
    return _BATCH_SIZE.value * _SEQUENCE_LENGTH.value / seconds


def held_out_loss(
    loss_fn: Callable[..., Float[Array, ""]], model: gpt.GPT, corpus: data.Corpus
) -> float:
    """The mean of `loss_fn` over some batches of held-out text, the same each time."""
    batches = [draw_batch(corpus.held_out, number) for number in range(EVALUATION_BATCHES)]
    return statistics.mean(float(loss_fn(model, tokens)) for tokens in batches)


# Checkpoints: what a run that was killed goes on from.


def checkpointer() -> jaxpp.Checkpointer:
    return jaxpp.Checkpointer(pathlib.Path(_OUTPUT.value) / "checkpoints", keep=1)


def metrics_file() -> pathlib.Path:
    return pathlib.Path(_OUTPUT.value) / "metrics.jsonl"


@contextlib.contextmanager
def recording(
    checkpoints: jaxpp.Checkpointer, metrics: Sequence[Row]
) -> Iterator[Callable[[Row, State], None]]:
    """A hook for `train` that writes the rows of steps to a file, and checkpoints.

    Args:
        checkpoints: where to.
        metrics: the rows that the file starts with; what it had more of is of steps that a run did
            after its last checkpoint, and are done again.
    """
    with training_log.writing(metrics_file(), metrics) as add_row:

        def after_step(row: Row, state: State) -> None:
            add_row(row)  # before the checkpoint: a step that is not done again has its row
            if is_checkpointed(int(row["step"])):
                checkpoints.save(int(row["step"]), state)

        yield after_step


def is_checkpointed(step: int) -> bool:
    every = _CHECKPOINT_EVERY.value
    return every > 0 and (step % every == 0 or step == _STEPS.value)


# What comes after the training: text, pictures, and the comparison with one device.


def on_one_device(model: gpt.GPT) -> gpt.GPT:
    """Gathers the model from the ranks onto the default device."""
    arrays, rest = eqx.partition(model, eqx.is_array)
    return eqx.combine(jax.device_put(jax.device_get(arrays), jax.devices()[0]), rest)


@eqx.filter_jit
def generate(
    model: gpt.GPT,
    prompt: UInt8[Array, " prompt"],
    length: int,
    temperature: float,
    key: Key[Array, ""],
) -> UInt8[Array, " prompt_plus_length"]:
    """Continues `prompt` by `length` bytes drawn from the model, in one compiled loop.

    Each byte is predicted from the `context` bytes before it. What lies after them in the buffer
    does not matter: the model is causal.
    """
    context = model.position.shape[0]
    total = prompt.size + length
    text = jnp.zeros(max(total, context), jnp.uint8).at[: prompt.size].set(prompt)

    def append(end, text):
        start = jnp.maximum(end - context, 0)
        logits = model(jax.lax.dynamic_slice_in_dim(text, start, context))[end - 1 - start]
        drawn = jax.random.categorical(jax.random.fold_in(key, end), logits / temperature)
        return text.at[end].set(drawn.astype(jnp.uint8))

    return jax.lax.fori_loop(prompt.size, total, append, text)[:total]


def sample_text(model: gpt.GPT) -> str:
    prompt = jnp.asarray(np.frombuffer(b"def ", np.uint8))
    key = random_key("text")
    text = generate(model, prompt, _SAMPLE_BYTES.value, _TEMPERATURE.value, key)
    return bytes(np.asarray(text)).decode("utf-8", errors="replace")


def plot_schedule(path: pathlib.Path) -> None:
    """Draws the schedule, where a forward takes one, a backward two, and each half of it one."""
    table = training_schedule().table(number_of_stages(), _MICROBATCHES.value)
    title = f"{_SCHEDULE.value}, {number_of_stages()} stages, unit costs"
    jaxpp.schedules.plot({title: jaxpp.schedules.simulate(table)}, path)


def verify(corpus: data.Corpus, model: gpt.GPT, metrics: list[Row]) -> None:
    """Trains the same steps on one device, and compares all losses and the final parameters.

    Args:
        corpus: the text.
        model: the model that the pipeline trained, on one device.
        metrics: the losses of the pipeline.

    Raises:
        SystemExit: when the trainings differ by more than `TOLERANCES`.
    """
    optimizer = make_optimizer()
    grad_fn = accumulated(eqx.filter_value_and_grad(gpt.loss_fn))
    step_fn = eqx.filter_jit(train_step_of(grad_fn, optimizer))
    expected_model, expected_metrics = train(
        step_fn, initial_state(optimizer), corpus, title="one device"
    )
    compare("loss", losses_of(metrics), losses_of(expected_metrics))
    compare("parameters", parameters_of(model), parameters_of(expected_model))


def accumulated(grad_fn: Callable[..., Any]) -> Callable[..., Any]:
    """`grad_fn` over slices of its batch, one after the other: the mean of what it returns."""

    def accumulated_grad_fn(model, *batch):
        slices = jax.tree.map(lambda x: x.reshape(_MICROBATCHES.value, -1, *x.shape[1:]), batch)
        results = jax.lax.map(lambda batch: grad_fn(model, *batch), slices)
        return jax.tree.map(lambda x: sum(x) / _MICROBATCHES.value, results)

    return accumulated_grad_fn


def losses_of(metrics: list[Row]) -> list[np.ndarray]:
    return [np.asarray(row["loss"]) for row in metrics]


def parameters_of(model: gpt.GPT) -> list[np.ndarray]:
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(eqx.filter(model, eqx.is_array))]


def compare(name: str, actual: list[np.ndarray], expected: list[np.ndarray]) -> None:
    """Prints the largest difference, and how it compares to its array's largest entry."""
    pairs = list(zip(actual, expected, strict=True))
    absolute = np.array([np.abs(a - e).max() for a, e in pairs])
    relative = absolute / np.array([np.abs(e).max() for _, e in pairs])
    tolerance = TOLERANCES[_DTYPE.value][name]
    found = f"largest difference {absolute.max():.1e}, relative {relative.max():.1e}"
    if not relative.max() <= tolerance:  # written so that NaN fails
        raise SystemExit(f"verify: {name}: FAILED: {found}, above the tolerance {tolerance:.0e}")
    print(f"verify: {name}: {found}, within the tolerance {tolerance:.0e}")


def check_flags() -> None:
    """Says what is wrong with the flags before anything is compiled."""
    try:
        table = training_schedule().table(number_of_stages(), _MICROBATCHES.value)
    except ValueError as error:
        raise app.UsageError(f"--schedule={_SCHEDULE.value}: {error}") from error
    if table.stage_inputs and _DROPOUT.value:
        raise app.UsageError(f"--schedule={_SCHEDULE.value} has no dropout; use --dropout=0.")
    if table.stage_inputs and _SEQUENCE_LENGTH.value % training_schedule().stages_per_rank:
        raise app.UsageError(
            f"--schedule={_SCHEDULE.value} cuts sequences of {_SEQUENCE_LENGTH.value} bytes in "
            f"{training_schedule().stages_per_rank} equal slices; use another --sequence_length."
        )
    if _CUT.value != "auto" and number_of_stages() > _LAYERS.value:
        raise app.UsageError(
            f"--cut={_CUT.value} opens stages at blocks, got {number_of_stages()} stages for "
            f"{_LAYERS.value} blocks; use more --layers, fewer stages, or --cut=auto."
        )
    if _BATCH_SIZE.value % _MICROBATCHES.value:
        raise app.UsageError(
            f"--batch_size must be a multiple of --microbatches, got {_BATCH_SIZE.value} and "
            f"{_MICROBATCHES.value}."
        )


def check_checkpoints() -> None:
    """Says so where a new run would mix with what another has left in the output folder."""
    with checkpointer() as checkpoints:
        last = checkpoints.latest()
    if last is not None and not _RESUME.value:
        raise app.UsageError(
            f"--output={_OUTPUT.value} has the checkpoint of step {last} of another run; go on "
            f"from it with --resume, or use another folder."
        )


def run(mesh: Mesh, corpus: data.Corpus) -> tuple[gpt.GPT, list[Row]]:
    """Trains on a mesh, and goes on from the last checkpoint when a process of it dies."""
    optimizer = make_optimizer()
    like = eqx.filter_eval_shape(initial_state, optimizer)
    step_fn = placed_train_step(optimizer, mesh).lower(*like, *next(training_batches(corpus)))
    step_fn, loss_fn = step_fn.compile(), placed_evaluation(mesh)

    def attempt():
        with checkpointer() as checkpoints:
            if (last := checkpoints.latest()) is None:
                state, metrics = initial_state(optimizer), []
            else:
                state = checkpoints.restore(like, shardings=step_fn.input_shardings[:2])
                metrics = training_log.read(metrics_file(), last)
            with recording(checkpoints, metrics) as after_step:
                return train(
                    step_fn,
                    state,
                    corpus,
                    evaluate=lambda model: held_out_loss(loss_fn, model, corpus),
                    title=f"{_RANKS.value} ranks",
                    metrics=metrics,
                    after_step=after_step,
                )

    for restarts_left in reversed(range(_RESTARTS.value)):
        try:
            return attempt()
        except jaxpp.RankError as error:
            assert isinstance(mesh, jaxpp.RemoteMpmdMesh)
            print(f"\n{error}\nRestarting the mesh; {restarts_left} more restarts are left.")
            mesh.restart()
    return attempt()


def check_mesh_flags() -> None:
    if _MESH.value == "local":
        for flag in (_CORES, _GPUS_PER_RANK, _HOSTS, _WORKER_ENVIRONMENT, _RESTARTS):
            if flag.value:
                raise app.UsageError(f"--{flag.name} is for --mesh=ray.")
    for variable in _WORKER_ENVIRONMENT.value:
        if "=" not in variable:
            raise app.UsageError(f"--worker_environment takes NAME=value, got {variable!r}.")
    if _RESTARTS.value and not _CHECKPOINT_EVERY.value:
        raise app.UsageError("--restarts needs --checkpoint_every, or there is nothing to load.")


def main(_: list[str]) -> None:
    check_flags()
    check_mesh_flags()
    logging.set_verbosity(logging.WARNING)
    make_devices()
    output = pathlib.Path(_OUTPUT.value)
    output.mkdir(parents=True, exist_ok=True)
    corpus = data.load(_DATA.value)
    check_checkpoints()
    draw_batch(corpus.held_out, 0)  # too little text is an error now, not at the first evaluation
    plot_schedule(output / "timeline.png")

    with make_mesh() as mesh:
        model, metrics = run(mesh, corpus)
        model = on_one_device(model)
    training_log.plot_losses(metrics, output / "loss.png")
    last = metrics[-1]
    print(f"loss {last['loss']:.3f}, held out {last['held_out_loss']:.3f} nats a byte")
    print(f"{throughput(metrics):.0f} tokens a second; metrics and pictures are in {output}")

    if _SAMPLE_BYTES.value:
        text = sample_text(model)
        (output / "sample.txt").write_text(text, encoding="utf-8")
        print(f"sample:\n{text}")
    if _VERIFY.value:
        verify(corpus, model, metrics)


if __name__ == "__main__":
    app.run(main)
