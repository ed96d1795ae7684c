"""The updates of stages with equal layers are one computation; what only some have is apart."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpp
from jaxpp.transforms.place import _alike
from tests.helpers import assert_close

STAGES, WIDTH = 4, 6
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2, eps=1e-2))


def loss(params, x):
    x = jnp.tanh(x @ params["embed"])
    for w in params["layers"]:
        x = jnp.tanh(x @ w)
    return jnp.mean((x @ params["head"]) ** 2)


def train_step(grad_fn):
    def step(params, state, x):
        value, grads = grad_fn(params, x)
        updates, state = OPTIMIZER.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    return step


def arguments():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32)

    layers = [draw(WIDTH, WIDTH) for _ in range(3 * STAGES)]
    params = {"embed": draw(3, WIDTH), "layers": layers, "head": draw(WIDTH, 2)}
    return params, OPTIMIZER.init(params), draw(8, 3)


def placed():
    staged = jaxpp.wrap_forward(jaxpp.split_stages(loss, STAGES, tolerance=0.2))
    grad = jaxpp.microbatch(jax.value_and_grad(staged), 2)
    grad = jaxpp.schedule(grad, jaxpp.schedules.OneFOneB())
    return jaxpp.place(train_step(grad), jaxpp.MpmdMesh((STAGES,)))


def updates_of_each_rank(bundle):
    """The numbers of the computations that each rank runs as updates."""
    runs = [[i for i in p.instructions if hasattr(i, "computation")] for p in bundle.programs]
    return [{i.computation for i in own if i.label == "update"} for own in runs]


def test_updates_of_equal_layers_are_shared_by_all_ranks(monkeypatch):
    args = arguments()
    whole = placed().lower(*args)
    apart = updates_of_each_rank(whole.bundle)
    sizes = [len(c.jaxpr.eqns) for c in whole.bundle.computations]
    largest = collections.Counter(max(own, key=sizes.__getitem__) for own in apart)
    assert max(largest.values()) == 2, "the two ranks in the middle alone are equal"

    monkeypatch.setattr(_alike, "WORTH", 8)
    step = placed()
    lowered = step.lower(*args)
    shared = set.intersection(*updates_of_each_rank(lowered.bundle))
    per_layer = max(sizes[n] for n in apart[1]) // 3
    most = max(len(lowered.bundle.computations[n].jaxpr.eqns) for n in shared)
    assert most >= 3 * per_layer, "the update of three layers is one computation for all ranks"
    assert len(shared) >= 1
    assert lowered.certify().exact

    got, want = args[:2], args[:2]
    plain = jax.jit(train_step(jax.value_and_grad(loss)))
    for n in range(2):
        x = np.random.default_rng(n + 1).normal(size=args[2].shape).astype(np.float32)
        *got, value = step(*got, x)
        *want, wanted = plain(*want, x)
        assert_close(jaxpp.gather((got, value)), (want, wanted))


def test_a_segment_is_divided_where_another_one_is_inside_it(monkeypatch):
    monkeypatch.setattr(_alike, "WORTH", 3)
    letters = "abcabc" + "xyxyabc" + "zz"
    sources = {4: [3], 5: [4], 1: [0], 2: [1], 7: [6], 9: [8], 11: [10], 12: [11]}
    segments = [("p", [0, 1, 2]), ("q", [6, 7, 10, 11, 12]), ("r", [13, 14])]

    def like(numbers):
        return "".join(letters[i] for i in numbers)

    found = _alike.divide(segments, lambda i: sources.get(i, []), like)
    assert found == [
        ("p", [0, 1, 2]), ("q", [10, 11, 12]), ("q", [6, 7]), ("r", [13, 14])
    ]  # fmt: skip
    monkeypatch.setattr(_alike, "WORTH", 4)
    assert _alike.divide(segments, lambda i: sources.get(i, []), like) == segments
