"""Models of other architectures than GPT's: what they are, and that they run as pipelines."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
import jaxpp.testing
from experiments.models import bert, clip, resnet, t5, unet, vit
from jaxpp._program import Computation, Free, Message, Program, Receive, Run, Send
from jaxpp.schedules import Interleaved1F1B, OneFOneB, Schedule, ScheduleError, ZeroBubbleH1
from tests.helpers import mesh_of

BATCH, MICROBATCHES, TOKENS = 6, 3, 40
KEY = jax.random.key(0)


# ---- published configurations -------------------------------------------------------------------


def make_shapes(model: Callable, config: Any):
    """A model of a published size with shapes in place of arrays, and its state if it has one."""
    make = eqx.nn.make_with_state(model) if model is resnet.ResNet else model
    made = eqx.filter_eval_shape(make, config, key=KEY)
    return made if model is resnet.ResNet else (made, None)


def count(tree: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(tree) if isinstance(x, jax.ShapeDtypeStruct))


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


#: The parameters that are published. BERT: Hugging Face's `BertForMaskedLM`, whose decoder is the
#: embedding, without pooler. T5: Hugging Face's `T5ForConditionalGeneration`, the embedding once.
#: ViT, ResNet: torchvision's `num_params`, without running statistics. CLIP: OpenAI's `clip.load`,
#: both towers and the scale. UNet: the 23 convolutions of figure 1 with biases, counted by hand.
PUBLISHED = [
    (bert, bert.BERT, "bert_base_uncased", 109_514_298),
    (bert, bert.BERT, "bert_large_uncased", 335_174_458),
    (t5, t5.T5, "t5_small", 60_506_624),
    (t5, t5.T5, "t5_base", 222_903_552),
    (t5, t5.T5, "t5_large", 737_668_096),
    (vit, vit.ViT, "vit_b_16", 86_567_656),
    (vit, vit.ViT, "vit_l_16", 304_326_632),
    (unet, unet.UNet, "unet", 31_030_658),
    (resnet, resnet.ResNet, "resnet18", 11_689_512),
    (resnet, resnet.ResNet, "resnet50", 25_557_032),
    (clip, clip.CLIP, "clip_vit_b_32", 151_277_313),
]


@pytest.mark.parametrize(
    ("module", "model", "name", "parameters"), PUBLISHED, ids=[p[2] for p in PUBLISHED]
)
def test_published_configurations_have_the_published_number_of_parameters(
    module, model, name, parameters
):
    made, _ = make_shapes(model, module.CONFIGS[name])
    assert count(made) == parameters


def test_every_published_configuration_is_checked():
    modules = (bert, clip, resnet, t5, unet, vit)
    assert {name for _, _, name, _ in PUBLISHED} == {n for m in modules for n in m.CONFIGS}


def test_published_configurations_have_the_published_shapes():
    def shape_of(module, model, name, *data):
        made, _ = make_shapes(model, module.CONFIGS[name])
        return eqx.filter_eval_shape(made, *data).shape

    ints = functools.partial(shape, dtype=jnp.int32)
    assert shape_of(bert, bert.BERT, "bert_base_uncased", ints(512), ints(77)) == (77, 30522)
    assert shape_of(t5, t5.T5, "t5_small", ints(512), ints(114)) == (114, 32128)
    assert shape_of(vit, vit.ViT, "vit_b_16", shape(3, 224, 224)) == (1000,)
    assert shape_of(unet, unet.UNet, "unet", shape(1, 572, 572)) == (2, 388, 388)
    images, texts = shape(2, 3, 224, 224), ints(2, 77)
    assert shape_of(clip, clip.CLIP, "clip_vit_b_32", images, texts) == (2, 2)


@pytest.mark.parametrize("name", resnet.CONFIGS)
def test_a_resnet_has_the_published_shapes(name):
    model, state = make_shapes(resnet.ResNet, resnet.CONFIGS[name])
    features = {}

    def run(image, state):
        hidden, state = model.first(image, state)
        hidden = model.pool(hidden)
        for n, block in enumerate(model.blocks):
            hidden, state = block(hidden, state)
            features[n] = hidden.shape
        return hidden

    mapped = jax.vmap(run, in_axes=(0, None), axis_name=resnet.BATCH)
    eqx.filter_eval_shape(mapped, shape(2, 3, 224, 224), state)
    ends = np.cumsum(resnet.CONFIGS[name].groups) - 1
    widths = (64, 128, 256, 512) if name == "resnet18" else (256, 512, 1024, 2048)
    edges = (56, 28, 14, 7)
    # He et al., table 1.
    assert [features[n] for n in ends] == [(w, e, e) for w, e in zip(widths, edges, strict=True)]


def test_the_unet_has_23_convolutions_and_the_published_bottom():
    model, _ = make_shapes(unet.UNet, unet.CONFIGS["unet"])
    is_convolution = lambda x: isinstance(x, eqx.nn.Conv | eqx.nn.ConvTranspose)  # noqa: E731
    found = [x for x in jax.tree.leaves(model, is_leaf=is_convolution) if is_convolution(x)]
    assert len(found) == 23
    assert eqx.filter_eval_shape(model.bottom, shape(512, 32, 32)).shape == (1024, 28, 28)


# ---- tiny configurations ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A tiny model and its loss.

    `data(n)` are the arrays of step n, all with a leading axis of examples. The modules at `paths`
    open stages 1 to 3. `stateful` is a model with running statistics, and `mean` a loss that is the
    mean over the examples of a batch.
    """

    model: Callable
    config: Any
    loss: Callable
    data: Callable[[int], tuple[Any, ...]]
    paths: tuple[str, str, str]
    stateful: bool = False
    mean: bool = True
    rtol: float | None = None


