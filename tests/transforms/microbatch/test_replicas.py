"""`microbatch` with replicas: D loops over slices of their own, combined once, in order."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp

REPLICAS, MICROBATCHES, SIZE = 2, 3, 4
SLICES = REPLICAS * MICROBATCHES
X = np.arange(SLICES * SIZE, dtype=np.float32) - 7
KEYS = jax.random.split(jax.random.key(0), SLICES)


class Product:
    """An operator of a user's."""

    def init(self, x):
        return jnp.ones(x.shape, x.dtype)

    def combine(self, acc, x):
        return acc * x

    def finish(self, acc, num_microbatches):
        return acc / num_microbatches


class Merged(Product):
    def merge(self, acc, other):
        return acc - other


def outputs(x, key, count, state):
    number = jax.random.key_data(key[0])[-1]
    results = {
        "mean": jnp.sum(x),
        "sum": jnp.sum(x),
        "max": jnp.max(x),
        "last": x[0],
        "stack": (x[1], number),
        "concat": x,
        "product": x[0] % 5 + 1,
    }
    return results, count + 1, state + x[0]


REDUCE = {k: Merged() if k == "product" else k for k in outputs(X[:4], KEYS, 0, 0.0)[0]}


def test_replicas_loop_over_their_own_slices_and_are_combined_in_order():
    """All numbers are integers, so that any order of the right sums has the same bits."""
    run = jaxpp.microbatch(
        outputs,
        MICROBATCHES,
        in_axes=(0, 0, "carry", "carry"),
        reduce=(REDUCE, "carry", "carry"),
        replicas=REPLICAS,
        merge=(None, "sum", lambda rows: rows[0] - 10 * rows[1]),
    )
    got, count, state = jax.jit(run)(X, KEYS, jnp.int32(5), jnp.float32(1))
    slices = X.reshape(REPLICAS, MICROBATCHES, SIZE)
    products = np.prod(slices[..., 0] % 5 + 1, axis=1)
    want = {
        "mean": X.sum() / SLICES,
        "sum": X.sum(),
        "max": X.max(),
        "last": slices[-1, -1, 0],
        "stack": (slices[..., 1].reshape(-1), jax.random.key_data(KEYS)[:, -1]),
        "concat": X,
        "product": np.float32((products[0] - products[1]) / SLICES),
    }
    chex.assert_trees_all_equal(got, jax.tree.map(jnp.asarray, want))
    chains = 1 + slices[..., 0].sum(axis=1)
    assert (int(count), float(state)) == (2 * (5 + MICROBATCHES), chains[0] - 10 * chains[1])
    plain = jaxpp.microbatch(jnp.sum, SLICES, in_axes=0, reduce="stack")
    apart = jaxpp.microbatch(jnp.sum, MICROBATCHES, in_axes=0, reduce="stack", replicas=REPLICAS)
    chex.assert_trees_all_equal(plain(X), apart(X))


def loss(w, x):
    h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w))
    return jnp.mean((h @ w) ** 2)


def data():
    w, x = jax.random.key(1), jax.random.key(2)
    return jax.random.normal(w, (3, 3)), jax.random.normal(x, (SLICES * 2, 3))


def test_gradients_of_and_in_the_loop_are_the_same():
    w, x = data()
    inside = jaxpp.microbatch(jax.value_and_grad(loss), MICROBATCHES, replicas=REPLICAS)
    of = jax.value_and_grad(jaxpp.microbatch(loss, MICROBATCHES, replicas=REPLICAS))
    want = jax.jit(inside)(w, x)
    chex.assert_trees_all_equal(jax.jit(of)(w, x), want)
    chex.assert_trees_all_close(jax.value_and_grad(loss)(w, x), want, rtol=2e-5)
    batch = jnp.stack([x, 2 * x])
    each = jax.vmap(inside, (None, 0))(w, batch)
    rows = [inside(w, own) for own in batch]
    chex.assert_trees_all_close(each, jax.tree.map(lambda *r: jnp.stack(r), *rows), rtol=2e-5)


@pytest.mark.parametrize("reduce", ["concat", "max", "last", "stack", Merged()])
def test_a_loss_over_the_whole_batch_is_differentiated(reduce):
    w, x = data()
    values = {"concat": lambda w, x: jnp.tanh(x @ w)}
    one = values.get(reduce if isinstance(reduce, str) else "", lambda w, x: 1 + loss(w, x))

    def by_replicas(w):
        run = jaxpp.microbatch(one, MICROBATCHES, reduce=reduce, replicas=REPLICAS)
        return jnp.sum(run(w, x) ** 3)

    def by_hand(w):
        each = [one(w, own) for own in x.reshape(SLICES, 2, 3)]
        first, second = each[:MICROBATCHES], each[MICROBATCHES:]
        if isinstance(reduce, Merged):
            result = (jnp.prod(jnp.stack(first)) - jnp.prod(jnp.stack(second))) / SLICES
        else:
            join = {"max": jnp.max, "last": lambda s: s[-1], "stack": lambda s: s}
            join["concat"] = jnp.concatenate
            result = join[reduce](jnp.stack(each) if reduce != "concat" else each)
        return jnp.sum(result**3)

    chex.assert_trees_all_close(jax.grad(by_replicas)(w), jax.grad(by_hand)(w), rtol=2e-5)


