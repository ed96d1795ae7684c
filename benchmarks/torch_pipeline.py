"""The step overhead of `torch.distributed.pipelining` over gloo: the counterpart of ours.

    python -m benchmarks.torch_pipeline --ranks=4 --microbatches=32 --schedule=1f1b

Runs with a Python that has torch and NumPy; nothing else of this project needs torch. The ranks
are processes on this machine, each with one thread and pinned to a core. Every rank trains in a
loop without a barrier, and a block of steps is over when all ranks are through. Prints JSON: the
loss of the first step, and the microseconds of a step and of a task.

With `--serve` it runs a block for each line of standard input, the number of its steps, and prints
a line with its seconds, so that another program can take turns with it; first the loss.
"""

import argparse
import dataclasses
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import torch  # pyright: ignore[reportMissingImports]
import torch.distributed as dist  # pyright: ignore[reportMissingImports]
from torch.distributed import pipelining  # pyright: ignore[reportMissingImports]

from benchmarks.empty_pipeline import LEARNING_RATE, TORCH_SCHEDULES, EmptyPipeline

WARM_UP_STEPS = 20


class Stage(torch.nn.Module):
    def __init__(self, weights: torch.Tensor):
        super().__init__()
        self.weights = torch.nn.Parameter(weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weights)


def training_step(pipeline: EmptyPipeline, rank: int) -> Callable[[], torch.Tensor | None]:
    """A function that trains for one step on this rank; gives the loss where it is known."""
    modules, stages = [], []
    for index in range(rank, pipeline.num_stages, pipeline.ranks):
        modules.append(Stage(torch.from_numpy(pipeline.weights()[index])))
        stages.append(
            pipelining.PipelineStage(modules[-1], index, pipeline.num_stages, torch.device("cpu"))
        )
    make_schedule = getattr(pipelining, TORCH_SCHEDULES[pipeline.schedule])
    schedule = make_schedule(
        stages if pipeline.stages_per_rank > 1 else stages[0],
        pipeline.microbatches,
        loss_fn=torch.nn.functional.mse_loss,
    )
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE)
    x, y = map(torch.from_numpy, pipeline.batch())

    def step():
        losses: list[torch.Tensor] = []
        inputs = (x,) if rank == 0 else ()
        if rank == pipeline.ranks - 1:
            schedule.step(*inputs, target=y, losses=losses)
        else:
            schedule.step(*inputs)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).detach().mean() if losses else None

    return step


def join(pipeline: EmptyPipeline, rank: int, meeting_point: str) -> None:
    """Makes this process a rank of the pipeline."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=pipeline.ranks
    )


def first_loss(pipeline: EmptyPipeline, step: Callable[[], torch.Tensor | None]) -> float:
    """Trains for the first step, and gives its loss on every rank."""
    loss = step()
    loss = torch.zeros(()) if loss is None else loss
    dist.broadcast(loss, pipeline.ranks - 1)
    return float(loss)


def run_block(step: Callable[[], torch.Tensor | None], steps: int = 0) -> float:
    """Trains on all ranks for as many steps as rank 0 says; 0 where it says that there are no more.

    Returns:
        seconds from the moment at which all ranks are ready to that at which all are through.
    """
    announced = torch.tensor(steps)
    dist.broadcast(announced, 0)
    if not announced:
        return 0.0
    dist.barrier()
    start = time.perf_counter()
    for _ in range(int(announced)):
        step()
    dist.barrier()
    return time.perf_counter() - start


def follow(pipeline: EmptyPipeline, rank: int, meeting_point: str) -> None:
    """Runs the blocks that rank 0 announces."""
    join(pipeline, rank, meeting_point)
    step = training_step(pipeline, rank)
    first_loss(pipeline, step)
    while run_block(step):
        pass
    dist.destroy_process_group()


def lead(pipeline: EmptyPipeline, meeting_point: str, blocks: Iterator[int]) -> Iterator[float]:
    """Runs rank 0 and announces blocks; gives the loss of the first step, then their seconds."""
    join(pipeline, 0, meeting_point)
    step = training_step(pipeline, 0)
    yield first_loss(pipeline, step)
    run_block(step, WARM_UP_STEPS)
    for steps in blocks:
        yield run_block(step, steps)
    run_block(step, 0)
    dist.destroy_process_group()


def run(pipeline: EmptyPipeline, blocks: Iterator[int]) -> Iterator[float]:
    """As `lead`, with the other ranks as processes that end with it."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        meeting_point = os.path.join(folder, "ranks")
        others = [
            context.Process(target=follow, args=(pipeline, rank, meeting_point), daemon=True)
            for rank in range(1, pipeline.ranks)
        ]
        for process in others:
            process.start()
        yield from lead(pipeline, meeting_point, blocks)
        for process in others:
            process.join()


def report(pipeline: EmptyPipeline, blocks: int, steps: int) -> dict[str, object]:
    """The figures of a run on its own."""
    loss, *seconds = run(pipeline, iter([steps] * blocks))
    each = [1e6 * block / steps for block in seconds]
    return {
        "torch": torch.__version__,
        **dataclasses.asdict(pipeline),
        "first_loss": loss,
        "step_us": statistics.median(each),
        "task_us": statistics.median(each) / pipeline.num_tasks,
        "blocks_us": each,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    for field in dataclasses.fields(EmptyPipeline):
        choices = list(TORCH_SCHEDULES) if field.name == "schedule" else None
        kind = type(field.default)
        parser.add_argument(f"--{field.name}", type=kind, default=field.default, choices=choices)
    parser.add_argument("--blocks", type=int, default=5, help="How often to measure.")
    parser.add_argument("--steps", type=int, default=100, help="Steps in a block.")
    parser.add_argument("--serve", action="store_true", help="Take blocks from standard input.")
    flags = vars(parser.parse_args())
    serve, blocks, steps = flags.pop("serve"), flags.pop("blocks"), flags.pop("steps")
    pipeline = EmptyPipeline(**flags)
    if serve:
        for value in run(pipeline, map(int, sys.stdin)):
            print(value, flush=True)
    else:
        print(json.dumps(report(pipeline, blocks, steps), indent=2))


if __name__ == "__main__":
    main()