def ints(rng: np.random.Generator, high: int, *sizes: int):
    return jnp.asarray(rng.integers(high, size=sizes), jnp.int32)


def floats(rng: np.random.Generator, *sizes: int):
    return jnp.asarray(rng.normal(size=sizes), jnp.float32)


def bert_data(step: int):
    rng = np.random.default_rng(step)
    tokens, targets = ints(rng, TOKENS, BATCH, 10), ints(rng, TOKENS, BATCH, 3)
    positions = np.stack([rng.choice(7, 3, replace=False) for _ in range(BATCH)])
    is_token = np.arange(10) < rng.integers(7, 11, size=(BATCH, 1))
    keys = jax.random.split(jax.random.key(step), BATCH)
    return tokens, jnp.asarray(positions, jnp.int32), targets, jnp.asarray(is_token), keys


def t5_data(step: int):
    rng = np.random.default_rng(step)
    return ints(rng, TOKENS, BATCH, 9), ints(rng, TOKENS, BATCH, 7)


def image_data(step: int, *, size: int, channels: int = 3, labels: tuple[int, ...] = ()):
    rng = np.random.default_rng(step)
    return floats(rng, BATCH, channels, size, size), ints(rng, 2, BATCH, *labels)


def clip_data(step: int):
    rng = np.random.default_rng(step)
    return floats(rng, BATCH, 3, 8, 8), ints(rng, TOKENS, BATCH, 7)


SMALL: dict[str, Any] = dict(layers=2, width=16, heads=2, mlp=32)
TOWER = clip.Tower(layers=1, width=16, heads=2)
BLOCKS = ("blocks.0", "blocks.1", "head")
CASES = {
    "bert": Case(
        bert.BERT,
        bert.Config(vocabulary=TOKENS, context=10, **SMALL),
        bert.loss_fn,
        bert_data,
        BLOCKS,
    ),
    "t5": Case(
        t5.T5,
        t5.Config(head=8, vocabulary=TOKENS, buckets=8, distance=8, **SMALL),
        t5.loss_fn,
        t5_data,
        ("encoder.1", "decoder.0", "decoder.1"),
    ),
    "vit": Case(
        vit.ViT,
        vit.Config(patch=4, image=8, classes=2, **SMALL),
        vit.loss_fn,
        functools.partial(image_data, size=8),
        BLOCKS,
    ),
    "unet": Case(
        unet.UNet,
        unet.Config(width=4, depth=2),
        unet.loss_fn,
        functools.partial(image_data, size=44, channels=1, labels=(4, 4)),
        ("down.1", "bottom", "up.0"),
    ),
    "resnet": Case(
        eqx.nn.make_with_state(resnet.ResNet),
        resnet.Config(groups=(1, 1), bottleneck=False, width=4, classes=2),
        resnet.loss_fn,
        functools.partial(image_data, size=32),
        BLOCKS,
        stateful=True,
        mean=False,
        rtol=1e-4,
    ),
    "clip": Case(
        clip.CLIP,
        clip.Config(TOWER, TOWER, features=8, patch=4, image=8, vocabulary=TOKENS, context=7),
        clip.loss_fn,
        clip_data,
        ("image.blocks.0", "text", "text.blocks.0"),
        mean=False,
    ),
}


