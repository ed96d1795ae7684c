"""All that a training of `train_lm` depends on, as one value that is checked when it is made."""

import dataclasses
import functools
import math
import pathlib
import pkgutil
import types
import typing
from collections.abc import Callable
from typing import Any

import jaxpp
from experiments.training import models
from jaxpp.planning import DEVICES

#: The step that `profile` traces; the steps before it compile and fill caches.
PROFILED_STEP = 6


def option(default: Any, text: str, **limits: Any) -> Any:
    """Makes a field: its default, what it means, and `lower`, `upper` or `choices` as limits."""
    return dataclasses.field(default=default, metadata={"text": text, **limits})


@dataclasses.dataclass(frozen=True)
class Config:
    """A training. Each field is a flag of `train_lm`, too.

        config = Config(model="llama2", layers=2, width=64, ranks=2, schedule="zb_h1")

    Raises:
        ValueError: when fields are out of their limits, or do not go together.
    """

    # ---- the model
    model: str = option(
        "gpt",
        "The model: a byte-level GPT, a small one of the zoo, or the sizes that were published.",
        choices=tuple(models.CONFIGS),
    )
    layers: int | None = option(None, "Transformer blocks; 8 in gpt.", lower=1)
    width: int | None = option(None, "Features of each position; 64 in gpt.", lower=1)
    heads: int | None = option(None, "Attention heads of a block; 4 in gpt.", lower=1)
    kv_heads: int | None = option(None, "Key and value heads of each block.", lower=1)
    head_width: int | None = option(None, "Features of an attention head.", lower=2)
    mlp_width: int | None = option(None, "Features in a feed-forward layer.", lower=1)
    window: int | None = option(None, "Positions that a position attends to.", lower=1)
    experts: int | None = option(None, "Feed-forward layers of a block.", lower=1)
    experts_per_token: int | None = option(None, "How many of them transform a token.", lower=1)
    vocabulary: int | None = option(
        None, "Different tokens; of these the data has bytes.", lower=256
    )
    dropout: float | None = option(None, "Probability of dropping a feature.", lower=0, upper=1)
    tied: bool | None = option(None, "Whether the output layer is the embedding's matrix.")
    dtype: str = option("float32", "Type of the parameters.", choices=("float32", "bfloat16"))

    # ---- the training
    steps: int = option(300, "Optimizer steps.", lower=1)
    batch_size: int = option(32, "Sequences in a step.", lower=1)
    sequence_length: int = option(64, "In bytes.", lower=1)
    optimizer: str = option("adamw", "Update rule.", choices=("adamw", "sgd", "lion"))
    learning_rate: float = option(2e-3, "At the peak of the schedule.", lower=0)
    warmup_steps: int = option(20, "Steps until the peak.", lower=0)
    clip_norm: float = option(1.0, "Largest global norm of the gradient.", lower=0)
    seed: int = option(0, "Seed of the parameters, the batches and the dropout.")
    data: str | None = option(None, "A file or folder of text; without it Python's own library.")

    # ---- the pipeline
    ranks: int = option(4, "Ranks of the pipeline.", lower=1)
    microbatches: int = option(8, "Slices of a replica's part of the batch.", lower=1)
    schedule: str = option(
        "1f1b",
        "Order in which a rank runs its tasks, and so the number of stages on each rank: a name of "
        "jaxpp.schedules.CATALOGUE, with knobs as in 'interleaved_1f1b(stages_per_rank=4)', or "
        "package.module:Class for one of your own.",
    )
    cut: str = option(
        "auto",
        "What makes the stages: their cost, the names of blocks, or marks in the forward pass.",
        choices=("auto", "path", "annotation"),
    )
    remat: str = option(
        "none",
        "What the backward pass computes again: nothing, everything, or all but matrix products.",
        choices=("none", "full", "dots"),
    )
    dp: int = option(1, "Replicas, whose gradients are added up once a step.", lower=1)
    mp: int = option(1, "Devices of a rank that share its layers.", lower=1)
    zero1: bool = option(
        False, "Whether the dp devices share the optimizer state instead of each having it."
    )

    # ---- the mesh
    mesh: str = option(
        "local",
        "Whether ranks are devices of this process, processes of Ray, or of the processes that "
        "srun, mpirun or torchrun has started, each with this script.",
        choices=("local", "ray", "launched"),
    )
    cores: int | None = option(
        None, "CPU cores that a process of mesh=ray is bound to; without it, it has all.", lower=1
    )
    gpus_per_rank: float = option(
        0.0, "GPUs for each of the dp * mp devices of a rank of mesh=ray.", lower=0
    )
    processes_per_rank: int = option(
        1, "Processes of each rank of mesh=ray, which share its devices.", lower=1
    )
    several_hosts: bool = option(
        False, "Whether the processes of mesh=ray may be on several hosts."
    )
    worker_environment: tuple[str, ...] = option(
        (), "Variables for the processes of mesh=ray, as NAME=value."
    )

    # ---- what comes out
    output: str = option("outputs/train_lm", "Folder for metrics and pictures.")
    eval_every: int = option(50, "Steps between held-out losses.", lower=1)
    checkpoint_every: int = option(
        0, "Steps between checkpoints, of which the last is kept; 0 for none.", lower=0
    )
    resume: bool = option(False, "Whether to go on from the last checkpoint in the output folder.")
    restarts: int = option(
        0, "How often mesh=ray goes on from the last checkpoint when a process dies.", lower=0
    )
    log: str | None = option(
        None,
        "A function log(step_number, metrics) that each step calls, as package.module:function.",
    )
    device: str | None = option(
        None,
        "The device whose peak in bfloat16 the logged mfu is a share of; without it that of this "
        "process, if it is known.",
        choices=tuple(DEVICES),
    )
    profile: bool = option(False, "Whether to trace the 6th step of this run.")
    sample_bytes: int = option(256, "Bytes of text generated at the end.", lower=0)
    temperature: float = option(0.8, "Of the generated text; 1 is the model's own.")
    verify: bool = option(
        False, "Whether to train again on one device and to compare losses and parameters."
    )

    # ---- what follows from the fields

    @functools.cached_property
    def sizes(self) -> models.Sizes:
        """The configuration that `model` names, with the fields that are given here."""
        chosen = models.CONFIGS[self.model]
        given = {
            name: value for name in models.FIELDS if (value := getattr(self, name)) is not None
        }
        known = [field.name for field in dataclasses.fields(chosen)]
        for name in given:
            if name not in known:
                taken = ", ".join(name for name in models.FIELDS if name in known)
                raise ValueError(f"{name} is not for model={self.model}, which has {taken}.")
        try:
            return dataclasses.replace(chosen, **given)
        except ValueError as error:
            raise ValueError(f"model={self.model}: {error}") from error

    @functools.cached_property
    def order(self) -> jaxpp.schedules.Schedule:
        """The schedule that `schedule` names."""
        return jaxpp.schedules.by_name(self.schedule)

    @functools.cached_property
    def logger(self) -> Callable[[int, dict[str, float]], Any]:
        """The function that `log` names; one that does nothing without it."""
        if self.log is None:
            return lambda number, values: None
        try:
            found = pkgutil.resolve_name(self.log)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"log is package.module:function, which is imported; got {self.log!r}: {error}."
            ) from error
        if not callable(found):
            raise ValueError(f"log={self.log} is no function: {found!r}.")
        return found

    @property
    def stages(self) -> int:
        return self.ranks * self.order.stages_per_rank

    @property
    def devices(self) -> int:
        """All devices of the mesh."""
        return self.ranks * self.dp * self.mp

    @property
    def is_split(self) -> bool:
        """Whether a rank is several devices."""
        return self.dp * self.mp > 1

    @property
    def folder(self) -> pathlib.Path:
        return pathlib.Path(self.output)

    # ---- checks, before anything is compiled

    def __post_init__(self):
        for field in dataclasses.fields(self):
            _check_limits(field, getattr(self, field.name))
        self._check_model()
        self._check_pipeline()
        self._check_batch()
        self._check_mesh()
        _ = self.logger  # so that a wrong name is an error here

    def _check_model(self) -> None:
        sizes = self.sizes
        context = getattr(sizes, "context", None)
        if context is not None and self.sequence_length > context:
            raise ValueError(
                f"model={self.model} has positions for {context} tokens, got "
                f"sequence_length={self.sequence_length}."
            )
        if sizes.heads % self.mp:
            raise ValueError(
                f"mp={self.mp} shares the heads of attention, and does not divide their number, "
                f"{sizes.heads}; use other heads, or more dp in place of mp."
            )

    def _check_pipeline(self) -> None:
        try:
            table = self.order.table(self.stages, self.microbatches)
        except ValueError as error:
            raise ValueError(f"schedule={self.schedule}: {error}") from error
        if table.forward_only:
            raise ValueError(f"schedule={self.schedule} has no backward, and trains nothing.")
        if table.stage_inputs:
            self._check_slices()
        if self.cut != "auto" and self.stages > self.sizes.layers:
            raise ValueError(
                f"cut={self.cut} opens stages at blocks, got {self.stages} stages for "
                f"{self.sizes.layers} blocks; use more layers, fewer stages, or cut=auto."
            )

    def _check_slices(self) -> None:
        if not isinstance(self.sizes, models.ByteGPT):
            raise ValueError(f"schedule={self.schedule} cuts sequences, which is for model=gpt.")
        if self.sizes.dropout:
            raise ValueError(f"schedule={self.schedule} has no dropout; use dropout=0.")
        if self.sequence_length % self.order.stages_per_rank:
            raise ValueError(
                f"schedule={self.schedule} cuts sequences of {self.sequence_length} bytes in "
                f"{self.order.stages_per_rank} equal slices; use another sequence_length."
            )

    def _check_batch(self) -> None:
        if self.batch_size % self.microbatches:
            raise ValueError(
                f"batch_size must be a multiple of microbatches, got {self.batch_size} and "
                f"{self.microbatches}."
            )
        if self.batch_size % (self.microbatches * self.dp):
            raise ValueError(
                f"dp={self.dp} replicas of {self.microbatches} microbatches do not divide "
                f"batch_size={self.batch_size}; use a larger batch_size, or fewer microbatches."
            )
        if self.profile and self.steps < PROFILED_STEP:
            raise ValueError(
                f"profile traces step {PROFILED_STEP}, got {self.steps} steps; use more steps."
            )

    def _check_mesh(self) -> None:
        if self.dp * self.mp % self.processes_per_rank:
            raise ValueError(
                f"processes_per_rank={self.processes_per_rank} divides the {self.dp * self.mp} "
                f"devices of a rank, dp * mp, and has to divide their number."
            )
        if self.zero1 and self.dp == 1:
            raise ValueError("zero1 shares optimizer state between the dp devices; use dp=2.")
        if self.mesh != "ray":
            remote = ("cores", "gpus_per_rank", "processes_per_rank", "several_hosts")
            for name in (*remote, "worker_environment", "restarts"):
                if getattr(self, name) != getattr(type(self), name):
                    raise ValueError(f"{name} is for mesh=ray.")
        for variable in self.worker_environment:
            if "=" not in variable:
                raise ValueError(f"worker_environment takes NAME=value, got {variable!r}.")
        if self.restarts and not self.checkpoint_every:
            raise ValueError("restarts needs checkpoint_every, or there is nothing to load.")


def type_of(field: dataclasses.Field[Any]) -> type[Any]:
    """The type of a field's values, beside None."""
    union = isinstance(field.type, types.UnionType)
    of_values = typing.get_args(field.type)[0] if union else field.type
    return typing.cast(type[Any], typing.get_origin(of_values) or of_values)


def _check_limits(field: dataclasses.Field[Any], value: Any) -> None:
    if value is None and field.default is None:
        return
    wanted, limits = type_of(field), field.metadata
    accepted = (int, float) if wanted is float else wanted
    if not isinstance(value, accepted) or isinstance(value, bool) != (wanted is bool):
        raise ValueError(f"{field.name} takes {wanted.__name__}, got {value!r}.")
    if "choices" in limits and value not in limits["choices"]:
        raise ValueError(f"{field.name} is one of {', '.join(limits['choices'])}, got {value!r}.")
    lower, upper = limits.get("lower", -math.inf), limits.get("upper", math.inf)
    if wanted in (int, float) and not lower <= value <= upper:  # written so that NaN fails
        bound = f"at least {lower}" if upper == math.inf else f"between {lower} and {upper}"
        raise ValueError(f"{field.name} is {bound}, got {value!r}.")
