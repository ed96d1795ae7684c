"""What `place` does not do: the error names the cause in the user's words, and a way that works."""

import re

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental.layout import Format, Layout, with_layout_constraint

import jaxpp
from tests.transforms import two_layers
from tests.transforms.two_layers import WEIGHTS, X

# ---- a pipeline inside of control flow ----------------------------------------------------------

BATCHES = jnp.stack([X, 2 * X, -X])


def descend(grad_fn):
    def one(weights, x):
        value, grads = grad_fn(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    return one


def scanned(one):
    return lambda weights, xs: jax.lax.scan(one, weights, xs)


def repeated(one):
    return lambda weights, xs: jax.lax.fori_loop(
        0, jnp.int32(3), lambda i, w: one(w, xs[i])[0], weights
    )


def at_times(one):
    return lambda weights, xs: jax.lax.cond(
        xs.sum() > 0, lambda: one(weights, xs[0]), lambda: (weights, 0.0)
    )


def in_python(one):
    def steps(weights, xs):
        values = []
        for x in xs:
            weights, value = one(weights, x)
            values.append(value)
        return weights, jnp.stack(values)

    return steps


@pytest.mark.parametrize("loop", ["scheduled", "microbatch"])
@pytest.mark.parametrize(
    ("steps", "way_out"),
    [
        (scanned, "`scan` at .* Write that loop in Python: a `for`"),
        (repeated, "`while` at .* Write that loop in Python: a `for`"),
        (at_times, "`cond` at .* Decide in Python"),
    ],
)
def test_a_loop_inside_control_flow(steps, way_out, loop):
    grad_fn = two_layers.scheduled()
    if loop == "microbatch":
        grad_fn = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(two_layers.loss)), 4)
    step = two_layers.place(steps(descend(grad_fn)))
    with pytest.raises(ValueError, match=rf"a {loop} loop is inside a {way_out}") as caught:
        step.lower(WEIGHTS, BATCHES)
    assert f"{__file__}:" in str(caught.value)


def test_the_way_out_of_a_scan_is_right():
    got = two_layers.place(in_python(descend(two_layers.scheduled())))(WEIGHTS, BATCHES)
    want = jax.jit(scanned(descend(jax.value_and_grad(two_layers.loss))))(WEIGHTS, BATCHES)
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-5)


# ---- an update apart from its gradients ---------------------------------------------------------

OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))


def update(weights, state, grads):
    updates, state = OPTIMIZER.update(grads, state, weights)
    return optax.apply_updates(weights, updates), state


@pytest.mark.more
def test_an_update_apart_from_its_gradients():
    state = OPTIMIZER.init(WEIGHTS)
    _, grads = jaxpp.place(two_layers.scheduled(), jaxpp.MpmdMesh((2,)))(WEIGHTS, X)
    words = "no stages, .* the mesh has 2 ranks. .* same step as their gradients: .* jaxpp.gather"
    with pytest.raises(ValueError, match=words):
        jaxpp.place(update, jaxpp.MpmdMesh((2,)))(WEIGHTS, state, grads)

    def step(weights, state, x):  # the first way that the error names
        return update(weights, state, two_layers.scheduled()(weights, x)[1])

    got = jaxpp.place(step, jaxpp.MpmdMesh((2,)))(WEIGHTS, state, X)
    # The second one.
    chex.assert_trees_all_close(jax.jit(update)(WEIGHTS, state, jaxpp.gather(grads)), got)
    want = update(WEIGHTS, state, jax.grad(two_layers.loss)(WEIGHTS, X))
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-5)


# ---- marks that are passed twice ----------------------------------------------------------------


def net(weights, x, **mark):
    h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ weights[0]), **mark)
    return h @ weights[1]


def siamese(weights, x, **mark):
    return jnp.mean((net(weights, x, **mark) - net(weights, x + 1.0, **mark)) ** 2)


def joined(weights, x):
    one, other = jnp.split(net(weights, jnp.concatenate([x, x + 1.0])), 2)
    return jnp.mean((one - other) ** 2)


MARK = re.escape(f"{__file__}:{net.__code__.co_firstlineno + 1}")


def test_a_marked_model_that_is_called_twice_has_more_stages_than_ranks():
    message = (
        r"on 3 ranks .*, but the mesh has 2 .*\nStages begin at .* times\); .* call the model once"
    )
    with pytest.raises(ValueError, match=message):
        two_layers.place(two_layers.scheduled(siamese))(WEIGHTS, X)
    got = two_layers.place(two_layers.scheduled(joined))(WEIGHTS, X)
    want = jax.jit(jax.value_and_grad(siamese))(WEIGHTS, X)
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-5)