def make(case: Case) -> tuple[Any, ...]:
    """A model, and its state if it has one, with values from NumPy: it has nothing to compile."""
    rng = np.random.default_rng(0)

    def draw(x):
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.zeros(x.shape, x.dtype)
        if len(x.shape) < 2:  # norms and biases
            return 0.5 + 0.1 * floats(rng, *x.shape)
        return floats(rng, *x.shape) / np.sqrt(np.prod(x.shape[1:]))

    made = jax.tree.map(draw, eqx.filter_eval_shape(case.model, case.config, key=KEY))
    return made if case.stateful else (made,)


def test_buckets_of_distances_grow_by_a_factor():
    # Raffel et al., section 2.1: 16 exact, 16 logarithmic up to 128.
    ahead = -jnp.arange(200)
    found = np.asarray(t5.bucket(ahead, 32, 128, causal=True))
    first = [np.flatnonzero(found == b)[0] for b in range(32)]
    assert first == [b if b < 16 else np.ceil(16 * 8 ** ((b - 16) / 16)) for b in range(32)]
    assert (np.asarray(t5.bucket(-ahead, 32, 128, causal=True)) == 0).all()
    both = np.asarray(t5.bucket(ahead, 64, 128, causal=False))
    np.testing.assert_array_equal(both, found)
    np.testing.assert_array_equal(t5.bucket(-ahead[1:], 64, 128, causal=False), found[1:] + 32)


def test_a_later_token_of_the_target_does_not_change_earlier_logits():
    (model,) = make(CASES["t5"])
    sources, targets = CASES["t5"].data(0)
    run = eqx.filter_jit(model)
    before, after = run(sources[0], targets[0]), run(sources[0], targets[0].at[3].add(1))
    np.testing.assert_array_equal(before[:4], after[:4])
    assert np.all(np.any(before[4:] != after[4:], axis=-1))


def test_padding_does_not_change_what_bert_predicts():
    (model,) = make(CASES["bert"])
    tokens, positions, *_ = (x[0] for x in CASES["bert"].data(0))
    is_token = jnp.arange(10) < 8
    run = eqx.filter_jit(lambda tokens: model(tokens, positions, is_token=is_token))
    np.testing.assert_array_equal(run(tokens), run(tokens.at[9].add(1)))
    assert np.any(run(tokens) != run(tokens.at[7].add(1)))


# ---- as pipelines -------------------------------------------------------------------------------

SCHEDULES: dict[str, Schedule] = {
    "1f1b": OneFOneB(),
    "interleaved": Interleaved1F1B(),
    "zb_h1": ZeroBubbleH1(),
}


class Entered(eqx.Module):
    """A module whose first argument enters a stage when it is called."""

    module: Any
    stage: int = eqx.field(static=True)

    def __call__(self, x, *args, **kwargs):
        return self.module(jaxpp.pipeline_enter_stage(x, stage_id=self.stage), *args, **kwargs)


def at_path(model: Any, path: str) -> Any:
    for name in path.split("."):
        model = model[int(name)] if name.isdigit() else getattr(model, name)
    return model


