"""The model FLOPs of a step: what its products take, without what is computed again."""

import math
from collections.abc import Sequence
from typing import Any

from jaxpp import jaxprs
from jaxpp._program import PROVIDED, Bundle, Mesh, Program, Receive, Run
from jaxpp._specs import axis_sizes


def model_flops(bundle: Bundle) -> tuple[float, ...]:
    """Counts for each rank the operations of its products in a step.

    A product that a rank computes again, with the same operands, counts once: so the recomputation
    of checkpoints does not count.

    Args:
        bundle: the programs.

    Returns:
        The floating-point operations of each rank, on all its devices.
    """
    products = jaxprs.Products()
    found = []
    for program in bundle.programs:
        before = products.flops
        _run(bundle, program, products)
        found.append(products.flops - before)
    return tuple(found)


def _run(bundle: Bundle, program: Program, products: jaxprs.Products) -> None:
    """Counts the products of a program; slots have the numbers of their values."""
    rank = program.rank
    slots = {slot: products.number(("argument", n)) for n, slot in program.inputs}
    slots |= {
        slot: products.number(("constant", rank, n))
        for n, (slot, _) in enumerate(program.constants)
    }
    for place, instruction in enumerate(program.instructions):
        match instruction:
            case Receive(received, _):
                slots |= {s: products.number(("received", rank, place, s)) for s in received}
            case Run(number, inputs, outputs):
                jaxpr = bundle.computations[number].jaxpr
                results = products.run(jaxpr, [slots[s] for s in inputs], rank)
                slots |= dict(zip(outputs, results, strict=True))


def utilization(
    flops: Sequence[float],
    bundle: Bundle,
    mesh: Mesh,
    seconds: float,
    device: Any,
    rank: int | None,
) -> float:
    """Computes the share of the devices' peak that so many model FLOPs in so many seconds are."""
    if not 0 < seconds < math.inf:
        raise ValueError(
            f"mfu: seconds is the time of a step, finite and more than 0, got {seconds!r}."
        )
    if rank is not None and rank not in range(len(flops)):
        raise ValueError(f"mfu: rank is one of 0 to {len(flops) - 1}, or None, got {rank!r}.")
    each = math.prod(axis_sizes(bundle.inside).values())
    count = each * len(flops)
    if (devices := getattr(mesh, "devices", None)) is not None:
        count = len(set(devices))  # ranks may share them
    done, count = (sum(flops), count) if rank is None else (flops[rank], each)
    return done / (seconds * count * PROVIDED["device"](device).flops)
