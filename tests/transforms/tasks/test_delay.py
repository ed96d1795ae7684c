"""A delayed step is the plain loop that takes gradients of old weights, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp

WIDTH, ROWS = 8, 16
ADAMW = optax.adamw(1e-2)
#: Its update waits for the gradients of all ranks.
CLIPPED = optax.chain(optax.clip_by_global_norm(1e-2), ADAMW)


def loss_fn(weights, x):
    first, second = (w.astype(jnp.float32) for w in weights)
    h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ first))
    return jnp.mean((h @ second) ** 2)


def start():
    keys = jax.random.split(jax.random.key(0), 2)
    return [jax.random.normal(key, (WIDTH, WIDTH)) / 3 for key in keys]


def batch(n):
    return jax.random.normal(jax.random.key(100 + n), (ROWS, WIDTH))


def grad_fn(order=None):
    grad = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss_fn)), 4)
    return jaxpp.schedule(grad, order) if order else grad


def step_of(grad, optimizer):
    def train_step(weights, state, x):
        loss, grads = grad([2 * (w / 2) for w in weights], x)  # prepared before the loop
        updates, state = optimizer.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state, loss

    return train_step


def by_hand(grad, optimizer, steps):
    """The same with the weights of some steps ago as an argument."""

    def train_step(versions, state, x):
        loss, grads = grad([2 * (w / 2) for w in versions[-1]], x)
        updates, state = optimizer.update(grads, state, versions[0])
        new = optax.apply_updates(versions[0], updates)
        return (new, *versions[:-1]), state, loss

    return train_step


def run(step, steps, count=5, optimizer=ADAMW):
    weights = start()
    versions, state = (weights,) * (steps + 1), optimizer.init(weights)
    losses = []
    for n in range(count):
        versions, state, loss = step(versions, state, batch(n))
        losses.append(loss)
    return jaxpp.gather((versions, state, losses))


ORDERS = [jaxpp.schedules.OneFOneB(), jaxpp.schedules.ZeroBubbleH1()]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("steps", [1, 2])
def test_a_delayed_step_is_the_delayed_loop_to_the_bit(order, steps):
    """On a mesh of two ranks and on one device; it is certified, and differs from no delay."""
    optimizer = optax.adamw(1e-2)
    delayed = jaxpp.delay(step_of(grad_fn(order), optimizer), steps)
    one = jaxpp.MpmdMesh((2,), devices=[jax.devices()[0]] * 2)
    results = [
        run(jaxpp.place(step, mesh), steps)
        for step, mesh in (
            (delayed, jaxpp.MpmdMesh((2,))),
            (delayed, one),
            (by_hand(grad_fn(order), optimizer, steps), one),
        )
    ]
    for other in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, results[0], other)
    args = (start(),) * (steps + 1), optimizer.init(start()), batch(0)
    jaxpp.certify(jaxpp.place(delayed, jaxpp.MpmdMesh((2,))), *args)
    plain = run(jaxpp.place(jaxpp.delay(step_of(grad_fn(order), optimizer), 0), one), 0)
    assert np.any(np.asarray(plain[2]) != np.asarray(results[0][2]))


def in_one(step):
    """Several steps as one function, which takes the batches of all."""

    def steps(versions, state, batches):
        losses = []
        for x in batches:
            versions, state, loss = step(versions, state, x)
            losses.append(loss)
        return versions, state, losses

    return steps


def run_in_one(step, mesh, count=5, optimizer=ADAMW):
    weights = start()
    batches = [batch(n) for n in range(count)]
    placed = jaxpp.place(in_one(step), mesh)
    return jaxpp.gather(placed((weights,) * 2, optimizer.init(weights), batches))


@pytest.mark.parametrize("optimizer", [ADAMW, CLIPPED])
@pytest.mark.parametrize("order", ORDERS)
def test_steps_in_one_program_are_the_same_steps_to_the_bit(order, optimizer):
    """On a mesh of two ranks and on one device, as several calls of one step; it is certified."""
    delayed = jaxpp.delay(step_of(grad_fn(order), optimizer))
    one = jaxpp.MpmdMesh((2,), devices=[jax.devices()[0]] * 2)
    expected = run(jaxpp.place(delayed, one), 1, optimizer=optimizer)
    for mesh in (jaxpp.MpmdMesh((2,)), one):
        found = run_in_one(delayed, mesh, optimizer=optimizer)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    args = (start(),) * 2, optimizer.init(start()), [batch(n) for n in range(3)]
    jaxpp.certify(jaxpp.place(in_one(delayed), jaxpp.MpmdMesh((2,))), *args)


def test_a_plain_function_is_delayed_before_anything_is_scheduled():
    optimizer = optax.adamw(1e-2)
    found = run(jax.jit(jaxpp.delay(step_of(grad_fn(), optimizer))), 1)
    expected = run(jax.jit(by_hand(grad_fn(), optimizer, 1)), 1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)


def test_what_cannot_be_delayed_says_why():
    step = step_of(grad_fn(), optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"takes a tuple of 2 versions .* begin with \(weights,\)"):
        jaxpp.delay(step)((start(),), (), batch(0))
    with pytest.raises(ValueError, match="integer of at least 0, got -1"):
        jaxpp.delay(step, -1)
    with pytest.raises(ValueError, match="integer of at least 0, got 1.5"):
        jaxpp.delay(step, 1.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="takes a function, got 3"):
        jaxpp.delay(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="no loop of microbatches.*loss in jaxpp.wrap_forward"):
        jaxpp.delay(lambda w, x: w - x)((1.0 * jnp.ones(2),) * 2, jnp.ones(2))
    with pytest.raises(
        ValueError, match="step's first result, which .* has another structure.* returns the"
    ):
        state = optax.sgd(0.1).init(start())
        jaxpp.delay(lambda *args: step(*args)[::-1])((start(),) * 2, state, batch(0))


@pytest.mark.parametrize(
    ("old", "message"),
    [
        ([1.0, 3.0], "constant 2.0 in the newest version, and the constant 3.0 in version 1"),
        ([jnp.ones(2), 2.0], r"\[0\] is the constant 1.0 .* float32\[2\]"),
        ((1.0, 2.0), "version 1 of the weights has another structure"),
    ],
)
def test_versions_differ_in_values_of_arrays_alone(old, message):
    """Outside of jit and place a number is static, and its old value would be lost."""
    with pytest.raises(ValueError, match=message):
        jaxpp.delay(step_of(grad_fn(), optax.sgd(0.1)))(([1.0, 2.0], old), (), batch(0))


def test_versions_may_be_of_numpy():
    """A float64 of NumPy is a float32 of JAX, as the results of the step are."""
    step = jaxpp.delay(step_of(grad_fn(), optax.sgd(0.1)))
    old = [np.asarray(w, np.float64) for w in start()]
    jax.tree.map(
        np.testing.assert_array_equal,
        step((start(), old), optax.sgd(0.1).init(start()), batch(0)),
        step((start(),) * 2, optax.sgd(0.1).init(start()), batch(0)),
    )
