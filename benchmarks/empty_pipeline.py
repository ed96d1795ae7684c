"""A pipeline of stages that do next to nothing, so that what a step takes is what its steps cost.

The sizes and numbers that `remote_step.py` and `torch_pipeline.py` share: two programs in two
frameworks that compute the same losses. NumPy only, for a Python that has no JAX or no torch.
"""

import dataclasses

import numpy as np

#: The names of `jaxpp.schedules.CATALOGUE`, with the class of `torch.distributed.pipelining`.
TORCH_SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
}
LEARNING_RATE = 0.1


@dataclasses.dataclass(frozen=True)
class EmptyPipeline:
    """Stages `tanh(x @ w)`, the mean squared error, and plain gradient descent.

    Args:
        ranks: processes, each pinned to a core; they take the cores in turn.
        microbatches: slices of the batch.
        schedule: a key of `TORCH_SCHEDULES`.
        width: features of each example.
        examples: examples in a microbatch.
    """

    ranks: int = 2
    microbatches: int = 8
    schedule: str = "1f1b"
    width: int = 8
    examples: int = 4

    @property
    def stages_per_rank(self) -> int:
        return 2 if self.schedule == "interleaved_1f1b" else 1

    @property
    def num_stages(self) -> int:
        return self.ranks * self.stages_per_rank

    @property
    def num_tasks(self) -> int:
        """A forward and a backward of each stage for each microbatch."""
        return 2 * self.num_stages * self.microbatches

    def weights(self) -> np.ndarray:
        """The parameters to start from, float32, [stages, width, width]."""
        shape = (self.num_stages, self.width, self.width)
        values = np.random.default_rng(0).normal(size=shape) / np.sqrt(self.width)
        return values.astype(np.float32)

    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets, float32, each [microbatches * examples, width]."""
        shape = (2, self.microbatches * self.examples, self.width)
        x, y = np.random.default_rng(1).normal(size=shape).astype(np.float32)
        return x, y
