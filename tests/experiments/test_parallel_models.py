"""The rules of tensor and expert parallelism find the parameters that they are for."""

import dataclasses
import functools
import re

import equinox as eqx
import jax
import optax
import pytest

from experiments.models import gpt, gpt2, llama, mixtral, parallel
from jaxpp.transforms.inside import specs_of_leaves

SIZES = {"data": 4, "model": 8, "expert": 8}
PUBLISHED = {
    "gpt2_124m": (gpt2.GPT2, gpt2.CONFIGS["gpt2_124m"]),
    "llama2_70b": (llama.Llama, llama.CONFIGS["llama2_70b"]),
    "mixtral_8x7b": (mixtral.Mixtral, mixtral.CONFIGS["mixtral_8x7b"]),
}


@functools.cache
def shapes(name, **options):
    """The parameters of the first layers, of the sizes that were published."""
    make, config = PUBLISHED[name]
    config = dataclasses.replace(config, layers=2)
    model = eqx.filter_eval_shape(make, config, **options, key=jax.random.key(0))
    return eqx.filter(model, lambda leaf: hasattr(leaf, "shape"))


def specs(tree, **options):
    """The spec of each leaf by its path; `()` where it is whole."""
    rules = parallel.rules("model", **options)
    found = specs_of_leaves(rules, tree, SIZES, "rules")
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): spec or ()
        for (path, _), spec in zip(jax.tree_util.tree_leaves_with_path(tree), found, strict=True)
    }


def of_block(found, end):
    """The spec of the leaf of the first block whose path ends so."""
    (spec,) = (s for path, s in found.items() if re.match(rf"blocks\.0\.(.*\.)?{end}$", path))
    return spec


COLUMNS, ROWS = (("model",), ()), ((), ("model",))


@pytest.mark.parametrize("name", PUBLISHED)
def test_of_two_matrices_the_first_is_split_by_columns_and_the_second_by_rows(name):
    found = specs(shapes(name), vocabulary=name != "gpt2_124m")
    if name == "gpt2_124m":
        first, second = [f"{n}_proj" for n in ("query", "key", "value")], ["output_proj"]
        assert of_block(found, "query_proj.bias") == of_block(found, "up.bias") == (("model",),)
        assert of_block(found, "output_proj.bias") == of_block(found, "down.bias") == ()
    else:
        first, second = ["queries", "keys", "values"], ["attention.out"]
    assert {of_block(found, f"{n}.weight") for n in first} == {COLUMNS}
    assert {of_block(found, f"{n}.weight") for n in second} == {ROWS}
    up, down = of_block(found, "up.weight"), of_block(found, "down.weight")
    if name == "mixtral_8x7b":
        assert (up, down) == (((), ("model",), ()), ((), (), ("model",)))
        assert of_block(found, "router.weight") == ()
    else:
        assert (up, down) == (COLUMNS, ROWS)
    assert found["embed.weight"] == (ROWS if name == "gpt2_124m" else COLUMNS)
    assert not any(spec for path, spec in found.items() if "norm" in path or "position" in path)


@pytest.mark.parametrize("name", PUBLISHED)
def test_most_of_a_model_is_split(name):
    model = shapes(name)
    found = specs(model, vocabulary=name != "gpt2_124m").values()
    leaves = list(zip(jax.tree.leaves(model), found, strict=True))
    whole = sum(leaf.size for leaf, spec in leaves if not any(spec))
    assert whole < 0.02 * sum(leaf.size for leaf, _ in leaves)  # GPT-2's positions, in two layers


@pytest.mark.parametrize("name", PUBLISHED)
def test_optimizer_state_is_split_as_its_parameters(name):
    model = shapes(name)
    state = jax.eval_shape(optax.adamw(1e-3).init, model)
    options = dict(vocabulary=name != "gpt2_124m")
    found = specs(state, **options)
    for path, spec in specs(model, **options).items():
        assert found[f"0.mu.{path}"] == found[f"0.nu.{path}"] == spec, path


@pytest.mark.parametrize("name", PUBLISHED)
def test_stacked_layers_are_split_as_layers(name):
    options = dict(vocabulary=name != "gpt2_124m", experts="expert")
    found = specs(shapes(name), **options)
    for path, spec in specs(shapes(name, stacked=True), **options).items():
        layer = found[path.replace("blocks.", "blocks.0.")]
        assert spec == (((), *layer) if layer and "blocks" in path else layer), path


@pytest.mark.parametrize(
    ("axis", "spec"),
    [
        ("expert", (("expert",), ("model",), ())),
        ("data", (("data",), ("model",), ())),
        ("model", (("model",), (), ())),
    ],
)
def test_experts_are_split_over_an_axis_of_choice(axis, spec):
    found = specs(shapes("mixtral_8x7b"), experts=axis)
    assert of_block(found, "experts.up.weight") == spec
    assert of_block(found, "experts.down.weight") == (spec[0], spec[2], spec[1])
    assert of_block(found, "queries.weight") == COLUMNS


def test_each_rule_is_for_some_parameter():
    models = [shapes(n, stacked=stacked) for n in PUBLISHED for stacked in (False, True)]
    sizes = dict(layers=1, width=8, heads=2, context=4)
    byte_level = eqx.filter_eval_shape(gpt.GPT, **sizes, key=jax.random.key(0))
    paths = [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for tree in [*models, eqx.filter(byte_level, lambda leaf: hasattr(leaf, "shape"))]
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]
    for pattern, _ in parallel.rules():
        assert any(re.search(pattern, path) for path in paths), pattern