def cut(case: Case, how: str, num_stages: int) -> Callable:
    """The loss of a case, cut into 2 or 4 stages."""
    paths = case.paths if num_stages == 4 else case.paths[1:2]
    if how == "path":
        return jaxpp.split_stages(case.loss, at=list(paths))
    if how == "automatic":
        return jaxpp.split_stages(case.loss, num_stages)

    def annotated(model, *data):
        for n, path in reversed(list(enumerate(paths, 1))):  # the inner ones of a tower first
            model = eqx.tree_at(
                functools.partial(at_path, path=path),
                model,
                replace_fn=lambda m, n=n: Entered(m, n),
            )
        return case.loss(model, *data)

    return jaxpp.split_stages(annotated)


def pipelined(case: Case, how: str, schedule: Schedule, num_stages: int) -> Callable:
    """The loss, new state and gradients of a batch as a scheduled loop over microbatches."""
    staged = jaxpp.wrap_forward(cut(case, how, num_stages))
    grad_fn = eqx.filter_value_and_grad(staged, has_aux=case.stateful)
    state_axes, loss = (("carry",), ("mean", "carry")) if case.stateful else ((), "mean")
    axes = (None, *state_axes, *(0 for _ in case.data(0)))
    grad_fn = jaxpp.microbatch(grad_fn, MICROBATCHES, in_axes=axes, reduce=(loss, "mean"))
    return jaxpp.schedule(grad_fn, schedule)


def plain(case: Case) -> Callable:
    """The same on one device, without jaxpp.

    The whole batch at once where the loss is a mean over it, else one microbatch after the other.
    """
    grad_fn = eqx.filter_value_and_grad(case.loss, has_aux=case.stateful)
    if case.mean:
        return grad_fn

    def loop(model, *args):
        state, data = (args[:1], args[1:]) if case.stateful else ((), args)

        def one(state, data):
            out, grads = grad_fn(model, *state, *data)
            out, state = (out[0], (out[1],)) if case.stateful else (out, ())
            return state, (out, grads)

        slices = [x.reshape(MICROBATCHES, -1, *x.shape[1:]) for x in data]
        state, results = jax.lax.scan(one, state, slices)
        loss, grads = jax.tree.map(lambda x: jnp.mean(x, 0), results)
        return ((loss, *state) if case.stateful else loss), grads

    return loop


OPTIMIZER = optax.sgd(0.05, momentum=0.9)


def train_step(case: Case, grad_fn: Callable) -> Callable:
    def step(model, opt_state, *args):
        out, grads = grad_fn(model, *args)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return eqx.apply_updates(model, updates), opt_state, out, jax.tree.leaves(grads)

    return step


def start(case: Case) -> tuple[Any, ...]:
    model, *state = make(case)
    return model, OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array)), *state


PRODUCT = [
    (name, how, schedule)
    for name in CASES
    for how in ("path", "automatic", "annotation")
    for schedule in SCHEDULES
]
#: Each cut and schedule once; `-m slow` has all others.
SELECTED = [
    ("t5", "automatic", "1f1b"),
    ("vit", "path", "interleaved"),
    ("resnet", "annotation", "zb_h1"),
]
CONFIGURATIONS = [c if c in SELECTED else pytest.param(*c, marks=pytest.mark.slow) for c in PRODUCT]


@functools.cache
def reference(name: str) -> Callable:
    """The train step on one device, compiled once."""
    case = CASES[name]
    return eqx.filter_jit(train_step(case, plain(case)))


@pytest.mark.parametrize(("name", "how", "schedule"), CONFIGURATIONS)
def test_gradients_and_steps_are_those_of_one_device(name, how, schedule):
    case = CASES[name]
    num_stages = 4 if schedule == "interleaved" else 2
    grad_fn = pipelined(case, how, SCHEDULES[schedule], num_stages)
    step = jaxpp.place(train_step(case, grad_fn), mesh_of(2, shared=True), donate_argnums=(0, 1))
    # Biases of keys have no gradient but noise.
    jaxpp.testing.assert_matches_single_device(
        step, reference(name), *start(case), data=case.data, rtol=case.rtol, atol=1e-6
    )
    jaxpp.testing.assert_no_transfers_of(step, 0)
    jaxpp.testing.assert_no_transfers_of(step, 1)
    # And it learns.
    model, opt_state, *state = start(case)
    losses = []
    for _ in range(30):
        model, opt_state, out, _ = step(model, opt_state, *state, *case.data(0))
        loss, *state = out if case.stateful else (out,)
        losses.append(float(loss))
    assert losses[-1] < 0.98 * losses[0], losses


