"""How layers and models are split before anything is compiled, against what XLA makes of them."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from experiments.models import gpt, gpt2, llama, mixtral, resnet
from jaxpp._specs import axes_of, replicated, spec_of
from jaxpp.transforms.inside import _shardy
from tests.transforms.xla import (
    SIZES,
    array,
    chosen,
    compiled,
    count,
    make_mesh,
    tokens,
    trace,
    whole,
)

P = PartitionSpec


@pytest.fixture(scope="module")
def mesh():
    return make_mesh()


#: Megatron's columns and rows (Shoeybi et al., arXiv 1909.08053, section 3), by the path of a
#: parameter, for the linear layers of Equinox: weights are [out, in].
MEGATRON = [
    (r"experts.*", lambda ndim: P("model")),
    (r"(embed|head)\.weight", lambda ndim: P("model")),
    (
        r"(queries|keys|values|(query|key|value)_proj|qkv|up|gate)\.(weight|bias)",
        lambda ndim: P("model"),
    ),
    (r"(out|output_proj|down)\.weight", lambda ndim: P(None, "model")),
]


def megatron(path, leaf, stacked: bool):
    name = jax.tree_util.keystr(path)
    for pattern, rule in MEGATRON:
        if re.search(pattern + "$", name):
            inner = spec_of(rule(leaf.ndim), leaf.ndim - stacked)
            return ((),) * stacked + inner
    return replicated(leaf.ndim)


KEY = jax.random.key(0)
LLAMA = dict(layers=1, width=16, heads=4, kv_heads=2, head_width=4, mlp_width=24, vocabulary=32)


def block_loss(block, x):
    return (jax.vmap(block)(x) ** 2).mean()


def mlp_loss(mlp, x):
    return (jax.vmap(jax.vmap(mlp))(x) ** 2).mean()


def mixture_loss(mixture, x):
    mixed, balance = jax.vmap(mixture)(x)
    return (mixed**2).mean() + balance.mean()


def norm_loss(norm, x):
    return (jax.vmap(jax.vmap(norm))(x) ** 2).mean()


def resnet_loss(model_and_state, images, labels):
    model, state = model_and_state
    return resnet.loss_fn(model, state, images, labels)[0]


def make_resnet():
    config = resnet.Config(groups=(1, 1), bottleneck=False, width=4, classes=2)
    return eqx.nn.make_with_state(resnet.ResNet)(config, key=KEY)


SEQUENCES = tokens(8, 13)
EXAMPLE_KEYS = jax.eval_shape(lambda: jax.random.split(KEY, 8))
#: Each a model, its loss and a batch, whose leading dimension is split over `data`.
MODELS = {
    "mlp": (lambda: gpt.MLP(16, dtype=jnp.float32, key=KEY), mlp_loss, [array(8, 12, 16)]),
    "attention": (
        lambda: gpt.Attention(16, 4, dtype=jnp.float32, key=KEY), block_loss, [array(8, 12, 16)],
    ),
    "grouped-attention": (
        lambda: llama.Attention(llama.Config(**LLAMA), key=KEY), block_loss, [array(8, 12, 16)],
    ),
    "layer-norm": (lambda: eqx.nn.LayerNorm(16), norm_loss, [array(8, 12, 16)]),
    "block": (
        lambda: gpt.Block(16, 4, 0.0, dtype=jnp.float32, key=KEY), block_loss, [array(8, 12, 16)],
    ),
    "mixture": (
        lambda: mixtral.MixtureOfExperts(mixtral.Config(**LLAMA, experts=4), key=KEY),
        mixture_loss, [array(8, 12, 16)],
    ),
    "gpt2": (  # tied embedding, dropout, cross-entropy
        lambda: gpt2.GPT2(gpt2.Config(1, 16, 4, 12, 32, dropout=0.1), key=KEY),
        gpt2.loss_fn, [SEQUENCES, EXAMPLE_KEYS],
    ),
    "stacked-gpt2": (
        lambda: gpt2.GPT2(
            gpt2.Config(3, 16, 4, 12, 32), stacked=True, remat=True, key=KEY
        ),
        gpt2.loss_fn, [SEQUENCES],
    ),
    "llama": (
        lambda: llama.Llama(llama.Config(**LLAMA), key=KEY), llama.loss_fn, [SEQUENCES],
    ),
    "mixtral": (
        lambda: mixtral.Mixtral(mixtral.Config(**LLAMA, experts=4), key=KEY),
        mixtral.loss_fn, [SEQUENCES],
    ),
    "resnet": (make_resnet, resnet_loss, [array(8, 3, 16, 16), tokens(8)]),
}  # fmt: skip
#: Whole models take longer.
QUICK = ("mlp", "attention", "grouped-attention", "layer-norm", "block", "mixture")
NAMES = [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in MODELS]


def flat_model(name):
    """The loss as a function of the floating parameters and the rest, and how each is split."""
    build, loss, batch = MODELS[name]
    arrays, static = eqx.partition(
        eqx.filter_eval_shape(build), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    )
    paths, tree = jax.tree_util.tree_flatten_with_path(arrays)
    specs = [megatron(p, x, "stacked" in name and "blocks" in str(p)) for p, x in paths]
    leaves = [x for _, x in paths]
    floating = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]
    rest = [i for i in range(len(leaves)) if i not in floating]

    def fun(parameters, others, *batch):
        found = dict(zip([*floating, *rest], [*parameters, *others], strict=True))
        model = tree.unflatten(found[i] for i in range(len(leaves)))
        return loss(eqx.combine(model, static), *batch)

    operands = [leaves[i] for i in floating], [leaves[i] for i in rest], *batch
    order = [specs[i] for i in (*floating, *rest)]
    return fun, operands, [*order, *(spec_of(P("data"), a.ndim) for a in batch)]


def as_split(ours, xla) -> bool:
    """Whether a spec has all that XLA splits, and where it splits more, XLA has it whole."""
    return ours == xla or not axes_of(xla)


def check(fun, mesh, operands, specs, at_least=False):
    """Our specs of `fun`'s results, if they are XLA's, and pinning them costs no collectives."""
    leaves, tree = jax.tree.flatten(tuple(operands))
    jaxpr = trace(lambda *xs: jax.tree.leaves(fun(*tree.unflatten(xs))), mesh, *leaves)
    ours = whole(_shardy.propagate(jaxpr, specs, SIZES)[1], jaxpr)
    left_free = compiled(jaxpr, mesh, specs)
    for aval, mine, its in zip(jaxpr.out_avals, ours, chosen(left_free, jaxpr), strict=True):
        assert as_split(mine, its) if at_least else mine == its, (aval, mine, its)
    assert count(compiled(jaxpr, mesh, specs, ours)) <= count(left_free)
    return ours


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_split_as_xla_splits_them(mesh, name):
    fun, operands, specs = flat_model(name)
    check(jax.value_and_grad(fun), mesh, operands, specs)


@pytest.mark.parametrize("name", NAMES)
def test_a_forward_and_its_backward_are_split_as_xla_splits_them(mesh, name):
    fun, operands, specs = flat_model(name)

    def forward(parameters, *others):
        return jax.vjp(lambda p: fun(p, *others), parameters)

    value, pullback = jax.eval_shape(forward, *operands)
    # What is made of nothing (a causal mask) XLA makes again for each use: then it splits only one.
    made = check(forward, mesh, operands, specs, at_least=True)
    residuals, tree = jax.tree.flatten(pullback)

    def backward(residuals, cotangent):
        return tree.unflatten(residuals)(cotangent)

    check(backward, mesh, [residuals, value], [*made[1:], ()])


@pytest.mark.more
@pytest.mark.parametrize("seed", range(5))
def test_an_axis_is_there_once_and_divides(seed):
    """Whatever the inputs' specs are: axes may divide some of the dimensions only."""
    rng = np.random.default_rng(seed)
    sizes = {"a": 2, "b": 3, "c": 4}
    fun, operands, _ = flat_model("block")
    jaxpr = jax.make_jaxpr(jax.value_and_grad(fun))(*operands)
    specs = []
    for aval in jaxpr.in_avals:
        entries = [()] * aval.ndim
        for axis in rng.permutation(list(sizes))[: aval.ndim]:
            n = rng.integers(aval.ndim)
            if aval.shape[n] % int(np.prod([sizes[a] for a in (*entries[n], str(axis))])) == 0:
                entries[n] += (str(axis),)
        specs.append(tuple(entries))
    known = _shardy.variable_specs(jaxpr, jaxpr.jaxpr.outvars, specs, sizes)
    assert len(known) > 100
    for aval, spec in ((v.aval, spec) for v, spec in known.items() if spec is not None):
        assert len(set(axes_of(spec))) == len(axes_of(spec))
        for n, entry in zip(aval.shape, spec, strict=True):
            assert n % int(np.prod([sizes[a] for a in entry])) == 0
