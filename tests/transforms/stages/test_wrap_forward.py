"""Each stage in a call of its own, forward and backward."""

import functools
from typing import Any

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp
from jaxpp import jaxprs
from jaxpp.schedules import Kind
from jaxpp.transforms.stages import _marks, _stages
from jaxpp.transforms.tasks._loop import is_loop

NOTHING = jax.checkpoint_policies.nothing_saveable
DOTS = jax.checkpoint_policies.dots_saveable
STAGES = 3

WS = list(jax.random.normal(jax.random.key(0), (STAGES, 8, 8)))
X = jax.random.normal(jax.random.key(1), (4, 8))


def marked(ws, x):
    for i, w in enumerate(ws):
        x = jaxpp.pipeline_enter_stage(x) if i else x
        x = jnp.sin(jnp.tanh(x @ w))
    return (x**2).mean()


def plain(ws, x):
    for w in ws:
        x = jnp.sin(jnp.tanh(x @ w))
    return (x**2).mean()


def stage_calls(fun, *args):
    """(stage, is backward) of each stage's call, in order."""
    calls = [e for e in jax.make_jaxpr(fun)(*args).eqns if _marks.is_stage_call(e)]
    return [(_marks.stage_of_call(e)[0], _marks.is_backward_call(e)) for e in calls]


def names_inside(eqn):
    for sub in jaxprs.sub_jaxprs(eqn):
        for inner in sub.eqns:
            yield inner.primitive.name
            yield from names_inside(inner)


def test_each_stage_is_one_call_and_nothing_is_outside():
    wrapped = jaxpp.wrap_forward(marked)
    assert stage_calls(wrapped, WS, X) == [(0, False), (1, False), (2, False)]
    assert len(jax.make_jaxpr(wrapped)(WS, X).eqns) == STAGES


@pytest.mark.parametrize("policy", [None, NOTHING, DOTS], ids=["none", "nothing", "dots"])
def test_the_gradient_has_one_forward_and_one_backward_call_for_each_stage(policy):
    grad = jax.grad(jaxpp.wrap_forward(marked, policy=policy))
    assert stage_calls(grad, WS, X) == [
        *((k, False) for k in range(STAGES)),
        *((k, True) for k in reversed(range(STAGES))),
    ]


def test_without_it_the_gradient_has_no_calls():
    assert stage_calls(jax.grad(marked), WS, X) == []


@pytest.mark.parametrize("policy", [None, NOTHING, DOTS], ids=["none", "nothing", "dots"])
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: f,
        jax.grad,
        jax.value_and_grad,
        lambda f: jax.grad(f, argnums=1),
        lambda f: jax.vmap(f, (None, 0)),
        lambda f: jax.vmap(jax.grad(f), (None, 0)),
        lambda f: jax.grad(lambda ws, x: jax.vmap(f, (None, 0))(ws, x).sum()),
        lambda f: lambda ws, x: jax.jvp(f, (ws, x), (ws, x)),
        lambda f: lambda ws, x: jax.linearize(f, ws, x)[1](ws, x),
        lambda f: jax.grad(lambda ws, x: sum((g**2).sum() for g in jax.grad(f)(ws, x))),
        lambda f: jax.grad(jax.checkpoint(f)),
        lambda f: jax.hessian(f, argnums=1),
    ],
    ids=[
        "plain", "grad", "value_and_grad", "grad-data", "vmap", "vmap-grad", "grad-vmap", "jvp",
        "linearize", "grad-grad", "grad-checkpoint", "hessian",
    ],
)  # fmt: skip
def test_transformations_commute_with_it(policy, transform):
    wrapped = jaxpp.wrap_forward(marked, policy=policy)
    got, want = jax.jit(transform(wrapped))(WS, X), jax.jit(transform(plain))(WS, X)
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", [None, NOTHING], ids=["none", "nothing"])
def test_jit_gives_the_same_values_to_the_bit(policy, assert_same):
    assert_same(jaxpp.wrap_forward(marked, policy=policy), plain, WS, X)


# ---- the stages of split_stages -----------------------------------------------------------------


def test_what_split_stages_has_decided_is_not_decided_again(monkeypatch):
    decided, read_stages = [], _stages.read_stages

    def read(*args):
        decided.append(args)
        return read_stages(*args)

    monkeypatch.setattr(_stages, "read_stages", read)
    split = jaxpp.split_stages(plain, 3)
    assert len(stage_calls(jaxpp.wrap_forward(split), WS, X)) == 3
    assert len(decided) == 1


