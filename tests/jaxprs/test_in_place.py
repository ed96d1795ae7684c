"""What a function changes in its arguments in place comes back, or there is an error."""

import functools
import warnings

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpp
from tests.transforms import two_layers
from tests.transforms.two_layers import MICROBATCHES, WEIGHTS, X

nnx = pytest.importorskip("flax.nnx")


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs, momentum=0.9)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(6, 4, rngs=rngs)
        self.eval()

    def __call__(self, x):
        h = self.drop(self.norm(jnp.tanh(self.first(x))))
        return self.last(jaxpp.pipeline_enter_stage(h))


def loss_of(net, x):
    return jnp.mean((net(x) - x) ** 2)


def scheduled(loss=loss_of):
    loop = jaxpp.microbatch(nnx.value_and_grad(jaxpp.wrap_forward(loss)), MICROBATCHES)
    return jaxpp.schedule(loop, jaxpp.schedules.OneFOneB())


def make():
    net = Net(nnx.Rngs(0))
    return net, nnx.Optimizer(net, optax.adam(1e-2), wrt=nnx.Param)


# ---- objects that their users expect to change --------------------------------------------------


def descend(grad_fn, net, optimizer, x):
    value, grads = grad_fn(net, x)
    nnx.update(net, jax.tree.map(lambda w, g: w - 0.1 * g, nnx.state(net, nnx.Param), grads))
    return value


def optimize(grad_fn, net, optimizer, x):
    value, grads = grad_fn(net, x)
    optimizer.update(net, grads)
    return value


def optimize_and_look(grad_fn, net, optimizer, x):
    """What is lost has been read."""
    _, grads = grad_fn(net, x)
    optimizer.update(net, grads)
    return loss_of(net, x)


def count(grad_fn, net, optimizer, x):
    optimizer.step[...] += 1
    return grad_fn(net, x)[0]


def note(grad_fn, net, optimizer, x):
    """A variable that was not there before."""
    net.seen = nnx.Cache(jnp.mean(x, axis=0))
    return grad_fn(net, x)[0]


@pytest.mark.parametrize(
    ("step", "path"),
    [
        (optimize, "[0].first.bias"),
        (descend, "[0].first.bias"),
        (optimize_and_look, "[0].first.bias"),
        (count, "[1].step"),
        (note, "[0].seen"),
    ],
)
def test_a_change_of_an_nnx_object_in_a_placed_step(step, path):
    placed = two_layers.place(functools.wraps(step)(functools.partial(step, scheduled())))
    with pytest.raises(ValueError, match=r"nnx.split.*nnx.merge\(graphdef, state\)") as caught:
        placed(*make(), X)
    assert f"{step.__name__} changes args{path}.value at {__file__}:" in str(caught.value)


@pytest.mark.parametrize("layer", ["norm", "drop"])
@pytest.mark.parametrize(
    "transform",
    [
        jaxpp.wrap_forward,
        jaxpp.split_stages,
        lambda f: jaxpp.microbatch(f, 2),
        lambda f: jaxpp.microbatch(nnx.value_and_grad(f), 2),
        jaxpp.place,
    ],
    ids=["wrap_forward", "split_stages", "microbatch", "gradient", "place"],
)
def test_statistics_and_counts_of_keys_in_each_transform(transform, layer):
    """Under `nnx.jit`, too: the transform in between would lose them."""
    net, _ = make()
    getattr(net, layer).train()
    inner = {"norm": "norm.mean", "drop": "drop.rngs.count"}[layer]
    with pytest.raises(ValueError, match=rf"changes args\[0\].{inner}.value.* in place.*split"):
        transformed = transform(loss_of)
        (transformed if transform is jaxpp.place else nnx.jit(transformed))(net, X)


def test_the_way_out_is_as_the_plain_step():
    net, optimizer = make()
    graphdef, state = nnx.split(make())

    def step(state, x):
        net, optimizer = nnx.merge(graphdef, state)
        value = optimize(scheduled(), net, optimizer, x)
        return nnx.state((net, optimizer)), value

    placed = two_layers.place(step, donate_argnums=0)
    plain = nnx.jit(functools.partial(optimize, nnx.value_and_grad(loss_of)))
    for n in range(3):
        x = X * (n + 1)
        state, value = placed(state, x)
        chex.assert_trees_all_close(value, plain(net, optimizer, x), rtol=1e-4)
    nnx.update((other := make()), state)
    # Adam's first steps round as the signs of small gradients do.
    got, want = (nnx.to_pure_dict(nnx.state(n, nnx.Param)) for n in (other[0], net))
    chex.assert_trees_all_close(got, want, atol=1e-3)


@pytest.mark.more
def test_under_nnx_jit_a_placed_step_is_the_plain_one_and_changes_its_objects():
    (net, optimizer), (other, its_own) = make(), make()
    placed = two_layers.place(functools.partial(optimize, scheduled()))
    got = [nnx.jit(placed)(net, optimizer, X) for _ in range(2)]
    want = [optimize(nnx.value_and_grad(loss_of), other, its_own, X) for _ in range(2)]
    chex.assert_trees_all_close(got, want, rtol=1e-4)
    assert got[1] != got[0]