@pytest.mark.parametrize(("name", "how", "schedule"), PRODUCT)
def test_a_pipeline_is_proven(name, how, schedule):
    case = CASES[name]
    grad_fn = pipelined(case, how, SCHEDULES[schedule], 4 if schedule == "interleaved" else 2)
    step = jaxpp.place(train_step(case, grad_fn), mesh_of(2, shared=True), donate_argnums=(0, 1))
    jaxpp.testing.assert_computes_the_function(step, *start(case), *case.data(0))


# ---- what the ranks send each other -------------------------------------------------------------


def passed_on(program: Program, computations: Sequence[Computation]) -> list[str]:
    """What a rank receives and does not read, or sends on as it received it."""
    origin: dict[int, str] = {}
    unread: dict[int, str] = {}
    wrong = []
    for instruction in program.instructions:
        match instruction:
            case Receive(slots, message):
                for slot, name in zip(slots, message.names, strict=True):
                    origin[slot] = unread[slot] = f"{name} from rank {message.source}"
            case Run(number, inputs, outputs, _):
                jaxpr = computations[number].jaxpr.jaxpr
                given = dict(zip(jaxpr.invars, inputs, strict=True))
                read = {v for e in jaxpr.eqns for v in e.invars if isinstance(v, jex.Var)}
                for var, slot in given.items():
                    if var in read:
                        unread.pop(slot, None)
                results = zip(jaxpr.outvars, outputs, strict=True)
                variables = [(v, slot) for v, slot in results if isinstance(v, jex.Var)]
                handed = {slot: origin.get(given[v]) for v, slot in variables if v in given}
                for slot in outputs:
                    origin[slot] = handed.get(slot) or ""
            case Send(slots, message):
                wrong += [f"{origin[s]} to rank {message.target}" for s in slots if origin.get(s)]
            case Free(slots):
                wrong += [f"{unread.pop(s)}, unread" for s in slots if s in unread]
    returned = {slot for _, slot in program.outputs}
    return wrong + [f"{what}, unread" for slot, what in unread.items() if slot not in returned]


@functools.cache
def lowered(name: str, how: str, schedule: Schedule):
    """The programs of a train step on four ranks with a stage each."""
    case = CASES[name]
    step = train_step(case, pipelined(case, how, schedule, 4))
    return jaxpp.place(step, mesh_of(4, shared=True)).lower(*start(case), *case.data(0))


def routes(lowered, *sizes: int) -> list[tuple[int, int]]:
    """Source and target of each edge of a shape, for one microbatch, sorted."""
    sent = [s.message for p in lowered.programs for s in p.sends]
    found = [
        (m.source, m.target)
        for m in sent
        for name, kind, aval in zip(m.names, m.kinds, m.avals, strict=True)
        if kind == "edge" and name.endswith(".0") and aval.shape == sizes
    ]
    return sorted(found)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        (name, how)
        if (name, how) in [("unet", "path"), ("t5", "path"), ("clip", "path"), ("resnet", "path")]
        else pytest.param(name, how, marks=pytest.mark.slow)
        for name in CASES
        for how in ("path", "automatic", "annotation")
    ],
)
def test_no_rank_passes_on_what_it_does_not_read(name, how):
    step = lowered(name, how, OneFOneB())
    for program in step.programs:
        assert passed_on(program, step.bundle.computations) == []


def test_what_is_passed_on_is_found():
    aval = jax.typeof(jnp.float32(0))
    message = Message(0, 0, 1, ("x",), ("edge",), (aval,))
    onwards = Message(1, 1, 2, ("y",), ("edge",), (aval,))

    def found(function, *instructions):
        computation = Computation("run", jax.make_jaxpr(function)(0.0), ())
        program = Program(1, (1,), (Receive((0,), message), *instructions), 2, (), (), ())
        return passed_on(program, [computation])

    run = Run(0, (0,), (1,), "run")
    assert found(lambda x: x + 1, run, Send((1,), onwards)) == []
    assert found(lambda x: x + 1, Send((0,), onwards), run) == ["x from rank 0 to rank 2"]
    passes = found(lambda x: x, run, Send((1,), onwards))
    assert passes == ["x from rank 0 to rank 2", "x from rank 0, unread"]
    assert found(lambda x: x + 1, Free((0,))) == ["x from rank 0, unread"]