def test_a_function_around_a_split_one_is_wrapped_whole(assert_same):
    split = jaxpp.split_stages(plain, 3)

    @functools.wraps(split)
    def shifted(ws, x):
        return split(ws, x) + 1

    for fun in (shifted, jax.vmap(split, (None, 0)), jax.grad(split)):
        args = (WS, X[None]) if fun is not shifted else (WS, X)
        assert_same(jaxpp.wrap_forward(fun), fun, *args)


# ---- policies -----------------------------------------------------------------------------------


def residuals(fun, stage):
    """What a stage's forward call keeps for its backward call, and what that one computes."""
    eqns = jax.make_jaxpr(jax.grad(fun))(WS, X).eqns
    of_stage = [e for e in eqns if _marks.stage_of_call(e) == (stage, STAGES)]
    forward, backward = of_stage
    kept = [v for v in forward.outvars if v in backward.invars and v.aval.ndim]
    return kept, list(names_inside(backward))


@pytest.mark.parametrize("stage", [0, 1])
def test_a_policy_keeps_less_and_computes_again(stage):
    kept, backward = residuals(jaxpp.wrap_forward(marked), stage)
    kept_nothing, backward_nothing = residuals(jaxpp.wrap_forward(marked, policy=NOTHING), stage)
    kept_dots, backward_dots = residuals(jaxpp.wrap_forward(marked, policy=DOTS), stage)
    assert len(kept) > len(kept_dots) > len(kept_nothing) == 0
    assert "tanh" not in backward and "tanh" in backward_dots and "tanh" in backward_nothing
    assert backward.count("dot_general") + 1 == backward_nothing.count("dot_general")


@pytest.mark.parametrize("stage", range(STAGES))
def test_a_stage_may_have_a_policy_of_its_own(stage):
    for other in range(STAGES):
        kept, backward = residuals(jaxpp.wrap_forward(marked, policy={stage: NOTHING}), other)
        like = NOTHING if other == stage else None
        want, wanted = residuals(jaxpp.wrap_forward(marked, policy=like), other)
        assert len(kept) == len(want) and backward == wanted


def test_policies_of_stages_give_the_same_values_on_any_mesh_to_the_bit():
    policies = {None: None, "mixed": {0: NOTHING, 2: DOTS}, "each": dict.fromkeys(range(STAGES))}
    found = {}
    for name, policy in policies.items():
        grad = jax.value_and_grad(jaxpp.wrap_forward(marked, policy=policy))
        grad = jaxpp.schedule(jaxpp.microbatch(grad, 2), jaxpp.schedules.OneFOneB())
        for ranks in (jax.devices()[:STAGES], jax.devices()[:1] * STAGES):
            placed = jaxpp.place(grad, jaxpp.MpmdMesh((STAGES,), devices=ranks))
            found[name, ranks[1].id] = jaxpp.gather(placed(WS, X))
    chex.assert_trees_all_equal(found["mixed", 1], found["mixed", 0])
    chex.assert_trees_all_equal(found["each", 1], found[None, 0])
    chex.assert_trees_all_close(found["mixed", 0], found[None, 0], rtol=1e-4, atol=1e-6)


def test_a_policy_is_a_function_or_a_mapping_from_stages():
    given: list[Any] = ["full", [NOTHING], {0: "full"}]
    for wrong in given:
        with pytest.raises(TypeError, match=r"policy is one of jax.checkpoint.*got .*(full|\[)"):
            jaxpp.wrap_forward(marked, policy=wrong)
    with pytest.raises(ValueError, match=r"policy is given for stage 3, but .* 3 stage\(s\)"):
        jaxpp.wrap_forward(marked, policy={3: NOTHING})(WS, X)


@jax.jit
def step_of_a_row(x, w):
    return jnp.where(x > 0, jnp.sin(x * w), jnp.cos(x) - 1)


@pytest.mark.more
@pytest.mark.parametrize(("steps", "few"), [(20, True), (2, False)], ids=["long", "short"])
def test_of_a_long_row_of_elementwise_operations_a_stage_keeps_what_the_row_reads(steps, few):
    def chain(ws, x):
        x = x @ ws[0]
        for k in range(steps):
            x = step_of_a_row(x, ws[1][k % 8])
        x = jaxpp.pipeline_enter_stage(jnp.tanh(x @ ws[2]))
        return (x**2).mean()

    wrapped = jaxpp.wrap_forward(chain)
    eqns = jax.make_jaxpr(jax.grad(wrapped))(WS, X).eqns
    forward, _, _, backward = (e for e in eqns if _marks.is_stage_call(e))
    kept = [v for v in forward.outvars if v in backward.invars and v.aval.ndim]
    assert (len(kept) < 5) is few
    assert ("sin" in names_inside(backward)) is few
    got, want = (jax.jit(jax.value_and_grad(f))(WS, X) for f in (wrapped, chain))
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-6)


