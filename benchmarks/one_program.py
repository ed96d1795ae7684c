"""Compares one SPMD program for a schedule's table with the placed step, which dispatches tasks.

    python -m benchmarks.one_program
    python -m benchmarks.one_program --sizes=256:32 --schedules=1f1b --microbatches=32

The program runs on all ranks under `jax.shard_map`, for stages that are equal. It is a scan over
ticks. At each tick a rank does what the table gives it: nothing, a forward or a backward; then it
hands an activation to the next rank and a gradient to the one before. What a forward keeps for its
backward, and what arrives early, lies in slots of arrays. XLA copies these whole for the branches
of a `switch`; a loop of one round or none works in place.

For each schedule and size it prints

- `ticks`, and `lockstep`: the time of all ticks over the makespan that the simulator gives, where a
  tick is as long as its longest task and a backward takes twice as long as a forward;
- `slots` of activations on each rank, and the table's own peak on the first and the last;
- the ratios of times of a step, with quartiles, of calls that take turns: the program over the
  placed step, and both over the plain step; and the first calls' (trace, lower, compile, run);
- the bytes of the rank that holds most, of both, and the largest difference of a gradient.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpp
from benchmarks.equal_blocks import (
    Loop,
    Net,
    draw,
    elapsed,
    placed_step,
    plain_step,
    planned_bytes,
    train_step_of,
)
from jaxpp.runtime.executor._compile import clear_cache
from jaxpp.schedules import Costs, Kind, Table, Timeline, simulate

_SIZES = flags.DEFINE_list("sizes", ["16:4", "256:32", "512:128"], "Widths, and rows each.")
_SCHEDULES = flags.DEFINE_list("schedules", ["gpipe", "1f1b"], "Names of schedules.")
_RANKS = flags.DEFINE_integer("ranks", 4, "Ranks, with one stage and one block each.", 2)
_MICROBATCHES = flags.DEFINE_integer("microbatches", 8, "Microbatches of a step.", 1)
_BRANCH = flags.DEFINE_enum(
    "branch", "loop", ["loop", "switch"], "How a rank takes the task of a tick."
)
_REPEATS = flags.DEFINE_integer("repeats", 30, "Calls of each step.", 2)

IDLE, FORWARD, BACKWARD = range(3)


# ---- a table, tick by tick ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Ticks:
    """What each rank does at each tick; arrays of integers, [ticks, ranks].

    Args:
        kind: `IDLE`, `FORWARD` or `BACKWARD`.
        microbatch: of the task.
        kept: the slot of what the task's forward keeps.
        taken: the slot in which the task's input has arrived, of `ups` or of `downs`.
        up: the slot of `ups` for what arrives at the end of the tick from the rank before.
        down: that of `downs`, from the rank after; on the last rank, from its own loss.
        slots: the numbers of slots: kept, up and down. One more takes what nobody reads.
    """

    kind: np.ndarray
    microbatch: np.ndarray
    kept: np.ndarray
    taken: np.ndarray
    up: np.ndarray
    down: np.ndarray
    slots: tuple[int, ...]

    @staticmethod
    def of(table: Table) -> "Ticks":
        """Puts the tasks of a table with a stage a rank on ticks, each as early as it can."""
        timeline = simulate(table, Costs(backward=1.0))
        at = {(s.task.kind, s.rank, s.task.microbatch): int(s.start) for s in timeline.spans}
        f, b = (
            {own[1:]: t for own, t in at.items() if own[0] is kind} for kind in (Kind.F, Kind.B)
        )
        last = table.num_ranks - 1
        lives = {
            "kept": {(r, m): (f[r, m], b[r, m]) for r, m in f},
            "up": {(r, m): (f[r - 1, m], f[r, m]) for r, m in f if r},
            "down": {(r, m): (b[r + 1, m] if r < last else f[r, m], b[r, m]) for r, m in f},
        }
        slot = {name: slots(own) for name, own in lives.items()}
        counts = tuple(1 + max(own.values()) for own in slot.values())
        unread = {"up": counts[1], "down": counts[2]}
        shape = int(timeline.makespan), table.num_ranks
        names = ("kind", "microbatch", "kept", "taken", "up", "down")
        fields = {name: np.full(shape, unread.get(name, 0), np.int32) for name in names}
        for (rank, m), ends in lives["kept"].items():
            for kind, tick, arrived in zip((FORWARD, BACKWARD), ends, ("up", "down"), strict=True):
                fields["kind"][tick, rank] = kind
                fields["microbatch"][tick, rank] = m
                fields["kept"][tick, rank] = slot["kept"][rank, m]
                fields["taken"][tick, rank] = slot[arrived].get((rank, m), 0)
        for name in unread:
            for (rank, m), (tick, _) in lives[name].items():
                fields[name][tick, rank] = slot[name][rank, m]
        return Ticks(**fields, slots=counts)


def slots(lives: Mapping[tuple[int, int], tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Gives the values of each rank slots: the first that is free after the value's first tick.

    Args:
        lives: for each rank and microbatch, the tick that makes a value, and the one that reads it.
    """
    free_from: dict[tuple[int, int], int] = {}
    found = {}
    for (rank, m), (begin, end) in sorted(lives.items(), key=lambda life: life[1]):
        slot = 0
        while free_from.get((rank, slot), 0) > begin:
            slot += 1
        free_from[rank, slot] = end
        found[rank, m] = slot
    return found