def test_skips_of_a_unet_go_from_the_way_down_to_the_way_up():
    # Stages: down.0; down.1; bottom and up.1; up.0 and the head.
    step = lowered("unet", "path", OneFOneB())
    assert routes(step, 2, 4, 40, 40) == [(0, 3), (3, 0)]
    assert routes(step, 2, 8, 16, 16) == [(1, 2), (2, 1)]
    assert routes(step, 2, 4, 20, 20) == [(0, 1), (1, 0)]


def test_what_the_encoder_gives_goes_to_every_stage_of_the_decoder():
    # Stages: encoder.0; encoder.1 and what is before decoder.0; decoder.0; decoder.1 and the head.
    step = lowered("t5", "path", OneFOneB())
    # Stage 2 adds the cotangent of stage 3 to its own.
    forward_and_back = [(1, 2), (1, 3), (2, 1), (3, 2)]
    assert routes(step, 2, 9, 16) == sorted([*forward_and_back, (0, 1), (1, 0)])
    assert routes(step, 2, 7, 16) == [(1, 2), (2, 1), (2, 3), (3, 2)]


def test_the_towers_of_clip_read_nothing_of_each_other():
    # Stages: two of images, then two of text, of which the second has the loss.
    step = lowered("clip", "path", OneFOneB())
    edges = {
        (s.message.source, s.message.target)
        for p in step.programs
        for s in p.sends
        if "edge" in s.message.kinds
    }
    assert edges == {(0, 1), (1, 0), (1, 3), (3, 1), (2, 3), (3, 2)}
    assert routes(step, 2, 8) == [(1, 3), (3, 1)]


# ---- statistics in the order of microbatches ----------------------------------------------------


def test_running_statistics_start_from_those_of_the_microbatch_before():
    """Whatever a rank does while it waits, each BatchNorm sees each microbatch once, in order."""
    case = CASES["resnet"]
    grad_fn = pipelined(case, "path", ZeroBubbleH1(), 2)
    model, state = make(case)
    images, labels = case.data(0)
    (_, got), _ = jaxpp.place(grad_fn, mesh_of(2, shared=True))(model, state, images, labels)
    run = eqx.filter_jit(lambda state, x, y: resnet.loss_fn(model, state, x, y)[1])

    def statistics(*order):
        new = state
        for m in order:
            one = slice(2 * m, 2 * m + 2)
            new = run(new, images[one], labels[one])
        return jax.tree.leaves(jax.device_get(new))

    def equal(want):
        return all(np.allclose(x, y, rtol=1e-4, atol=1e-6) for x, y in zip(got, want, strict=True))

    got = jax.tree.leaves(jax.device_get(got))
    assert equal(statistics(0, 1, 2))
    for other in ((1, 0, 2), (0, 1, 2, 2), (2,)):
        assert not equal(statistics(*other))


@dataclasses.dataclass(frozen=True)
class SecondFirst(Schedule):
    """1F1B that takes the first two microbatches in the other order."""

    def orders(self, num_ranks, num_microbatches):
        other = {0: 1, 1: 0}
        for order in OneFOneB().orders(num_ranks, num_microbatches):
            yield [
                dataclasses.replace(t, microbatch=other.get(t.microbatch, t.microbatch))
                for t in order
            ]


def test_a_schedule_that_reorders_microbatches_is_refused_where_there_are_statistics():
    case = CASES["resnet"]
    with pytest.raises(ScheduleError, match=r"carries a value at .*resnet\.py:\d+ through"):
        fun = pipelined(case, "path", SecondFirst(), 2)
        eqx.filter_make_jaxpr(fun)(*make(case), *case.data(0))
    stateless = CASES["vit"]
    fun = pipelined(stateless, "path", SecondFirst(), 2)
    eqx.filter_make_jaxpr(fun)(*make(stateless), *stateless.data(0))
