"""Draws a program from a seed."""

import numpy as np

from tests.programs import optimizers, steps
from tests.programs.operations import POLICIES, RULES, Operation, has_complex
from tests.programs.program import SCHEDULES, Call, Output, Program, Stage

REDUCTIONS = {
    "metric": ("mean", "sum", "max", "last", "stack"),
    "count": ("sum", "max", "last", "stack"),
    "rows": ("mean", "sum", "concat", "stack", "last"),
    "flag": ("max", "last", "stack"),
    "half": ("mean", "sum", "stack"),
    "labels": ("concat", "stack", "last"),
    "constant": ("last", "stack", "sum"),
    "key": ("last", "stack"),
    "empty": ("mean", "concat", "stack"),
}
CONTEXTS = (
    "threefry_partitionable(False)",
    "threefry_partitionable(True)",
    "matmul_precision(highest)",
    "x64",
    "numpy_rank_promotion(warn)",
)


def draw(seed: int) -> Program:
    """The program of a seed."""
    rng = np.random.default_rng(seed)

    def some(probability: float) -> bool:
        return bool(rng.random() < probability)

    def one(options):
        options = list(options)
        return options[rng.integers(len(options))]

    while True:
        schedule, ranks = one(SCHEDULES), int(one((2, 2, 3, 4)))
        num_stages, microbatches = ranks * SCHEDULES[schedule][0], int(one((1, 2, 2, 3, 4)))
        try:
            SCHEDULES[schedule][1].table(num_stages, microbatches)
        except ValueError:
            continue
        if num_stages <= 4:
            break
    forward_only = schedule.startswith("ForwardOnly")
    effects_inside = some(0.15)
    names = [n for n, r in RULES.items() if not r.effect and not r.top]
    nested = [n for n in names if RULES[n].nests]
    flat = [n for n in names if n not in nested]
    effects = [n for n in RULES if RULES[n].effect]
    handed = [n for n in RULES if RULES[n].top]
    kinds = [n.removeprefix("make_") for n in handed if n.startswith("make_") and some(0.25)]
    weights: dict[str, list[str]] = {}

    def operation(depth: int) -> Operation:
        name = one(nested if depth < 2 and some(0.3) else flat)
        kind = RULES[name].weight
        weight = None
        if kind is not None:
            known = weights.setdefault(kind, [])
            if not known or not some(0.2):
                known.append(f"{kind}{len(known)}")
            weight = one(known[-1:] if some(0.8) else known)
        inner = ()
        if RULES[name].nests:
            inner = tuple(operation(depth + 1) for _ in range(rng.integers(1, 3)))
        return Operation(name, int(rng.integers(60)), weight, inner)

    def lines(number: int) -> tuple[Operation, ...]:
        ops = [operation(0) for _ in range(rng.integers(1, 4))]
        nothing_yet = not weights and number == num_stages - 1
        if some(0.7) or nothing_yet:  # most stages have a parameter
            ops.insert(rng.integers(len(ops) + 1), _linear(weights, rng))
        if effects_inside and some(0.5):
            ops.insert(rng.integers(len(ops) + 1), Operation(one(effects), number))
        for kind in kinds:
            for verb, probability in (("use", 0.5), ("make", 0.4 if number else 0.8)):
                if some(probability):
                    ops.insert(rng.integers(len(ops) + 1), Operation(f"{verb}_{kind}", number))
        return tuple(ops)

    graph = some(0.3)
    stages = []
    for k in range(num_stages):
        reads = {k - 1} if k else set()
        if graph and k > 1:
            reads = {int(rng.integers(k)) for _ in range(rng.integers(1, 3))}
        if k == num_stages - 1 and k:  # the last stage reads all that nobody has read
            reads |= set(range(k)) - {j for s in stages for j in s.reads}
        stages.append(Stage(tuple(sorted(reads)), lines(k)))
    two_directions = schedule in ("DualPipe", "Chimera")  # they have no last microbatch
    outputs = tuple(
        Output(
            f"{one('abmz')}{i}_{kind}",
            kind,
            one(r for r in REDUCTIONS[kind] if r != "last" or not two_directions),
        )
        for i, kind in enumerate(one(REDUCTIONS) for _ in range(rng.integers(0, 4)))
    )
    if forward_only:
        loops = ("eval",)
    else:
        loops = one([("inside",)] * 4 + [("outside",)] * 2 + [
            ("inside", "eval"), ("eval", "inside"), ("inside", "inside"), ("outside", "eval"),
            ("eval", "outside", "eval"),
        ])  # fmt: skip
    calls = [Call(one(CONTEXTS) if some(0.1) else "none")]
    if some(0.5):
        calls.append(Call(one(CONTEXTS) if some(0.25) else "none", int(one((2, 3, 3)))))
    policy = one((*[*POLICIES][1:], "outside")) if some(0.25) and not effects_inside else None
    if any(has_complex(s.lines) for s in stages):
        policy = None
    return Program(
        seed=seed,
        stages=tuple(stages),
        cuts="numbers" if graph else one(("marks", "marks", "numbers", "automatic")),
        policy=policy,
        around=one(("jit", "checkpoint")) if some(0.15) and not effects_inside else "nothing",
        params=one(("dict", "list", "nested")),
        half_weights=some(0.15),
        loss=one(LOSSES),
        penalty=some(0.2),
        place_of_loss=int(rng.integers(len(outputs) + 1)),
        container=one(("tuple", "dict")),
        outputs=outputs,
        loops=loops,
        optimizer=one(optimizers.OPTIMIZERS),
        gradients=some(0.5),
        effects=tuple(sorted({one(steps.EFFECTS) for _ in range(rng.integers(1, 3))}))
        if some(0.25)
        else (),
        returned=tuple(name for name in steps.RETURNED if some(0.1)),
        jitted=some(0.15),
        donated=some(0.6),
        flat=some(0.5),
        schedule=schedule,
        ranks=ranks,
        shared=some(0.7),
        microbatches=microbatches,
        calls=tuple(calls),
    )


LOSSES = ("squares", "labels", "mean", "abs")


def _linear(weights, rng) -> Operation:
    known = weights.setdefault("matrix", [])
    known.append(f"matrix{len(known)}")
    return Operation("linear", int(rng.integers(60)), known[-1])