def frozen(ws, x):
    return marked([ws[0], jax.lax.stop_gradient(ws[1]), ws[2]], x)


def test_a_frozen_weight_has_no_gradient(assert_same):
    plainly = lambda ws, x: plain([ws[0], jax.lax.stop_gradient(ws[1]), ws[2]], x)  # noqa: E731
    grads = jax.jit(jax.grad(jaxpp.wrap_forward(frozen)))(WS, X)
    chex.assert_trees_all_close(grads, jax.grad(plainly)(WS, X), rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(grads[1], 0.0)


@pytest.mark.parametrize("which", range(STAGES))
def test_a_gradient_of_one_stage_goes_no_further_back(which):
    def of_one(w, x):
        return jaxpp.wrap_forward(marked)([w if i == which else v for i, v in enumerate(WS)], x)

    backward = [k for k, is_backward in stage_calls(jax.grad(of_one), WS[which], X) if is_backward]
    assert backward == list(reversed(range(which, STAGES)))
    got = jax.grad(of_one)(WS[which], X)
    np.testing.assert_allclose(got, jax.grad(plain)(WS, X)[which], rtol=1e-5, atol=1e-7)


def test_integers_keys_and_auxiliary_results_pass():
    def fun(ws, x, labels, key):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ ws[0]))
        h = jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h, 0.0) @ ws[1]
        loss = -jnp.take_along_axis(jax.nn.log_softmax(h), labels[:, None], 1).mean()
        return loss, {"labels": labels + 1, "hidden": h, "kind": "aux"}

    labels, key = jnp.array([1, 0, 7, 3]), jax.random.key(5)
    grad = jax.value_and_grad(jaxpp.wrap_forward(fun), has_aux=True)
    (loss, aux), grads = grad(WS, X, labels, key)
    (want_loss, want_aux), want = jax.value_and_grad(fun, has_aux=True)(WS, X, labels, key)
    assert aux.pop("kind") == want_aux.pop("kind") == "aux"
    chex.assert_trees_all_close(
        (loss, aux, grads), (want_loss, want_aux, want), rtol=1e-5, atol=1e-7
    )


def test_equinox_models_pass(assert_same):
    model = eqx.nn.MLP(8, 8, 8, 3, key=jax.random.key(2))

    def loss(model, x):
        return (jax.vmap(model)(x) ** 2).mean()

    wrapped = jaxpp.wrap_forward(jaxpp.split_stages(loss, 2))
    assert_same(wrapped, loss, model, X)
    got, want = eqx.filter_jit(eqx.filter_grad(wrapped))(model, X), eqx.filter_grad(loss)(model, X)
    chex.assert_trees_all_close(
        eqx.filter(got, eqx.is_array), eqx.filter(want, eqx.is_array), rtol=1e-5, atol=1e-7
    )


def test_a_function_without_marks_is_one_stage(assert_same):
    assert stage_calls(jaxpp.wrap_forward(plain), WS, X) == [(0, False)]
    assert_same(jaxpp.wrap_forward(plain), plain, WS, X)


def test_arguments_and_constants_may_be_results(assert_same):
    def fun(ws, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ ws[0]))
        return x, jnp.arange(3), 1.5, (h @ ws[1]).sum(), None

    got, want = jaxpp.wrap_forward(fun)(WS, X), fun(WS, X)
    chex.assert_trees_all_close(got, want, rtol=1e-6)


def test_a_loop_marked_inside_is_an_error():
    def looped(ws, x):
        step = lambda h, w: (jaxpp.pipeline_enter_stage(h) @ w, None)  # noqa: E731
        return jax.lax.scan(step, x, jnp.stack(ws))[0].sum()

    with pytest.raises(ValueError, match=r"inside a `scan` at \S*test_wrap_forward.py:\d+"):
        jaxpp.wrap_forward(looped)(WS, X)


