"""A model of equal blocks, its train step plain and placed, and a clock: what benchmarks share."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpp


class Block(eqx.Module):
    """A residual block of two linear layers."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width: int, key: jax.Array):
        up, down = jax.random.split(key)
        self.up = eqx.nn.Linear(width, 4 * width, key=up)
        self.down = eqx.nn.Linear(4 * width, width, key=down)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jax.nn.gelu(self.up(x)))


class Net(eqx.Module):
    """Equal blocks."""

    blocks: list[Block]

    def __init__(self, depth: int, width: int, key: jax.Array):
        self.blocks = [Block(width, k) for k in jax.random.split(key, depth)]

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


def loss_fn(model: Net, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def draw(
    blocks: int, width: int, examples: int, optimizer: optax.GradientTransformation
) -> tuple[tuple[Net, optax.OptState], tuple[jax.Array, jax.Array]]:
    """The model and optimizer state to start from, and a batch of examples."""
    keys = jax.random.split(jax.random.key(0), 3)
    model = Net(blocks, width, keys[0])
    state = (model, optimizer.init(eqx.filter(model, eqx.is_array)))
    shape = (examples, width)
    return state, (jax.random.normal(keys[1], shape), jax.random.normal(keys[2], shape))


def train_step_of(grad_fn: Callable, optimizer: optax.GradientTransformation) -> Callable:
    """The train step that takes its gradients from `grad_fn`."""

    def train_step(model, opt_state, batch):
        loss, grads = grad_fn(model, batch)
        updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    return train_step


def placed_step(
    schedule: jaxpp.schedules.Schedule,
    stages: int,
    microbatches: int,
    optimizer: optax.GradientTransformation,
    mesh: Any,
    blocks: int = 0,
    replicas: int = 1,
    **options: Any,
) -> Any:
    """The train step of a model of `blocks` blocks, by default one a stage, on a mesh.

    The options are those of `place`.
    """
    at = [f"blocks.{(blocks or stages) * i // stages}" for i in range(1, stages)]
    staged = jaxpp.wrap_forward(jaxpp.split_stages(loss_fn, at=at))
    grad_fn = eqx.filter_value_and_grad(staged)
    grad_fn = jaxpp.microbatch(grad_fn, microbatches, replicas=replicas)
    grad_fn = jaxpp.schedule(grad_fn, schedule)
    step = train_step_of(grad_fn, optimizer)
    return jaxpp.place(step, mesh, donate_argnums=(0, 1), **options)


def plain_step(
    microbatches: int, optimizer: optax.GradientTransformation, state: tuple[Any, ...]
) -> Callable:
    """The train step on one device, which accumulates the same gradients by a scan."""
    accumulate = jaxpp.microbatch(eqx.filter_value_and_grad(loss_fn), microbatches)
    step = train_step_of(accumulate, optimizer)
    static = eqx.partition(state, eqx.is_array)[1]

    def on_arrays(arrays, batch):
        *state, loss = step(*eqx.combine(arrays, static), batch)
        return eqx.filter(tuple(state), eqx.is_array), loss

    jitted = jax.jit(on_arrays, donate_argnums=0)

    def run(model, opt_state, batch):
        arrays, loss = jitted(eqx.filter((model, opt_state), eqx.is_array), batch)
        return *eqx.combine(arrays, static), loss

    return run


class Loop:
    """A training loop as a function without arguments; it keeps the state."""

    def __init__(self, step: Callable, state: tuple[Any, ...], batch: Any):
        self.step, self.state, self.batch = step, copy(state), batch

    def __call__(self) -> Any:
        *state, loss = self.step(*self.state, self.batch)
        self.state = tuple(state)
        return self.state, loss


def sleeping(seconds: float) -> Any:
    """The identity, which sleeps in the forward, and twice as long in the backward."""

    def sleep(x, times):
        def host(x):
            time.sleep(times * seconds)
            return np.asarray(x)

        return jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    @jax.custom_vjp
    def identity(x):
        return sleep(x, 1)

    identity.defvjp(lambda x: (sleep(x, 1), None), lambda _, c: (sleep(c, 2),))
    return identity


def copy(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.array(x) if eqx.is_array(x) else x, tree)


def seconds(run: Callable[[], Any], repeats: int) -> float:
    """The median time of a call, until its result is ready."""
    jax.block_until_ready(run())
    return statistics.median(elapsed(run) for _ in range(repeats))


def elapsed(run: Callable[[], Any], calls: int = 1) -> float:
    """Seconds that some calls take, one after the other, until the last result is ready."""
    start = time.perf_counter()
    result = None
    for _ in range(calls):
        result = run()
    jax.block_until_ready(result)
    return time.perf_counter() - start


def planned_bytes(executable: jax.stages.Compiled) -> int:
    """Gives the most bytes that an executable holds: arguments, new results and temporaries."""
    known: Any = executable.memory_analysis()
    sizes = known.argument_size_in_bytes, known.output_size_in_bytes, known.temp_size_in_bytes
    return sum(sizes) - known.alias_size_in_bytes