def test_stages_and_a_schedule_keep_the_values():
    w, x = data()
    staged = jaxpp.wrap_forward(loss)
    plain = jax.jit(jaxpp.microbatch(jax.value_and_grad(loss), MICROBATCHES, replicas=REPLICAS))
    for make in (
        lambda: jaxpp.microbatch(jax.value_and_grad(staged), MICROBATCHES, replicas=REPLICAS),
        lambda: jax.value_and_grad(jaxpp.microbatch(staged, MICROBATCHES, replicas=REPLICAS)),
    ):
        own = jaxpp.schedule(make(), jaxpp.schedules.OneFOneB())
        chex.assert_trees_all_close(jax.jit(own)(w, x), plain(w, x), rtol=2e-5)
        each = jax.jit(jax.vmap(own, (None, 0)))(w, jnp.stack([x, x]))
        chex.assert_trees_all_close(each[1][1], plain(w, x)[1], rtol=2e-5)


def test_statistics_and_masked_means_are_those_of_a_replica():
    """As in `jax.pmap`: what looks like a mean of the batch is one of each slice."""
    x = jnp.asarray([1.0, 0.0, 5.0, 3.0])

    def masked(x):
        return jnp.sum(x) / jnp.sum(x > 0)

    assert float(masked(x)) == 3.0
    apart = jaxpp.microbatch(masked, 1, in_axes=0, replicas=2)
    assert float(apart(x)) == 2.5
    both = jaxpp.microbatch(
        lambda x: (jnp.sum(x), jnp.sum(x > 0)), 1, in_axes=0, reduce="sum", replicas=2
    )
    total, count = both(x)
    assert float(total / count) == 3.0


def carried(count, x):
    return jnp.sum(x), count


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: jaxpp.microbatch(loss, 4, replicas=0), "replicas must be an int and at least 1"),
        (lambda: jaxpp.microbatch(loss, 4, replicas=2.0), "must be an int"),  # pyright: ignore
        (lambda: jaxpp.microbatch(loss, 4, merge="sum"), "give replicas, or leave it out"),
        (
            lambda: jaxpp.microbatch(loss, 4, replicas=5)(*data()),
            r"12 examples, which 20 slices \(4 microbatches on each of 5 replicas\) do not divide",
        ),
        (
            lambda: jaxpp.microbatch(jnp.prod, 3, in_axes=0, reduce=Product(), replicas=2)(X),
            r"without merge\(acc, other\)",
        ),
        (
            lambda: jaxpp.microbatch(
                carried, 3, in_axes=("carry", 0), reduce=("sum", "carry"), replicas=2
            )(jnp.int32(0), X),
            r"int32\[\]\) is carried, .* merge= one of 'sum', 'max', 'last'",
        ),
        (
            lambda: jaxpp.microbatch(
                carried,
                3,
                in_axes=("carry", 0),
                reduce=("sum", "carry"),
                replicas=2,
                merge=(None, "first"),
            )(jnp.float32(0), X),
            "has no merge 'first'",
        ),
    ],
)
def test_what_is_not_known_is_an_error(run, message):
    with pytest.raises(ValueError, match=message):
        run()


@pytest.mark.more
def test_what_is_carried_is_differentiated_in_the_loop():
    """A schedule cannot tell the gradients of replicas apart that JAX adds up as one."""

    def recurrent(state, w, x):
        h = jnp.tanh(x @ w + state)
        return jnp.mean((jaxpp.pipeline_enter_stage(h) @ w) ** 2), jnp.mean(h, 0)

    w, x = data()
    staged = jaxpp.microbatch(
        jaxpp.wrap_forward(recurrent),
        MICROBATCHES,
        in_axes=("carry", None, 0),
        reduce=("mean", "carry"),
        replicas=REPLICAS,
    )
    of = jax.grad(lambda w: staged(jnp.zeros(3), w, x)[0])
    assert of(w).shape == (3, 3)
    with pytest.raises(ValueError, match="Differentiate first"):
        jaxpp.schedule(of, jaxpp.schedules.OneFOneB())(w)