@pytest.mark.parametrize(
    "schedule", [None, jaxpp.schedules.OneFOneB(), jaxpp.schedules.ZeroBubbleH1()]
)
def test_prints_survive(schedule, capfd):
    """An equation that nothing reads belongs to a stage, too, if it has an effect."""

    def loss(w, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        jax.debug.print("hidden {}", h.shape[0])
        y = jnp.sum(h @ w[1])
        jax.debug.print("loss {:.3f}", y)
        return y

    step = jax.jit(jax.grad(jaxpp.wrap_forward(loss)))
    if schedule is not None:
        grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss)), 1)
        mesh = jaxpp.MpmdMesh((2,), devices=[jax.devices()[0]] * 2)
        step = jaxpp.place(jaxpp.schedule(grad, schedule), mesh)
    step([jnp.eye(2)] * 2, jnp.ones((4, 2)))
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.split("\n")) == ["", "hidden 4", "loss 6.093"]


# ---- a checkpoint around it ---------------------------------------------------------------------


def layers(w, x):
    for _ in range(3):
        x = jnp.sin(jnp.tanh(x @ w / 4))
    return x


def skipping(ws, x):
    """Three stages, the last of which reads the first one's result too."""
    x = layers(ws[0], x)
    skip, y = jaxpp.pipeline_enter_stage((x, x))
    y = jaxpp.pipeline_enter_stage(layers(ws[1], y))
    return (layers(ws[2], y + skip) ** 2).mean()


CHECKPOINTED = {
    "nothing": lambda f: jax.checkpoint(f),
    "dots": lambda f: jax.checkpoint(f, policy=DOTS),
    "jitted": lambda f: jax.jit(jax.checkpoint(jax.jit(f))),
    "with more in it": lambda f: jax.checkpoint(lambda ws, x: jnp.sin(2) * f(ws, jnp.sin(x))),
    "twice": lambda f: jax.checkpoint(jax.checkpoint(f)),
}
SCHEDULES = [jaxpp.schedules.OneFOneB(), jaxpp.schedules.ZeroBubbleH1()]


def scheduled(fun, schedule):
    return jaxpp.schedule(jaxpp.microbatch(jax.value_and_grad(fun), 2), schedule)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=["1f1b", "zb_h1"])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_a_checkpoint_around_it_gives_the_values_of_the_plain_step(name, schedule):
    checkpointed = CHECKPOINTED[name]
    fun = scheduled(checkpointed(jaxpp.wrap_forward(skipping)), schedule)
    want = jax.jit(jax.value_and_grad(checkpointed(skipping)))(WS, X)
    mesh = jaxpp.MpmdMesh((STAGES,), ("mpmd",), devices=jax.devices()[:1] * STAGES)
    got = jax.device_get(jaxpp.place(fun, mesh)(WS, X))
    chex.assert_trees_all_close(jax.jit(fun)(WS, X), want, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=["1f1b", "zb_h1"])
@pytest.mark.parametrize("policy", [NOTHING, DOTS], ids=["nothing", "dots"])
def test_a_checkpoint_around_it_keeps_what_a_policy_for_each_stage_keeps(policy, schedule):
    def loop_of(fun):
        return next(e for e in jax.make_jaxpr(scheduled(fun, schedule))(WS, X).eqns if is_loop(e))

    def kept(loop):
        forwards = [t for t in loop.params["body"].eqns if t.params["key"].kind is Kind.F]
        return [sorted(v.aval.shape for v in task.outvars) for task in forwards]

    wrapped = jaxpp.wrap_forward(skipping)
    around = jax.checkpoint(wrapped, policy=policy)
    inside = jaxpp.wrap_forward(skipping, policy=policy)
    assert kept(loop_of(around)) == kept(loop_of(inside))
    assert sum(map(len, kept(loop_of(around)))) < sum(map(len, kept(loop_of(wrapped))))


@pytest.mark.more
@pytest.mark.parametrize("schedule", SCHEDULES, ids=["1f1b", "zb_h1"])
def test_on_one_device_too_a_backward_computes_again_what_its_forward_does_not_keep(schedule):
    def flops(fun):
        return jax.jit(scheduled(fun, schedule)).lower(WS, X).compile().cost_analysis()["flops"]

    kept = flops(jaxpp.wrap_forward(skipping))
    assert flops(jax.checkpoint(jaxpp.wrap_forward(skipping))) > 1.1 * kept
    assert flops(jaxpp.wrap_forward(skipping, policy=NOTHING)) > 1.1 * kept
