"""Trains across two hosts, and says on standard output how it goes: a JSON object a line.

It waits for a line of its standard input after each, so that the test can do harm in between. With
the argument `spanning` its ranks have two processes each.
"""

import json
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import ray
from jax.sharding import PartitionSpec as P

import jaxpp

STEPS = 3
HEARTBEAT_TIMEOUT = 4.0


def say(what: str, **facts) -> None:
    print(json.dumps({"what": what, **facts}), flush=True)
    sys.stdin.readline()


def loss(params, x):
    h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ params["w0"]))
    return jnp.mean((h @ params["w1"]) ** 2)


def train(mesh):
    """The losses and parameters of some steps."""
    grad = jax.value_and_grad(jaxpp.wrap_forward(loss))
    grad = jaxpp.schedule(jaxpp.microbatch(grad, 4), jaxpp.schedules.OneFOneB())

    def step(params, x):
        value, grads = grad(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    specs = None if mesh.inside is None else ([("w1", P("data"))], P("data"))
    placed = jaxpp.place(step, mesh, donate_argnums=0, in_specs=specs)
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        n: jax.random.normal(key, (16, 16)) for n, key in zip(["w0", "w1"], keys, strict=False)
    }
    losses = []
    for n in range(STEPS):
        params, value = placed(params, jax.random.normal(jax.random.fold_in(keys[2], n), (16, 16)))
        losses.append(float(value))
    return losses, {name: np.asarray(value) for name, value in params.items()}


def until_it_fails(mesh) -> dict:
    """Trains until the mesh fails, and tells of the error."""
    while True:
        try:
            train(mesh)
        except RuntimeError as error:
            return {
                "at": time.monotonic(),
                "type": type(error).__name__,
                "rank": getattr(error, "rank", None),
                "process": getattr(error, "process", None),
                "host": getattr(error, "host", None),
                "message": str(error),
            }


def main(spanning: bool) -> None:
    if spanning:
        shape, names, processes = (2, 2), ("mpmd", "data"), 2
        jax.config.update("jax_num_cpu_devices", 4)
        expected = train(jaxpp.MpmdMesh(shape, names))
    else:
        shape, names, processes = (2,), ("mpmd",), 1
        expected = train(jaxpp.MpmdMesh(shape, names, devices=[jax.devices()[0]] * 2))

    def same(found) -> bool:
        equal = [np.array_equal(found[1][name], expected[1][name]) for name in expected[1]]
        return found[0] == expected[0] and all(equal)

    options = {"cores": 1, "heartbeat_timeout": HEARTBEAT_TIMEOUT, "start_timeout": 90.0}
    options |= {"processes_per_rank": processes, "address": "auto"}
    with jaxpp.RemoteMpmdMesh(shape, names, **options) as mesh:
        workers = mesh.apply_everywhere(where, {0: (), 1: ()})()
        say("trained", same=same(train(mesh)), workers=workers[0] + workers[1])
        for _ in range(1 if spanning else 2):
            print(json.dumps({"what": "training"}), flush=True)
            say("failed", **until_it_fails(mesh))
            try:
                mesh.restart()
            except ValueError as error:
                say("not restarted", message=str(error))
                mesh.restart()
            say("restarted", same=same(train(mesh)))
    say("left")


def where(process) -> dict:
    """Where a rank's process is."""
    listens, _ = process.transport.addresses.tcp
    return {"pid": os.getpid(), "address": ray.util.get_node_ip_address(), "listens": listens}


if __name__ == "__main__":
    main("spanning" in sys.argv)
