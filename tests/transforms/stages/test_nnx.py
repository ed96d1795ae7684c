"""Cuts of models of Flax NNX at the paths of their modules."""

import chex
import jax
import jax.numpy as jnp
import pytest

import jaxpp

nnx = pytest.importorskip("flax.nnx")


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Linear(8, 8, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(5)])
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.encode(self.embed(x)))

    def encode(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


MODEL = Net(nnx.Rngs(0))
GRAPH, STATE = nnx.split(MODEL)
X = jax.random.normal(jax.random.key(1), (4, 8))


def of_a_state(state, x):
    return jnp.mean(nnx.merge(GRAPH, state)(x) ** 2)


def of_a_module(model, x):
    return jnp.mean(model(x) ** 2)


def of_a_cast_state(state, x):
    half = jax.tree.map(lambda a: a.astype(jnp.float16), state)
    return jnp.mean(nnx.merge(GRAPH, half)(x.astype(jnp.float16)) ** 2).astype(jnp.float32)


def of_another_method(state, x):
    """Each layer is called for itself: where it is in the model, its parameters tell."""
    return jnp.mean(nnx.merge(GRAPH, state).encode(x) ** 2)


def of_a_part_of_the_argument(variables, x):
    return of_a_state(variables["params"], x)


def under_a_checkpoint(state, x):
    return jax.checkpoint(of_a_state)(state, x)


FUNCTIONS = [
    (of_a_state, STATE),
    (of_a_module, MODEL),
    (of_a_cast_state, STATE),
    (of_another_method, STATE),
    (of_a_part_of_the_argument, {"params": STATE}),
    (under_a_checkpoint, STATE),
]
BY_NAME = pytest.mark.parametrize(
    ("fun", "model"), FUNCTIONS, ids=lambda f: getattr(f, "__name__", "")
)


@BY_NAME
@pytest.mark.parametrize("at", [["layers.2", "layers.4"], ["layers[2]", "layers/4"]], ids=str)
def test_a_path_of_a_module_opens_a_stage(fun, model, at, arguments_of):
    split = jaxpp.split_stages(fun, at=at)
    ends = 0 if fun is of_another_method else 2
    assert [len(shapes) for shapes in arguments_of(split, model, X)] == [9 + ends, 8, 4 + ends]
    got = jax.jit(jax.value_and_grad(split))(model, X)
    want = jax.jit(jax.value_and_grad(fun))(model, X)
    tolerance = 1e-2 if fun is of_a_cast_state else 1e-5
    chex.assert_trees_all_close(got, want, rtol=tolerance, atol=tolerance / 10)


@BY_NAME
def test_layers_are_whole_by_default(fun, model, arguments_of):
    for split in (jaxpp.split_stages(fun, 3), jaxpp.split_stages(fun, 3, whole=Block)):
        found = arguments_of(split, model, X)
        layers = [shapes.count((8, 16)) for shapes in found]
        assert [shapes.count((16, 8)) for shapes in found] == layers
        assert sorted(layers) == [1, 2, 2]


def test_a_module_inside_a_module_has_a_path_too(primitives_of):
    split = jaxpp.split_stages(of_a_state, at=["layers.2.down"])
    assert [n.count("dot_general") for n in primitives_of(split, STATE, X)] == [6, 6]


def test_an_unknown_path_is_an_error_that_names_the_nearest():
    with pytest.raises(ValueError, match=r"'layer.2'\) .*the nearest is 'layers.2'"):
        jaxpp.split_stages(of_a_state, at=["layer.2"])(STATE, X)


def test_the_classes_are_as_before_after_tracing():
    before = {cls: dict(vars(cls)) for cls in (Block, Net, nnx.Linear, nnx.Module)}
    jaxpp.split_stages(of_a_state, at=["layers.2"])(STATE, X)
    assert before == {cls: dict(vars(cls)) for cls in before}


def test_the_gradient_by_nnx_of_a_cut_model():
    split = jaxpp.wrap_forward(jaxpp.split_stages(of_a_module, at=["layers.3"]))
    got, want = (nnx.value_and_grad(f)(MODEL, X) for f in (split, of_a_module))
    chex.assert_trees_all_close(nnx.to_pure_dict(got[1]), nnx.to_pure_dict(want[1]), atol=1e-4)