class Tied(nnx.Module):
    def __init__(self):
        self.first = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.last = self.first

    def __call__(self, x):
        return self.last(jaxpp.pipeline_enter_stage(jnp.tanh(self.first(x))))


@pytest.mark.more
@pytest.mark.parametrize("transform", ["place", "microbatch"])
def test_a_layer_that_is_at_two_places_is_warned_of(transform):
    place = two_layers.place if transform == "place" else nnx.jit
    with pytest.warns(UserWarning, match=r"args\[0\].first.bias.* args\[0\].last.bias .*nnx.split"):
        place(lambda net, x: scheduled()(net, x))(Tied(), X)
    graph, state = nnx.split(Tied())
    staged = jaxpp.wrap_forward(lambda state, x: loss_of(nnx.merge(graph, state), x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop = jaxpp.schedule(
            jaxpp.microbatch(jax.value_and_grad(staged), 2), jaxpp.schedules.OneFOneB()
        )
        got = place(loop)(state, X)
    want = nnx.value_and_grad(loss_of)(Tied(), X)
    chex.assert_trees_all_close(*map(jax.tree.leaves, (got, want)), rtol=1e-4)


def test_a_module_that_is_closed_over_is_not_changed():
    """An error of NNX itself says so."""
    net, _ = make()
    net.norm.train()
    with pytest.raises(nnx.errors.TraceContextError if hasattr(nnx, "errors") else Exception) as e:
        two_layers.place(lambda x: loss_of(net, x), donate_argnums=())(X)
    assert "Cannot mutate BatchStat" in str(e.value)


# ---- other containers ---------------------------------------------------------------------------


@jax.tree_util.register_pytree_with_keys_class
class Counter:
    def __init__(self, n):
        self.n = n

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("n"), self.n)], None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def in_a_list(weights, x, state):
    value, grads = two_layers.scheduled()(weights, x)
    for n, g in enumerate(grads):
        weights[n] = weights[n] - 0.1 * g
    return value


def in_a_dictionary(weights, x, state):
    value, grads = two_layers.scheduled()(weights, x)
    state["mean"] = 0.9 * state["mean"] + 0.1 * value
    return value, grads


def in_an_object(weights, x, state):
    state["counter"].n += 1
    return two_layers.scheduled()(weights, x)


STATE = {"mean": jnp.zeros(()), "counter": Counter(jnp.zeros((), jnp.int32)), "rows": [X]}


@pytest.mark.parametrize("by", ["position", "keyword"])
@pytest.mark.parametrize(
    ("step", "path"),
    [
        (in_a_list, r"args\[0\]\[0\] at .* and 1 other"),
        (in_a_dictionary, r"args\[2\]\['mean'\] at"),
        (in_an_object, r"args\[2\]\['counter'\].n at"),
    ],
)
def test_a_change_of_a_container(step, path, by):
    named = {"state": STATE} if by == "keyword" else {}
    given = () if named else (STATE,)
    with pytest.raises(ValueError, match=rf"{step.__name__} changes {path}.* copy of the argum"):
        two_layers.place(step)(WEIGHTS, X, *given, **named)


def test_what_is_read_or_returned_or_only_moved_is_no_error():
    def loss(weights, batch):
        weights[0], weights[1] = weights[0] * 1.0, weights[1] * 1.0
        batch["x"] = batch["x"] / 2  # read later
        batch["unused"] = batch["x"] + 1  # a new entry
        rows = batch.pop("rows")
        rows.reverse()
        return two_layers.loss(weights, batch["x"] + rows[0] - rows[1])

    def step(weights, batch, counter):
        counter.n = counter.n + 1
        value, grads = two_layers.scheduled(loss)(weights, batch)
        for n, g in enumerate(grads):
            weights[n] = weights[n] - 0.1 * g
        return weights, counter, value

    def make_batch():
        return {"x": X, "rows": [X, 3 * X]}

    counter = Counter(jnp.zeros((), jnp.int32))
    weights, counter, value = two_layers.place(step)(list(WEIGHTS), make_batch(), counter)
    want, grads = jax.value_and_grad(two_layers.loss)(WEIGHTS, 2.5 * X)
    chex.assert_trees_all_close(value, want, rtol=1e-5)
    chex.assert_trees_all_close(
        weights, [w - 0.1 * g for w, g in zip(WEIGHTS, grads, strict=True)], rtol=1e-4, atol=1e-6
    )
    assert int(counter.n) == 1


def test_calls_that_hand_a_model_through_are_no_change():
    """`nnx.jit` gives all variables of its arguments new values, which are the old ones."""
    net, _ = make()
    jitted = nnx.jit(loss_of)
    placed = two_layers.place(lambda net, x: (jitted(net, x), scheduled()(net, x)[0]))
    chex.assert_trees_all_close(placed(net, X), (loss_of(net, X),) * 2, rtol=1e-4)


def test_a_state_of_equinox_is_written_and_returned():
    norm, state = eqx.nn.make_with_state(eqx.nn.StateIndex)(jnp.zeros(()))

    def step(weights, x, state):
        value, grads = two_layers.scheduled()(weights, x)
        return value, grads, state.set(norm, state.get(norm) + value)

    value, _, state = two_layers.place(step)(WEIGHTS, X, state)
    chex.assert_trees_all_close(state.get(norm), value)