def test_split_stages_lists_marks_that_are_passed_twice():
    message = rf"make 3 stages \(entered at {MARK} \(2 times\); .* call the model once"
    with pytest.raises(ValueError, match=message):
        jaxpp.split_stages(siamese, 2)(WEIGHTS, X)


def test_a_numbered_mark_opens_one_stage_for_both_calls():
    step = two_layers.place(two_layers.scheduled(lambda w, x: siamese(w, x, stage_id=1)))
    got = step(WEIGHTS, X)
    want = jax.jit(jax.value_and_grad(siamese))(WEIGHTS, X)
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-5)
    read = [{n for n, _ in program.inputs} for program in step.programs]
    assert not read[0] & {1} and not read[1] & {0}, "each rank has the weights of its stage alone"
    step.lower(WEIGHTS, X).certify()


def test_more_cuts_than_ranks_name_the_cuts_and_the_mesh():
    def layers(weights, x):
        for n, w in enumerate(weights):
            with jax.named_scope(f"layer{n}"):
                x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    cut = jaxpp.split_stages(layers, at=["layer1", "layer2"])
    grad = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(cut)), 2)
    grad = jaxpp.schedule(grad, jaxpp.schedules.OneFOneB())
    words = r"on 3 ranks .* the mesh has 2 .*, the names in at=.*\n.* of a loop over layers opens"
    with pytest.raises(ValueError, match=words):
        two_layers.place(grad)([*WEIGHTS, jnp.eye(4)], X)


# ---- arguments that are not plain arrays --------------------------------------------------------


class Stands:
    """Stands for an array, as a variable of another library may."""

    def __init__(self, array):
        self.array = array

    def __jax_array__(self):
        return self.array


@pytest.mark.parametrize(
    "transform",
    [
        jaxpp.split_stages,
        jaxpp.wrap_forward,
        lambda f: jaxpp.microbatch(f, 2),
        lambda f: jaxpp.schedule(f, jaxpp.schedules.OneFOneB()),
        jaxpp.place,
    ],
    ids=["split_stages", "wrap_forward", "microbatch", "schedule", "place"],
)
@pytest.mark.parametrize(
    ("args", "path"),
    [(([Stands(WEIGHTS[0]), WEIGHTS[1]], X), "[0][0]"), ((WEIGHTS, Stands(X)), "[1]")],
    ids=["weights", "batch"],
)
def test_an_object_that_stands_for_an_array(transform, args, path):
    message = re.escape(f"args{path} is a Stands, ") + ".* jnp.asarray.* register the class"
    with pytest.raises(ValueError, match=message):
        transform(two_layers.loss)(*args)


def layout_of(array):
    order = tuple(reversed(array.format.layout.major_to_minor))
    return jax.device_put(array, Format(Layout(order), array.sharding))


@pytest.mark.parametrize(("which", "path"), [(0, "[0][1]"), (1, "[1]")], ids=["weights", "batch"])
@pytest.mark.parametrize("device", [0, 1])
def test_an_array_with_a_layout_of_its_own(which, path, device):
    step = jaxpp.place(two_layers.scheduled(), jaxpp.MpmdMesh((2,)))
    want = step(WEIGHTS, X)  # also where the step has been compiled before
    args = [list(WEIGHTS), X]
    odd = layout_of(jax.device_put(X if which else WEIGHTS[1], jax.devices()[device]))
    args[1] = odd if which else X
    if not which:
        args[0][1] = odd
    message = re.escape(f"args{path} has a memory layout of its own") + r".* jnp.copy\(array\)"
    with pytest.raises(ValueError, match=message):
        step(*args)
    chex.assert_trees_all_equal(step(*jax.tree.map(jnp.copy, args)), want)  # the way out


def test_a_constraint_on_the_layout_of_what_a_stage_hands_on():
    """Other programs read it in the default layout, as they read all arrays."""

    def make(grad_fn, constrain):
        def step(w, x):
            value, grads = grad_fn(w, x)
            return [constrain(p - 0.1 * g) for p, g in zip(w, grads, strict=True)], value

        return step

    def turned(x):
        return with_layout_constraint(x, Layout((1, 0)))

    def loss(w, x):
        h = turned(jaxpp.pipeline_enter_stage(turned(jnp.tanh(x @ w[0]))))
        return jnp.mean((h @ w[1]) ** 2)

    placed = two_layers.place(make(two_layers.scheduled(loss), turned), donate_argnums=0)
    # Of a result with a layout of its own JAX reads the wrong elements on CPUs.
    plain = jax.jit(make(two_layers.accumulated(), lambda x: x))
    got, want = (jax.tree.map(jnp.copy, WEIGHTS) for _ in range(2))
    for _ in range(2):
        (got, value), (want, wanted) = placed(got, X), plain(want, X)
        chex.assert_trees_all_close((got, value), (want, wanted), rtol=1e-4, atol=1e-5)
