"""The errors that newcomers meet: each heading of the page `errors.md` is a message that comes."""

import pathlib
import re
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import jaxpp
from jaxpp.extend import Kind, edit_loops
from jaxpp.schedules import (
    DualPipe,
    GPipe,
    Interleaved1F1B,
    Memory,
    OneFOneB,
    by_name,
    check,
    from_tasks,
)
from tests.helpers import mesh_of

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "errors.md"
HEADINGS = re.findall(r"^### `(.*)`$", PAGE.read_text(), re.M)
#: Messages that need worker processes; another test makes them appear.
ELSEWHERE = {
    "This mesh has been shut down; make a new one",
    "gpus_per_rank=0 lets ranks run on CPU",
}
WEIGHTS, BATCH = [jnp.eye(4)] * 4, jnp.ones((8, 4))


def loss(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def loop(num_stages=2, num_microbatches=4, **knobs):
    staged = jaxpp.wrap_forward(jaxpp.split_stages(loss, num_stages=num_stages))
    return jaxpp.microbatch(jax.value_and_grad(staged), num_microbatches, **knobs)


def pipeline(*sizes, schedule=None, **knobs):
    return jaxpp.schedule(loop(*sizes, **knobs), schedule or OneFOneB())


def lower(fun, *args, mesh=None, **knobs):
    return jaxpp.place(fun, mesh or mesh_of(2), **knobs).lower(*(args or (WEIGHTS, BATCH)))


def trace(fun, *args):
    return jax.make_jaxpr(fun)(*(args or (WEIGHTS, BATCH)))


def marked(weights, x):
    for w in weights:
        x = jaxpp.pipeline_enter_stage(x @ w)
    return jnp.mean(x)


def mark_in_a_scan(weights, x):
    def body(h, w):
        return jaxpp.pipeline_enter_stage(h @ w), None

    return jnp.mean(jax.lax.scan(body, x, jnp.stack(weights))[0])


def unknown_module():
    model = eqx.nn.MLP(4, 4, 4, 2, key=jax.random.key(0))
    return eqx.filter_jit(jaxpp.split_stages(lambda m, x: m(x), at=["layer.1"]))(model, BATCH[0])


MODEL = eqx.nn.MLP(4, 1, 4, 3, key=jax.random.key(0))


def batch_first():
    return jaxpp.split_stages(lambda x, m: jax.vmap(m)(x), at=["layers.1"])(BATCH, MODEL)


def of_a_model(**knobs):
    grad = eqx.filter_grad(lambda model, x: jnp.mean(jax.vmap(model)(x)))
    return jaxpp.microbatch(grad, 4, **knobs)(MODEL, BATCH)


def with_keys(keys):
    noisy = jaxpp.microbatch(lambda x, k: jnp.sum(x + jax.random.normal(k)), 4, in_axes=(0, 0))
    return noisy(BATCH, keys)


def gradient_inside():
    inside = jaxpp.wrap_forward(jaxpp.split_stages(jax.value_and_grad(loss), num_stages=2))
    return trace(jaxpp.schedule(jaxpp.microbatch(inside, 4), OneFOneB()))


def state_made_late():
    def of_slice(weights, state, x):
        value = loss(weights, x * state)
        return value, state + value

    staged = jaxpp.wrap_forward(jaxpp.split_stages(of_slice, num_stages=2))
    axes, reduce = (None, "carry", 0), ("mean", "carry")
    loop = jaxpp.microbatch(staged, 4, in_axes=axes, reduce=reduce)
    return trace(jaxpp.schedule(loop, OneFOneB()), WEIGHTS, jnp.ones(()), BATCH)


def data_that_end():
    batches = iter([BATCH] * 2)
    step = jaxpp.place(pipeline(), mesh_of(2), feed={1: lambda number: next(batches)})
    for number in range(3):
        step(WEIGHTS, number)


def scan_over_steps(weights, x):
    return jax.lax.scan(lambda w, _: (pipeline()(w, x)[1], None), weights, length=2)[0]


def donated_twice():
    step = jaxpp.place(lambda x, y: x + y, mesh_of(1), donate_argnums=0)
    x = jnp.ones(3) * 1
    step(x, 1)
    return step(x, 1)


def one_array_twice():
    x = jnp.ones(3) * 1
    return jaxpp.place(lambda x, y: (x + y, y), mesh_of(1), donate_argnums=0)(x, x)


def results_of_two_ranks():
    a, b = (jax.device_put(jnp.ones(3), d) for d in jax.devices()[:2])
    return jnp.dot(a, b)


def jitted():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return jax.jit(jaxpp.place(pipeline(), mesh_of(2)))(WEIGHTS, BATCH)


N = Kind("N", "note", after="F")


def edited(edit):
    """Traces an edit of the loop, of its first value between stages and of the last."""

    def rule(loop):
        forward, *_, backward = [
            v for v in loop.values if any(key.stage != v.maker.stage for key in v.readers)
        ]
        return edit(loop, forward, backward)

    return trace(edit_loops(pipeline(4), rule))


def of_a_lost_loop(loop, forward, backward):
    _, new = loop.after(("F", 0), jnp.sin, [forward])
    return loop.read(("F", 1), new[0], of=forward)


#: Each makes the message of the heading at its place appear.
MADE = [
    lambda: trace(jaxpp.split_stages(loss)),
    lambda: trace(jaxpp.split_stages(loss, num_stages=40)),
    unknown_module,
    lambda: trace(jaxpp.split_stages(jaxpp.wrap_forward(loss), num_stages=2)),
    batch_first,
    lambda: trace(jaxpp.split_stages(marked, num_stages=2)),
    lambda: trace(jaxpp.wrap_forward(mark_in_a_scan)),
    lambda: trace(jaxpp.wrap_forward(jaxpp.microbatch(marked, 4))),
    lambda: trace(loop(), WEIGHTS, BATCH[:6]),
    lambda: of_a_model(in_axes=(0, 0)),
    lambda: trace(loop(in_axes=(None, None))),
    lambda: trace(jaxpp.microbatch(loss, 4, in_axes=(0, 0)), jnp.ones((12, 4)), BATCH),
    lambda: trace(loop(), WEIGHTS, 1.0),
    lambda: with_keys(jax.random.key(0)),
    lambda: with_keys(jax.random.split(jax.random.key(0), 4)),
    lambda: trace(loop(reduce="avg")),
    lambda: trace(jaxpp.schedule(jax.grad(loss), OneFOneB())),
    state_made_late,
    lambda: jaxpp.schedule(loop(), "1f1b"),  # pyright: ignore
    lambda: by_name("1f1bb"),
    lambda: trace(jaxpp.schedule(jaxpp.microbatch(jaxpp.wrap_forward(marked), 4), OneFOneB())),
    gradient_inside,
    lambda: Interleaved1F1B(2).table(5, 8),
    lambda: DualPipe().table(2, 3),
    lambda: check(from_tasks([["F0.0", "B0.0"], ["B1.0", "F1.0"]])),
    lambda: check(from_tasks([["F0.0"], ["F1.0", "B1.0"]])),
    lambda: check(GPipe().table(2, 8), memory=Memory(), memory_limit=2),
    lambda: edited(of_a_lost_loop),
    lambda: edited(lambda loop, a, _: loop.insert(N, 0, jnp.sin, [a], before=("F", 1))[0]),
    lambda: edited(lambda loop, _, b: loop.insert(N, 0, jnp.sin, [b])[0]),
    lambda: edited(lambda loop, a, _: loop.result("size", ("F", 0), jnp.max, [a])),
    lambda: jaxpp.MpmdMesh((99,)),
    lambda: jaxpp.MpmdMesh((2,), ("pipe",)),
    lambda: jaxpp.place(pipeline(), jax.make_mesh((2,), ("stage",))),
    lambda: jaxpp.place(pipeline(), {"donate": 0}),  # pyright: ignore
    lambda: lower(pipeline(4)),
    lambda: lower(loop()),
    lambda: lower(scan_over_steps),
    jitted,
    lambda: lower(pipeline(), in_specs=(None, None)),
    donated_twice,
    one_array_twice,
    lambda: lower(lambda w, x, names: pipeline()(w, x), WEIGHTS, BATCH, {"a"}),
    results_of_two_ranks,
    lambda: lower(lambda x, n: x if n > 2 else -x, BATCH, 3, mesh=mesh_of(1)),
    lambda: lower(lambda w, x: float(pipeline()(w, x)[0])),
    data_that_end,
    lambda: jaxpp.RemoteMpmdMesh((2,), address="10.0.0.1:6379"),
    lambda: jaxpp.place(pipeline(), mesh_of(2)).as_text(),
    lambda: mesh_of(1).stop_trace(),
    lambda: jaxpp.load_state("no-checkpoint-is-here", WEIGHTS),
]


def test_each_error_of_the_page_comes_with_its_words():
    headings = [heading for heading in HEADINGS if heading not in ELSEWHERE]
    assert len(headings) == len(set(headings)) == len(MADE) >= 30
    for heading, make in zip(headings, MADE, strict=True):
        with pytest.raises(Exception) as error:  # noqa: PT011
            make()
        words = re.escape(heading).replace(r"\.\.\.", ".*")
        said = [error.typename, str(error.value), *getattr(error.value, "__notes__", [])]
        message = " ".join(" ".join(said).split())
        assert re.search(words, message), f"{heading!r} is not in {message!r}"


@pytest.mark.parametrize("words", sorted(ELSEWHERE))
def test_the_words_of_other_errors_are_in_the_source(words):
    assert words in HEADINGS
    sources = (pathlib.Path(jaxpp.__file__).parent).rglob("*.py")
    assert any(words in source.read_text() for source in sources)
