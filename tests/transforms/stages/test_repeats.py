"""Blocks of equations that repeat are layers, whether or not the code says so."""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp
from jaxpp import jaxprs
from jaxpp.transforms.stages import _units
from tests.helpers import assert_close

WIDTH = 8
X = np.random.default_rng(0).normal(size=(4, 3, WIDTH)).astype(np.float32)


def norm(scale, x):
    x = x - x.mean(-1, keepdims=True)
    return scale * x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5)


def block(p, x):
    scores = jax.nn.softmax((norm(p["norm"], x) @ p["q"]) @ x.swapaxes(-1, -2))
    x = x + scores @ x @ p["v"]
    return x + jax.nn.gelu(norm(p["norm2"], x) @ p["up"]) @ p["down"]


def draw(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def init(layers: int, classes: int = 2) -> Any:
    def layer():
        square = {name: draw(WIDTH, WIDTH) for name in ("q", "v")}
        norms = {name: draw(WIDTH) for name in ("norm", "norm2")}
        return {**square, **norms, "up": draw(WIDTH, 4 * WIDTH), "down": draw(4 * WIDTH, WIDTH)}

    layers_ = [layer() for _ in range(layers)]
    return {"embed": draw(WIDTH, WIDTH), "layers": layers_, "head": draw(WIDTH, classes)}


def loss(params, x):
    x = x @ params["embed"]
    for p in params["layers"]:
        x = block(p, x)
    return jnp.mean((x @ params["head"]) ** 2)


class Facts(NamedTuple):
    """A line of `stages_as_text`."""

    layers: list[str]
    flops: int
    shared_bytes: int
    received_bytes: int
    equal_to: int | None


def facts(fun, *args):
    """Reads the table of the stages."""
    names, *lines = jaxpp.stages_as_text(fun, *args).splitlines()
    found = []
    for line in lines:
        layers, rest = line[names.index("layers") :].split("  ", 1)
        flops, _, _, shared, received, _, *like = rest.split(maxsplit=6)
        counts = (int(n.replace(",", "")) for n in (flops, shared, received))
        equal_to = int(like[0].removeprefix("stage ")) if like else None
        found.append(Facts(layers.split(", "), *counts, equal_to))
    return found


@pytest.mark.more
@pytest.mark.parametrize(("layers", "stages"), [(8, 4), (12, 3)])
def test_equal_layers_of_plain_code_are_cut_at_their_borders(layers, stages):
    split, params = jaxpp.split_stages(loss, stages), init(layers)
    found = facts(split, params, X)
    each = layers // stages
    for k, own in enumerate(found):
        assert f"layers.{k * each}-{(k + 1) * each - 1}" in own.layers
        assert own.received_bytes == (X.nbytes if k else 0)
    assert [own.equal_to for own in found[1:-1]] == [None] + [1] * (stages - 3)
    got, want = (jax.jit(jax.grad(f))(params, X) for f in (split, loss))
    assert_close(got, want)


def test_a_border_is_left_where_the_slowest_stage_gains_more_than_the_tolerance():
    params = init(8, classes=20 * WIDTH)  # a head of about a layer
    found = facts(jaxpp.split_stages(loss, 4), params, X)
    fair = sum(own.flops for own in found) / 4
    assert max(own.flops for own in found) <= 1.05 * 1.02 * fair
    loose = facts(jaxpp.split_stages(loss, 4, tolerance=0.5), params, X)
    read = [name for own in loose for name in own.layers]
    assert len(read) == len(set(read)), "no layer is on two stages"
    with pytest.raises(ValueError, match="tolerance is a share"):
        jaxpp.split_stages(loss, 4, tolerance=1.5)


def test_layers_are_counted_without_names():
    found = facts(jaxpp.split_stages(loss, 4, balance="layers"), init(6), X)
    assert [own.layers for own in found] == [
        ["embed", "layers.0"], ["layers.1"], ["layers.2-3"], ["head", "layers.4-5"]
    ]  # fmt: skip


def repeats(letters: str, crossing=None):
    """The first and last equation of each block of a program of letters."""
    likes = np.array([ord(c) for c in letters])
    before = np.arange(len(letters) + 1.0)
    own = _units.Repeats(likes, before, crossing or [0.0] * (len(letters) + 1))
    return [letters[u.first : u.last + 1] for u in own.blocks()]


@pytest.mark.parametrize(
    ("letters", "blocks"),
    [
        ("eabcabcabch", ["abc"] * 3),
        ("aabbaabbaabb", ["aabb"] * 3),
        ("eababxycdecdecdeh", ["ab", "ab", "cde", "cde", "cde"]),
        ("abcdefgh", []),
    ],
)
def test_repeated_blocks_of_a_program(letters, blocks):
    assert repeats(letters) == blocks


def test_blocks_begin_where_the_fewest_bytes_cross():
    letters = "c" + "abc" * 4 + "a"
    crossing = [9.0 if c != "b" else 1.0 for c in letters] + [0.0]
    assert repeats(letters, crossing) == ["bca"] * 4


def test_a_model_that_is_called_twice_on_two_stages_is_a_warning_with_its_bytes():
    params = init(4)

    def twice(params, x):
        return loss(params, x) + loss(params, 2 * x)

    products = {k: v for k, v in params.items() if k != "layers"}
    products["layers"] = [{k: v for k, v in p.items() if v.ndim > 1} for p in params["layers"]]
    count = sum(leaf.nbytes for leaf in jax.tree.leaves(products))
    with pytest.warns(UserWarning, match=rf"layers.0-3.* takes {count:,} bytes more"):
        found = facts(jaxpp.split_stages(twice, 2), params, X)
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert [own.shared_bytes for own in found] == [whole, whole]


def test_tied_embeddings_are_no_warning(recwarn):
    params = {"table": draw(16, WIDTH), "layers": init(4)["layers"]}

    def tied(params, tokens):
        x = params["table"][tokens]
        for p in params["layers"]:
            x = block(p, x)
        return jnp.mean((x @ params["table"].T) ** 2)

    tokens = np.arange(6).reshape(2, 3)
    found = facts(jaxpp.split_stages(tied, 2), params, tokens)
    assert [own.shared_bytes for own in found] == [params["table"].nbytes] * 2
    assert not [w for w in recwarn if "multiply by the same" in str(w.message)]


def test_the_table_has_a_line_for_each_stage():
    lines = jaxpp.stages_as_text(jaxpp.split_stages(loss, 4), init(8), X).splitlines()
    assert [line.split()[0] for line in lines] == ["stage", "0", "1", "2", "3"]
    assert lines[3].endswith("stage 1")


@pytest.mark.more
def test_equal_stages_are_differentiated_as_one():
    split = jaxpp.wrap_forward(jaxpp.split_stages(loss, 4))
    params = init(8)
    jaxpr = jaxprs.trace(jax.grad(split), (params, X)).jaxpr
    calls = [e for e in jaxpr.eqns if str(e.params.get("name", "")).startswith("pipeline_stage_")]
    names = [e.params["name"] for e in calls]
    assert sorted(names) == sorted(f"pipeline_stage_{k}_of_4" for k in range(4) for _ in "fb")
    bodies = {
        name: [e.params["jaxpr"] for e in calls if e.params["name"] == name] for name in names
    }
    for ours, others in itertools.combinations(sorted(bodies), 2):
        same = [a is b for a, b in zip(bodies[ours], bodies[others], strict=True)]
        assert same == [(ours[15], others[15]) == ("1", "2")] * 2
    assert_close(jax.jit(jax.grad(split))(params, X), jax.jit(jax.grad(loss))(params, X))