def lockstep(ticks: Ticks, timeline: Timeline) -> float:
    """The time of all ticks over a timeline's makespan; a backward takes two, a forward one."""
    return float(ticks.kind.max(axis=1).sum() / timeline.makespan)


# ---- the program --------------------------------------------------------------------------------


def loss_of(out: jax.Array, target: jax.Array) -> jax.Array:
    return jnp.mean((out - target) ** 2)


def by_switch(kind: jax.Array, tasks: Sequence[Callable], carry: Any, *given: Any) -> Any:
    """Runs the task of a kind, 1 or 2. XLA copies what is carried for each branch."""
    return jax.lax.switch(kind, [lambda carry, *_: carry, *tasks], carry, *given)


def by_loops(kind: jax.Array, tasks: Sequence[Callable], carry: Any, *given: Any) -> Any:
    """Runs the task of a kind, 1 or 2, by loops of one round or none, which work in place."""
    for number, task in enumerate(tasks, start=1):

        def once(n, carry, task=task):
            # Else XLA would find the task to be the same in all rounds, and run it ahead of them.
            _, own = jax.lax.optimization_barrier((n, given))
            return task(carry, *own)

        carry = jax.lax.fori_loop(0, (kind == number).astype(jnp.int32), once, carry)
    return carry


PERFORM = {"loop": by_loops, "switch": by_switch}


def gradients_of(ticks: Ticks, microbatches: int, perform: Callable) -> Callable:
    """The function of a rank from its block and the whole batch to the loss and its gradients."""
    ranks = ticks.kind.shape[1]
    upwards = [(rank, rank + 1) for rank in range(ranks - 1)]
    downwards = [(after, rank) for rank, after in upwards]
    fields = [ticks.kind, ticks.microbatch, ticks.kept, ticks.taken, ticks.up, ticks.down]
    orders = jnp.asarray(np.stack(fields, axis=-1))
    get = functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False)
    put = functools.partial(jax.lax.dynamic_update_index_in_dim, axis=0)

    def gradients(block, batch):
        xs, ys = (jnp.reshape(x, (microbatches, -1, *x.shape[1:])) for x in batch)
        rank = jax.lax.axis_index("ranks")
        nothing = jnp.zeros_like(xs[0])
        weights = jax.tree.leaves(block)

        def forward_of(x):
            """The output, what its pullback reads beside the weights, and how that is made."""
            out, pull = jax.vjp(lambda block, x: jax.vmap(block)(x), block, x)
            leaves, treedef = jax.tree.flatten(pull)
            known = [next((i for i, w in enumerate(weights) if w is x), None) for x in leaves]
            kept = [x for x, i in zip(leaves, known, strict=True) if i is None]
            return out, kept, (treedef, known)

        _, kept_types, (treedef, known) = eqx.filter_eval_shape(forward_of, nothing)

        def room(count, like):
            return jnp.zeros((count + 1, *like.shape), like.dtype)

        def tick(carry, order):
            kept, ups, downs, grads, loss = carry
            kind, microbatch, slot, taken, up_to, down_to = order

            def forward(carry, x, _):
                kept, grads, loss, *_ = carry
                out, new, _ = forward_of(x)
                own, down = jax.lax.cond(
                    rank == ranks - 1,
                    lambda: jax.value_and_grad(loss_of)(out, get(ys, microbatch)),
                    lambda: (jnp.zeros_like(loss), nothing),
                )
                kept = [put(a, x, index=slot) for a, x in zip(kept, new, strict=True)]
                return kept, grads, loss + own, out, down

            def backward(carry, _, cotangent):
                kept, grads, loss, up, _ = carry
                own = iter([get(a, slot) for a in kept])
                leaves = [next(own) if i is None else weights[i] for i in known]
                new, down = jax.tree.unflatten(treedef, leaves)(cotangent)
                return kept, jax.tree.map(jnp.add, grads, new), loss, up, down

            carry = kept, grads, loss, nothing, nothing
            x = jnp.where(rank == 0, get(xs, microbatch), get(ups, taken))
            carry = perform(kind, (forward, backward), carry, x, get(downs, taken))
            kept, grads, loss, up, down = carry
            ups = put(ups, jax.lax.ppermute(up, "ranks", upwards), index=up_to)
            handed = jax.lax.ppermute(down, "ranks", downwards)
            downs = put(downs, jnp.where(rank == ranks - 1, down, handed), index=down_to)
            return (kept, ups, downs, grads, loss), None

        num_kept, num_ups, num_downs = ticks.slots
        carry = (
            [room(num_kept, x) for x in kept_types],
            room(num_ups, nothing),
            room(num_downs, nothing),
            jax.tree.map(jnp.zeros_like, block),
            jnp.zeros((), xs.dtype),
        )
        (_, _, _, grads, loss), _ = jax.lax.scan(tick, carry, orders[:, rank])
        mean = jax.tree.map(lambda x: x / microbatches, (loss, grads))
        return jax.lax.psum(mean[0], "ranks"), mean[1]

    return gradients


