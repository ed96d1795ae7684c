"""The mutations: a small change of jaxpp's source each, which some test must notice.

`old` is found exactly once in `file`; `tests` are what is run first, as arguments of pytest.
"""

import dataclasses

T = "tests/transforms/"


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One change: what it does wrong, where, and which tests should notice first."""

    wrong: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def _of(file: str, *tests: str):
    """Makes the mutations of a file that the same tests look at."""

    def make(wrong: str, old: str, new: str, *more: str) -> Mutation:
        return Mutation(wrong, f"jaxpp/{file}.py", old, new, (*more, *tests))

    return make


_reduction = _of("transforms/_reductions", T + "test_microbatch.py", T + "test_mixed_precision.py")
_microbatch = _of("transforms/_microbatch", T + "test_microbatch.py")
_accumulator = _of("transforms/_accumulators", T + "test_schedule.py", T + "test_losses.py")
_task = _of("transforms/_tasks", T + "test_schedule.py", T + "test_effects.py")
_half = _of("transforms/_split_backward", T + "test_split_backward.py")
_lower = _of("transforms/_lower", T + "test_place.py", T + "test_constants.py", "LAWS")
_placement = _of("transforms/_placement", T + "test_placement.py", T + "test_effects.py", "LAWS")
_structure = _of("_jaxprs", T + "test_identity.py", "tests/test_jaxprs.py", "LAW7")
_compile = _of("runtime/_compile", T + "test_calls.py", T + "test_place.py", "LAW7")
_signature = _of("transforms/_signature", T + "test_calls.py", T + "test_place.py")
_invariant = _of("transforms/_invariants", T + "test_identity.py", T + "test_schedule.py")
_loop = _of("transforms/_loop", T + "test_schedule.py", T + "test_directions.py")
_partial = _of("transforms/_partial_sums", T + "test_deferred_sums.py")

MUTATIONS = (
    # ---- how microbatches are combined
    _reduction("a mean is a sum", "lambda acc, m: acc / m,", "lambda acc, m: acc,"),
    _reduction("a maximum begins with zero", "filled(x, -jnp.inf)", "filled(x, 0)"),
    _reduction("the last is the first", "lambda acc, x: x, lambda", "lambda acc, x: acc, lambda"),
    _reduction(
        "examples are put together in another order",
        "return stacked.reshape(stacked.shape[0] * stacked.shape[1],",
        "return stacked.swapaxes(0, 1).reshape(stacked.shape[0] * stacked.shape[1],",
    ),
    _reduction("a sum is in the output's dtype", "if dtype is None:", "if True:"),
    _microbatch("a cotangent is dropped", "(ct * g).astype(", "g.astype("),
    _microbatch(
        "the gradient by one of two outputs is dropped",
        "result[i] = g if result[i] is None else result[i] + g",
        "result[i] = g",
    ),
    _microbatch("gradients by slices are not divided", "s / count if is_mean else s", "s"),
    _microbatch(
        "the gradient is that of the last output that sums",
        "main = next(\n        (",
        "main = max(\n        (",
    ),
    # ---- accumulators
    _accumulator(
        "what is added to a gradient is taken for zero",
        "all(v is carry or is_zero(v) for v in eqn.invars)",
        "any(v is carry or is_zero(v) for v in eqn.invars)",
    ),
    _accumulator(
        "a one is taken for a zero",
        "return np.ndim(v.val) == 0 and v.val == 0",
        "return np.ndim(v.val) == 0",
    ),
    _accumulator(
        "an accumulator is doubled",
        "eqn.replace(invars=[carry, value], outvars=[out])",
        "eqn.replace(invars=[carry, carry], outvars=[out])",
    ),
    _accumulator(
        "one of two terms is taken twice",
        "eqn.replace(invars=[value, v], outvars=[partial])",
        "eqn.replace(invars=[value, value], outvars=[partial])",
    ),
    _accumulator(
        "a term leaves out its transpose", "for eqn in term.linear:", "for eqn in term.linear[:0]:"
    ),
    # ---- tasks
    _task(
        "a task reads a carry after it was changed",
        "return v if writer == position else before",
        "return v",
    ),
    _task(
        "an effect is repeated where its value is read",
        "if eqn.effects:\n            return False",
        "if False:\n            return False",
    ),
    _task(
        "a result that nothing makes does not leave",
        "if kind is Kind.F and stage == self._num_stages - 1:",
        "if False:",
    ),
    _task(
        "an accumulator is the carry before it",
        'if source == "carry" and v is body.carries[i]:',
        'if source == "carry":',
    ),
    _half(
        "a scan in halves runs forwards",
        '("length", "reverse", "unroll")',
        '("length", "unroll")',
    ),
    _half(
        "the carries of a half are those of one iteration",
        "if grown == mine:",
        "if True:",
    ),
    _half(
        "a light equation is moved although the second half makes its operand",
        "absent.difference_update(eqn.outvars)",
        "absent.clear()",
    ),
    # ---- programs
    _lower(
        "what a step gives back is donated",
        "and (event.rank, v) not in shared",
        "and True",
    ),
    _lower(
        "an argument that is not donated is",
        "and (v not in self.arg_number or self.arg_number[v] in self.donated)",
        "and True",
    ),
    _lower("a constant is donated", "and v not in self.constants\n            ]", "]"),
    _lower(
        "a reversed loop takes its slices forwards",
        'mb = length - 1 - task.microbatch if loop.eqn.params["reverse"] else task.microbatch',
        "mb = task.microbatch",
        T + "test_microbatch.py",
        T + "test_schedule.py",
    ),
    _lower(
        "tasks that read slices are those that read constants",
        '            tuple(r.source == "x" for r in body.inputs),\n',
        "",
    ),
    _lower(
        "tasks that read accumulators are those that read values",
        '            tuple(r.source == "carry" for r in body.inputs),\n',
        "",
    ),
    _lower(
        "loops of other lengths share tasks",
        'loop.eqn.params["length"] if indexed else None,',
        "None,",
    ),
    _lower(
        "segments that donate other arguments are one",
        "(structures[id(segment)], taken),",
        "(structures[id(segment)],),",
    ),
    _lower(
        "tasks of one kind are one",
        "(_jaxprs.structure(jaxpr), pattern), body.name",
        "(body.kind, len(jaxpr.eqns), pattern), body.name",
    ),
    _lower("nothing is freed", "if slots:\n", "if False:\n"),
    _lower(
        "a value is freed before its last use",
        "self.last_use.get((self.rank, k), -2) <= index",
        "self.last_use.get((self.rank, k), -2) <= index + 3",
    ),
    _lower(
        "what is sent is sent twice",
        "self.instructions.append(Send(tuple(self.slot(k) for k in keys), message))",
        "self.instructions += [Send(tuple(self.slot(k) for k in keys), message)] * 2",
    ),
    _lower(
        "what is received together changes places",
        "Receive(tuple(self.slot(k) for k in keys), message)",
        "Receive(tuple(self.slot(k) for k in reversed(keys)), message)",
    ),
    _lower(
        "a message is received at its last use",
        "min(first_read.get(route, index), index)",
        "max(first_read.get(route, index), index)",
    ),
    _lower(
        "a constant gets a slot that is used again",
        "if self.vacant and key not in self.constants:",
        "if self.vacant:",
    ),
    _lower(
        "numbers of one type are one",
        "key = (str(value.dtype), np.asarray(value).tobytes())",
        "key = str(value.dtype)",
    ),
    _lower(
        "arrays of one shape that a step closes over are one",
        '("array", id(atom.val))',
        '("array", atom.val.shape)',
    ),
    _lower(
        "stacked results are in the first row",
        "jax.lax.dynamic_update_index_in_dim(next(buffers), y, index, 0)",
        "jax.lax.dynamic_update_index_in_dim(next(buffers), y, 0 * index, 0)",
    ),
    _lower(
        "accumulators are copied, not updated in place",
        "return whole, (*carries, *range(first, first + len(y_avals)))",
        "return whole, ()",
    ),
    # ---- what is around the loops
    _placement(
        "stacked results begin with ones",
        "jnp.zeros(a.shape, a.dtype)",
        "jnp.ones(a.shape, a.dtype)",
    ),
    _placement(
        "state is left where it was made",
        "final.append((v, state or home))",
        "final.append((v, home))",
    ),
    _placement(
        "computations of two ranks are in one level",
        "level[i] = max(level[i], level[j] + apart)",
        "level[i] = max(level[i], level[j])",
    ),
    _placement(
        "an effect is on all ranks of its value",
        "self._pin(i, frozenset({min(place)}))",
        "self._pin(i, place)",
    ),
    _placement(
        "the parts of a shared gradient are added up on one rank",
        "places = [p for v, p in candidates if _size(v) == largest]",
        "places = [p for v, p in candidates if _size(v) == largest][:1]",
    ),
    _placement(
        "an effect before a loop comes after it",
        "for v in [*self.reads[i], *after]:",
        "for v in self.reads[i]:",
    ),
    Mutation(
        "the branches of an opened conditional change places",
        "jaxpp/transforms/_conditionals.py",
        "if len(cases) == 2 else index, *cases)",
        "if len(cases) == 2 else index, *cases[::-1])",
        (T + "test_conditionals.py",),
    ),
    Mutation(
        "a guarded equation runs where its conditional is not taken",
        "jaxpp/transforms/_conditionals.py",
        "[v == k for v, k in zip(own, numbers, strict=True)]",
        "[v == v for v, k in zip(own, numbers, strict=True)]",
        (T + "test_conditionals.py",),
    ),
    # ---- when two computations are one
    _structure("the configuration is not in the key", "            eqn.ctx,\n", ""),
    _structure("primitives are known by name", "eqn.primitive,\n", "eqn.primitive.name,\n"),
    _structure(
        "derivative rules never count",
        "eqn.primitive.name in CUSTOM_RULES and not differentiable",
        "eqn.primitive.name in CUSTOM_RULES",
    ),
    _structure(
        "parameters called name never count",
        'ignored = {"name"} if eqn.primitive.name in _JITS else set()',
        'ignored = {"name"}',
    ),
    _structure(
        "arrays of one shape are equal",
        "return (str(value.dtype), value.shape, value.tobytes())",
        "return (str(value.dtype), value.shape)",
    ),
    _structure("0.0 is -0.0", "return (type(value), repr(value))", "return value"),
    _structure(
        "numbers of one type are equal",
        '("literal", a.aval, _hashable(a.val, differentiable))',
        '("literal", a.aval)',
    ),
    _structure(
        "the order of operands does not count",
        "tuple(map(atom, eqn.invars)),\n",
        "frozenset(map(atom, eqn.invars)),\n",
    ),
    _structure(
        "the order of results does not count",
        "return head, body, tuple(map(atom, opened.outvars)), consts",
        "return head, body, frozenset(map(atom, opened.outvars)), consts",
    ),
    _structure(
        "an effect whose result nobody reads is dropped",
        "if eqns[i].effects or any(",
        "if any(",
        T + "test_effects.py",
    ),
    _compile(
        "donation is not in the key of an executable",
        "return _jaxprs.structure(computation.jaxpr), computation.donated, split, configuration",
        "return _jaxprs.structure(computation.jaxpr), split, configuration",
    ),
    _compile(
        "settings are not in the key of an executable",
        "computation.donated, split, configuration",
        "computation.donated, split, configuration[1]",
    ),
    _signature("weak types do not count", "if own.weak_type != aval.weak_type:", "if False:"),
    _signature("True is 1", "(type(leaf) is not type(value) or leaf != value)", "(leaf != value)"),
    _signature(
        "dtypes do not count",
        "own.shape != aval.shape or own.dtype != aval.dtype",
        "own.shape != aval.shape",
    ),
    # ---- what is computed before the loop
    _invariant(
        "what an effect gives is the same for all microbatches",
        "if eqn.effects or any(v in self.varying for v in read):",
        "if any(v in self.varying for v in read):",
        T + "test_effects.py",
    ),
    _invariant("other rules are the same function", "differentiable=True", "differentiable=False"),
    _invariant(
        "equal computations of other operands are one",
        "_jaxprs.structure(one.jaxpr, differentiable=True), one.inputs",
        "_jaxprs.structure(one.jaxpr, differentiable=True)",
    ),
    # ---- a scheduled loop on one device
    _loop(
        "a reversed loop runs forwards",
        "jax.lax.scan(step, carry, xs, length=length, reverse=reverse)",
        "jax.lax.scan(step, carry, xs, length=length)",
        T + "test_microbatch.py",
    ),
    _loop(
        "a reversed loop in two directions runs forwards",
        "[length - 1 - i for i in own] if reverse else own",
        "own",
    ),
    _loop(
        "what a checkpoint computes again is kept",
        "if body.recomputes:",
        "if False:",
        T + "test_wrap_forward.py",
    ),
    # ---- arguments and results
    Mutation(
        "a result is the array of an argument",
        "jaxpp/transforms/_flat_step.py",
        "if not _jaxprs.is_literal(v) and v in taken:",
        "if False:",
        (T + "test_place.py",),
    ),
    Mutation(
        "results are paired with arguments of other types",
        "jaxpp/transforms/_flat_step.py",
        "in_avals[i] == out_avals[o] for i, o",
        "True for i, o",
        (T + "test_place.py", T + "test_placement.py"),
    ),
    Mutation(
        "what is freed is held",
        "jaxpp/runtime/_worker.py",
        "                for slot in instruction.slots:\n                    slots[slot] = None",
        "                pass",
        ("tests/runtime/test_worker.py", "tests/runtime/test_mesh.py"),
    ),
    Mutation(
        "a policy is ignored",
        "jaxpp/transforms/_wrap_forward.py",
        "if policy is not None:",
        "if False:",
        (T + "test_wrap_forward.py",),
    ),
    Mutation(
        "a backward call is taken for a forward",
        "jaxpp/transforms/_marks.py",
        "transposed=not transposed",
        "transposed=transposed",
        (T + "test_marks.py", T + "test_schedule.py"),
    ),
    # ---- inside a rank
    _partial(
        "each replica has the whole",
        "jax.lax.broadcasted_iota(jnp.int32, shape, 0) == 0",
        "jax.lax.broadcasted_iota(jnp.int32, shape, 0) >= 0",
    ),
    _partial(
        "the sum over replicas is the first of them",
        "return jax.lax.reduce_sum(rows, (0,))",
        "return rows[0]",
    ),
)
