"""All that makes a training a pipeline, and its flags: stages, microbatches and their order."""

import pathlib
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from absl import app, flags
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Key

import jaxpp
from experiments import training_mesh, training_model
from experiments.models import gpt, parallel, sliced_gpt
from experiments.training_mesh import Mesh

_MICROBATCHES = flags.DEFINE_integer(
    "microbatches", None, "Slices of the batch; by default 8.", lower_bound=1
)
_PIPELINE_MICROBATCHES = flags.DEFINE_integer(
    "num_pipeline_microbatches", None, "The same as --microbatches.", lower_bound=1
)
_SCHEDULE = flags.DEFINE_string(
    "schedule",
    "1f1b",
    "Order in which a rank runs its tasks, and so the number of stages on each rank: a name of "
    "jaxpp.schedules.CATALOGUE, with knobs as in 'interleaved_1f1b(stages_per_rank=4)', or "
    "package.module:Class for one of your own.",
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

REMAT_POLICIES = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
}


def microbatches() -> int:
    return training_mesh.either(_MICROBATCHES, _PIPELINE_MICROBATCHES, default=8)


def training_schedule() -> jaxpp.schedules.Schedule:
    return jaxpp.schedules.by_name(_SCHEDULE.value)


def number_of_stages() -> int:
    return training_mesh.ranks() * training_schedule().stages_per_rank


def check() -> None:
    """Says what is wrong with the flags before anything is compiled."""
    try:
        table = training_schedule().table(number_of_stages(), microbatches())
    except ValueError as error:
        raise app.UsageError(f"--schedule={_SCHEDULE.value}: {error}") from error
    if table.forward_only:
        raise app.UsageError(f"--schedule={_SCHEDULE.value} has no backward, and trains nothing.")
    config, parts = training_model.config(), training_mesh.parts()
    if config.heads % parts:
        raise app.UsageError(
            f"--mp={parts} shares the heads of attention, and does not divide their number, "
            f"{config.heads}; use other --heads, or more --dp in place of --mp."
        )
    layers, length = config.layers, training_model.sequence_length()
    if table.stage_inputs and not training_model.can_be_sliced():
        raise app.UsageError(
            f"--schedule={_SCHEDULE.value} cuts sequences, which is for --model=gpt."
        )
    if table.stage_inputs and training_model.has_dropout():
        raise app.UsageError(f"--schedule={_SCHEDULE.value} has no dropout; use --dropout=0.")
    if table.stage_inputs and length % training_schedule().stages_per_rank:
        raise app.UsageError(
            f"--schedule={_SCHEDULE.value} cuts sequences of {length} bytes in "
            f"{training_schedule().stages_per_rank} equal slices; use another --sequence_length."
        )
    if _CUT.value != "auto" and number_of_stages() > layers:
        raise app.UsageError(
            f"--cut={_CUT.value} opens stages at blocks, got {number_of_stages()} stages for "
            f"{layers} blocks; use more --layers, fewer stages, or --cut=auto."
        )


def first_blocks() -> list[int]:
    """The block that opens each stage but the first, for cuts that are made by hand."""
    stages, layers = number_of_stages(), training_model.config().layers
    return [round(stage * layers / stages) for stage in range(1, stages)]


class Opening(eqx.Module):
    """A block that opens a stage."""

    block: Any
    name: str = eqx.field(static=True)

    def __call__(self, x: Float[Array, "time width"], **keywords: Any) -> Any:
        return self.block(jaxpp.pipeline_enter_stage(x, name=self.name), **keywords)


def annotated_loss_fn(
    model: Any, tokens: Int[Array, "batch time_plus_1"], keys: Key[Array, " batch"] | None = None
) -> Float[Array, ""]:
    """The model's loss, with marks at the blocks where stages open."""
    blocks = list(model.blocks)
    for number in first_blocks():
        blocks[number] = Opening(blocks[number], f"blocks.{number}")
    marked = eqx.tree_at(lambda model: model.blocks, model, tuple(blocks))
    return training_model.loss_fn(marked, tokens, keys)


def sliced_loss_fn(
    model: Any, tokens: Int[Array, "batch time_plus_1"], keys: Key[Array, " batch"] | None = None
) -> Float[Array, ""]:
    """The loss of a `gpt.GPT` without dropout, on one slice of the sequences after the other."""
    del keys
    slices = training_schedule().stages_per_rank
    return sliced_gpt.loss_fn(model, tokens, slices=slices, groups=training_mesh.ranks())


def staged_loss_fn() -> Callable[..., Float[Array, ""]]:
    """The loss function as a sequence of stages, cut in the way that `--cut` names."""
    if isinstance(training_schedule(), jaxpp.schedules.Seq1F1B):
        split = jaxpp.split_stages(sliced_loss_fn)
    elif _CUT.value == "annotation":
        split = jaxpp.split_stages(annotated_loss_fn, num_stages=number_of_stages())
    elif _CUT.value == "path":
        paths = [f"blocks.{number}" for number in first_blocks()]
        split = jaxpp.split_stages(training_model.loss_fn, at=paths)
    else:
        split = jaxpp.split_stages(training_model.loss_fn, num_stages=number_of_stages())
    return jaxpp.wrap_forward(split, policy=REMAT_POLICIES[_REMAT.value])


def in_specs(*, states: int, batches: int) -> Any:
    """How a step's arguments are split inside a rank; None where a rank is one device.

    Args:
        states: how many of them are a model or an optimizer's state, the first ones.
        batches: how many are a batch, along their first dimension.
    """
    if not training_mesh.is_split():
        return None
    vocabulary = getattr(training_model.config(), "vocabulary", gpt.NUM_BYTES)
    rules = parallel.rules("model", vocabulary=vocabulary % training_mesh.parts() == 0)
    return (rules,) * states + (PartitionSpec("data"),) * batches


def placed_train_step(train_step_of: Callable[..., Any], mesh: Mesh) -> Any:
    """The train step, one program on each rank; lowered and compiled as `jax.jit` would be.

    Args:
        train_step_of: makes the train step `(model, opt_state, tokens, keys)` from the function
            that gives loss and gradients, `(model, tokens, keys)`.
        mesh: where the ranks are.
    """
    grad_fn = jaxpp.microbatch(
        eqx.filter_value_and_grad(staged_loss_fn()), microbatches(), in_axes=(None, 0, 0)
    )
    grad_fn = jaxpp.schedule(grad_fn, training_schedule())
    return jaxpp.place(
        train_step_of(grad_fn),
        mesh,
        donate_argnums=(0, 1),
        in_specs=in_specs(states=2, batches=2),
        zero1=training_mesh.zero1(),
    )


def placed_evaluation(mesh: Mesh) -> Callable[..., Float[Array, ""]]:
    """The loss without dropout, forward only, of the parameters where they live."""
    loss_fn = jaxpp.microbatch(staged_loss_fn(), microbatches(), in_axes=(None, 0))
    schedule = jaxpp.schedules.ForwardOnly(like=training_schedule())
    return jaxpp.place(
        jaxpp.schedule(loss_fn, schedule), mesh, in_specs=in_specs(states=1, batches=1)
    )


def plot_schedule(path: pathlib.Path) -> None:
    """Draws the schedule, where a forward takes one, a backward two, and each half of it one."""
    table = training_schedule().table(number_of_stages(), microbatches())
    title = f"{_SCHEDULE.value}, {number_of_stages()} stages, unit costs"
    jaxpp.schedules.plot({title: jaxpp.schedules.simulate(table)}, path)