def stacked(state: Any) -> Any:
    """The state of a model of equal blocks with each rank's own along a first axis."""

    def leaf(x):
        return jax.tree.map(lambda *own: jnp.stack(own), *x.blocks) if isinstance(x, Net) else x

    return jax.tree.map(leaf, state, is_leaf=lambda x: isinstance(x, Net))


def program_step(
    table: Table, optimizer: optax.GradientTransformation, state: Any, perform: Callable = by_loops
) -> tuple[Any, Any]:
    """The jitted train step as one program, and the state to start from, on a device a rank.

    Args:
        table: with a stage a rank.
        optimizer: elementwise.
        state: of the model and the optimizer, as `draw` gives it.
        perform: how a rank takes the task of a tick.
    """
    mesh = Mesh(np.asarray(jax.devices()[: table.num_ranks]), ("ranks",))
    arrays, static = eqx.partition(stacked(state), eqx.is_array)
    gradients = gradients_of(Ticks.of(table), table.num_microbatches, perform)
    train_step = train_step_of(gradients, optimizer)

    def on_rank(arrays, batch):
        own = jax.tree.map(lambda x: x[0], arrays)
        *new, loss = train_step(*eqx.combine(own, static), batch)
        return jax.tree.map(lambda x: x[None], eqx.filter(tuple(new), eqx.is_array)), loss

    over = P("ranks"), P()
    spread = jax.shard_map(on_rank, mesh=mesh, in_specs=over, out_specs=over, check_vma=False)
    places = NamedSharding(mesh, P("ranks"))
    return jax.jit(spread, donate_argnums=0), jax.device_put(arrays, places)


# ---- the report ---------------------------------------------------------------------------------


def measure(name: str, width: int, rows: int) -> None:
    """Measures a schedule for a width and rows of a microbatch; prints what it finds."""
    clear_cache()
    jax.clear_caches()
    ranks, microbatches = _RANKS.value, _MICROBATCHES.value
    schedule = jaxpp.schedules.by_name(name)
    table = schedule.table(ranks, microbatches)
    ticks = Ticks.of(table)
    optimizer = optax.sgd(1e-2, momentum=0.9)  # after one step its state is the gradients
    state, batch = draw(ranks, width, rows * microbatches, optimizer)
    mesh = jaxpp.MpmdMesh((ranks,), ("mpmd",))
    placed = placed_step(schedule, ranks, microbatches, optimizer, mesh)
    program, spread = program_step(table, optimizer, state, PERFORM[_BRANCH.value])
    loops = {
        "plain": Loop(plain_step(microbatches, optimizer, state), state, batch),
        "placed": Loop(placed, state, batch),
        "program": Loop(program, (spread,), batch),
    }
    firsts, gradients = {}, {}
    for way, loop in loops.items():
        firsts[way] = elapsed(loop)
        _, opt_state = jax.device_get(loop.state if way != "program" else loop.state[0])
        gradients[way] = jax.tree.leaves(stacked(opt_state))
    difference = {
        way: max(
            np.abs(a - b).max() for a, b in zip(gradients[way], gradients["program"], strict=True)
        )
        for way in ("plain", "placed")
    }
    times: dict[str, list[float]] = {way: [] for way in loops}
    for turn in range(_REPEATS.value):
        for way in list(loops)[:: 1 if turn % 2 else -1]:
            times[way].append(elapsed(loops[way]))
    memory = placed.lower(*loops["placed"].state, batch).compile().describe()
    held = max(rank.peak_bytes for rank in memory.ranks)
    planned = planned_bytes(program.lower(*loops["program"].state, batch).compile())
    peak = table.peak_in_flight()
    print(
        f"{name}, width {width}, {rows} rows: {len(ticks.kind)} ticks, lockstep "
        f"{lockstep(ticks, simulate(table)):.2f}, {ticks.slots[0]} slots (table {peak[0]} to "
        f"{peak[-1]}); plain {1e3 * statistics.median(times['plain']):.2f} ms"
    )
    for over, under in (("program", "placed"), ("program", "plain"), ("placed", "plain")):
        ratios = [a / b for a, b in zip(times[over], times[under], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"  {over} / {under}: {middle:.2f} (quartiles {low:.2f}, {high:.2f}), first call "
            f"{firsts[over] / firsts[under]:.2f}"
        )
    print(
        f"  bytes: program {planned}, placed {held}, ratio {planned / held:.2f}; gradients differ "
        f"by {difference['placed']:.1e} from placed, {difference['plain']:.1e} from plain",
        flush=True,
    )


def main(_: Sequence[str]) -> None:
    jax.config.update("jax_num_cpu_devices", _RANKS.value)
    print(f"JAX {jax.__version__}, {_RANKS.value} ranks, {_MICROBATCHES.value} microbatches")
    for name in _SCHEDULES.value:
        for size in _SIZES.value:
            measure(name, *map(int, size.split(":")))


if __name__ == "__main__":
    app.run(main)
