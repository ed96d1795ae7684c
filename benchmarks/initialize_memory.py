"""How much memory deferred initialisation takes, on each rank and in the driver.

    python -m benchmarks.initialize_memory
    python -m benchmarks.initialize_memory --layers=48 --width=1024 --ranks=4
    python -m benchmarks.initialize_memory --layers=48 --width=1024 --ranks=4 --eager

Ranks are worker processes on this host. The state is a stack of square float32 weights and a
momentum for each. For each process: the memory that it has before, the most that it has until all
is there (`VmHWM` in /proc, which is reset before), and the bytes of its share. With `--eager` the
driver makes the state as usual, and the first step takes it to the ranks.
"""

import jax
import jax.numpy as jnp
from absl import app, flags

import jaxpp

_RANKS = flags.DEFINE_integer("ranks", 2, "Ranks, each a process.", 1)
_LAYERS = flags.DEFINE_integer("layers", 4, "Layers, each a weight.", 1)
_WIDTH = flags.DEFINE_integer("width", 64, "Rows and columns of a weight.", 1)
_EAGER = flags.DEFINE_bool("eager", False, "Whether the driver makes the state itself.")
_STACKED = flags.DEFINE_bool("stacked", False, "Whether the weights are one array, for a scan.")

_MIB = 1 << 20


def make_state(key: jax.Array):
    """Weights and their momenta."""

    def make(key):
        return jax.random.normal(key, (_WIDTH.value, _WIDTH.value)) / jnp.sqrt(_WIDTH.value)

    keys = jax.random.split(key, _LAYERS.value)
    weights = jax.vmap(make)(keys) if _STACKED.value else [make(k) for k in keys]
    return weights, jax.tree.map(jnp.zeros_like, weights)


def loss_fn(weights, x: jax.Array) -> jax.Array:
    if _STACKED.value:
        x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]
    else:
        for w in weights:
            x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def placed(mesh):
    """A train step with momentum."""
    staged = jaxpp.wrap_forward(jaxpp.split_stages(loss_fn, num_stages=_RANKS.value))
    grad_fn = jaxpp.microbatch(jax.value_and_grad(staged), 2)
    grad_fn = jaxpp.schedule(grad_fn, jaxpp.schedules.OneFOneB())

    def train_step(weights, momenta, x):
        loss, grads = grad_fn(weights, x)
        momenta = jax.tree.map(lambda m, g: 0.9 * m + g, momenta, grads)
        weights = jax.tree.map(lambda w, m: w - 0.01 * m, weights, momenta)
        return weights, momenta, loss

    return jaxpp.place(train_step, mesh, donate_argnums=(0, 1))


def start_peak(process=None) -> float:
    """The MiB of this process; from here on its peak counts anew."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return _status("VmRSS")


def read_peak(process=None) -> tuple[float, float]:
    """The most MiB that this process has had since `start_peak`, and those of its arrays."""
    arrays = process.arrays.values() if process else ()
    return _status("VmHWM"), sum(x.nbytes for x in arrays) / _MIB


def _status(name: str) -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(name + ":"))


def main(_) -> None:
    ranks = range(_RANKS.value)
    key, x = jax.random.key(0), jnp.ones((4, _WIDTH.value))
    state_size = sum(
        x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(make_state, key))
    )
    with jaxpp.RemoteMpmdMesh((_RANKS.value,), start_timeout=300) as mesh:
        step = placed(mesh)
        compiled = step.lower(*jax.eval_shape(make_state, key), x).compile()
        before = mesh.apply(start_peak, {rank: () for rank in ranks})
        driver_before = start_peak()
        if _EAGER.value:
            state = compiled(*make_state(key), x)
        else:
            state = compiled.initialize(make_state, key)
        jax.block_until_ready(state)
        after = mesh.apply(read_peak, {rank: () for rank in ranks})
        driver_after = read_peak()
    print(f"state: {state_size / _MIB:.1f} MiB")
    print(f"{'process':8} {'before':>8} {'peak':>8} {'more':>8} {'arrays':>8}  MiB")
    rows = [(f"rank {rank}", before[rank], *after[rank]) for rank in ranks]
    for name, start, peak, arrays in [*rows, ("driver", driver_before, *driver_after)]:
        print(f"{name:8} {start:8.1f} {peak:8.1f} {peak - start:8.1f} {arrays:8.1f}")


if __name__ == "__main__":
    app.run(main)
