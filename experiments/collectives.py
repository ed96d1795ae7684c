"""Which collectives do the tasks of a stage have, and which run once a step, for each axis?

    python -m experiments.collectives
    python -m experiments.collectives --cases='data, ZeRO-1;model'

Each case places a small transformer on two ranks, which split it in one way inside a rank, and
compiles the step. The table counts the collectives in the compiled programs of the first rank:
those of a forward and of a backward task, which run for each microbatch,
and those that run once a step.
"""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import app, flags
from jax.sharding import PartitionSpec as P

import jaxpp
from experiments.hlo_collectives import count_collectives

EXAMPLES, TIME, FEATURES, WIDTH, HEADS, MICROBATCHES = 16, 8, 4, 16, 4, 2
OPTIMIZER = optax.adam(1e-3)

_CASES = flags.DEFINE_string("cases", "", "Cases, with semicolons between; by default all.")


@dataclasses.dataclass(frozen=True)
class Case:
    """A way to split a step inside a rank.

    Args:
        axes: the axes inside a rank, of two devices each.
        batch: how the batch is split, of examples, positions and features.
        rules: how parameters are split.
        options: of `place`.
        replicas: the number of replicas.
        between: how activations are split between the halves of a block; None as they come.
        experts: whether a feed-forward layer is one of experts.
    """

    axes: tuple[str, ...]
    batch: P = P()
    rules: Sequence[tuple[str, P]] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    replicas: int = 1
    between: P | None = None
    experts: bool = False


#: Queries, keys and values by heads, then features by columns and rows (Megatron-LM, section 3).
BY_MODEL = (
    (r"\.(query|key|value)$", P(None, "model")),
    (r"\.mixed$", P("model")),
    (r"\.up$", P(None, "model")),
    (r"\.down$", P("model")),
)
BY_EXPERT = ((r"\.(up|down)$", P("expert")),)

CASES = {
    "data": Case(("data",), P("data"), replicas=2),
    "data, ZeRO-1": Case(("data",), P("data"), options={"zero1": "data"}, replicas=2),
    "data, ZeRO-3": Case(("data",), P("data"), options={"zero3": "data"}, replicas=2),
    "data, without `replicas`": Case(("data",), P("data")),
    "model": Case(("model",), rules=BY_MODEL),
    "sequence": Case(("sequence",), P(None, "sequence")),
    "expert": Case(("expert",), P("expert"), BY_EXPERT, experts=True),
    "data x model, ZeRO-1": Case(
        ("data", "model"), P("data"), BY_MODEL, options={"zero1": "data"}, replicas=2
    ),
    "data x expert": Case(
        ("data", "expert"), P("data"), BY_EXPERT, replicas=2, between=P("expert"), experts=True
    ),
}  # fmt: skip


# ---- the model ----------------------------------------------------------------------------------


def init(case: Case, key: jax.Array) -> dict[str, Any]:
    """Draws the parameters: two blocks between two linear layers."""
    keys = iter(jax.random.split(key, 14))
    many = (2,) if case.experts else ()

    def matrix(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / WIDTH**0.5

    blocks = [
        {
            **{name: matrix(WIDTH, HEADS, WIDTH // HEADS) for name in ("query", "key", "value")},
            "mixed": matrix(HEADS, WIDTH // HEADS, WIDTH),
            "up": matrix(*many, WIDTH, 4 * WIDTH),
            "down": matrix(*many, 4 * WIDTH, WIDTH),
        }
        for _ in range(2)
    ]
    return {"into": matrix(FEATURES, WIDTH), "blocks": blocks, "out": matrix(WIDTH, FEATURES)}


def attend(params: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    """Mixes each position with all others."""
    query, key, value = (
        jnp.einsum("btw,whd->bthd", x, params[name]) for name in ("query", "key", "value")
    )
    weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", query, key))
    return jnp.einsum("bhts,bshd,hdw->btw", weights, value, params["mixed"])


def feed_forward(params: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    """Transforms each position."""
    return jax.nn.gelu(x @ params["up"]) @ params["down"]


def by_experts(params: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    """Sends each expert an equal part of the positions, and puts the results back (GShard)."""

    def local(own, x):
        sent = jax.lax.all_to_all(x, "expert", 1, 0, tiled=True)
        made = feed_forward(jax.tree.map(lambda w: w[0], own), sent)
        return jax.lax.all_to_all(made, "expert", 0, 1, tiled=True)

    spec = P("expert")
    run = jax.shard_map(local, in_specs=spec, out_specs=spec, axis_names={"expert"})
    return run({name: params[name] for name in ("up", "down")}, x)


def loss_of(case: Case):
    """Makes the loss of a case."""

    def between(x: jax.Array) -> jax.Array:
        return x if case.between is None else jax.lax.with_sharding_constraint(x, case.between)

    def loss(params, batch):
        x = batch @ params["into"]
        for n, block in enumerate(params["blocks"]):
            x = jaxpp.pipeline_enter_stage(x) if n else x
            x = between(x)
            x = between(x + attend(block, x))
            x = between(x + (by_experts if case.experts else feed_forward)(block, x))
        return jnp.mean((x @ params["out"] - batch) ** 2)

    return loss


# ---- the table ----------------------------------------------------------------------------------


def placed(case: Case) -> tuple[Any, tuple[Any, ...]]:
    """Places the step of a case; also returns its arguments."""
    grad_fn = jaxpp.microbatch(
        jax.value_and_grad(jaxpp.wrap_forward(loss_of(case))), MICROBATCHES, replicas=case.replicas
    )
    grad_fn = jaxpp.schedule(grad_fn, jaxpp.schedules.OneFOneB())

    def step(params, state, batch):
        loss, grads = grad_fn(params, batch)
        updates, state = OPTIMIZER.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    rules = list(case.rules) or None
    mesh = jaxpp.MpmdMesh((2, *(2 for _ in case.axes)), ("mpmd", *case.axes))
    params = init(case, jax.random.key(0))
    batch = jax.random.normal(jax.random.key(1), (EXAMPLES, TIME, FEATURES))
    specs = (rules, rules, case.batch)
    step = jaxpp.place(step, mesh, donate_argnums=(0, 1), in_specs=specs, **case.options)
    return step, (params, OPTIMIZER.init(params), batch)


def row(name: str) -> str:
    """Compiles a case, and writes its line of the table."""
    step, arguments = placed(CASES[name])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="place: the microbatches")
        rank = count_collectives(step.lower(*arguments).compile())[0]
    found = rank.in_tasks.get("F0", {}), rank.in_tasks.get("B0", {}), rank.once
    return f"| {' | '.join((name, *map(counted, found)))} |"


def counted(collectives: Mapping[str, int]) -> str:
    """Writes how many there are of each kind, over which axes."""
    return ", ".join(f"{n} {kind}" for kind, n in collectives.items()) or "none"


HEADER = "| axes | in each forward | in each backward | once a step |\n| --- | --- | --- | --- |"


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise SystemExit(f"unexpected arguments: {argv[1:]}")
    names = [name.strip() for name in _CASES.value.split(";")] if _CASES.value else list(CASES)
    if unknown := [name for name in names if name not in CASES]:
        raise SystemExit(f"--cases: there is no {unknown[0]!r}; give some of {'; '.join(CASES)}")
    jax.config.update("jax_num_cpu_devices", 8)
    print(HEADER)
    for name in names:
        print(row(name), flush=True)


if __name__ == "__main__":
    app.run(main)
