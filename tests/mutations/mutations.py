"""The mutations: a small change of jaxpp's source each, which something must notice.

The certificate is asked first: a step that the mutated jaxpp lowers is refuted (`REFUTED_ON`), or
there is a reason why it computes its function all the same (`KEPT`). Then come tests.

`old` is found exactly once in `file`. `tests` are what is run first, those that should notice:
`"place"` are all of `tests/transforms/place/test_place.py`, `"place::dictionaries"` is one of them.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One change: what it does wrong, where, and which tests should notice."""

    wrong: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS = (
    Mutation(
        "a mean is a sum",
        "jaxpp/transforms/microbatch/_reductions.py",
        "lambda acc, m: acc / m,",
        "lambda acc, m: acc,",
        ("microbatch::the_gradient_is_that_of_the_full_batch",),
    ),
    Mutation(
        "a maximum begins with zero",
        "jaxpp/transforms/microbatch/_reductions.py",
        "filled(x, -jnp.inf)",
        "filled(x, 0)",
        ("microbatch::reductions",),
    ),
    Mutation(
        "the last is the first",
        "jaxpp/transforms/microbatch/_reductions.py",
        "lambda acc, x: x, lambda",
        "lambda acc, x: acc, lambda",
        ("microbatch::reductions",),
    ),
    Mutation(
        "examples are put together in another order",
        "jaxpp/transforms/microbatch/_reductions.py",
        "return stacked.reshape(stacked.shape[0] * stacked.shape[1],",
        "return stacked.swapaxes(0, 1).reshape(stacked.shape[0] * stacked.shape[1],",
        ("microbatch::reductions",),
    ),
    Mutation(
        "a sum is in the output's dtype",
        "jaxpp/transforms/microbatch/_reductions.py",
        "jnp.dtype(jnp.float32) if jnp.finfo(x.dtype).bits < 32 else x.dtype",
        "x.dtype",
        ("mixed_precision::sums_are_in_the_accumulators_dtype",),
    ),
    Mutation(
        "the gradient of a scalar beside another output is accumulated twice",
        "jaxpp/transforms/microbatch/_slices.py",
        "parts = loop.gradients(",
        "parts += loop.gradients(",
        ("schedule::the_gradient_of_any_output_is_scheduled",),
    ),
    Mutation(
        "a mean is divided after it was made narrow",
        "jaxpp/transforms/microbatch/_reductions.py",
        "finish(acc, m).astype(result)",
        "finish(acc.astype(result), m)",
        ("mixed_precision::a_mean_does_not_overflow_before_it_is_divided",),
    ),
    Mutation(
        "a number is that of one slice",
        "jaxpp/transforms/microbatch/_microbatch.py",
        "_jaxprs.trace(_with_arrays(fun),",
        "_jaxprs.trace(_keywords.positional(fun),",
        ("microbatch::the_sum_of_a_count_is_that_of_the_whole_batch",),
    ),
    Mutation(
        "an array that one entry covers with the batch is sliced",
        "jaxpp/transforms/microbatch/_arguments.py",
        "entry.number is None or entry.number in examples",
        "False",
        ("microbatch::an_array_as_long_as_there_are_microbatches_is_no_entry_of_the_batch",),
    ),
    Mutation(
        "JAX adds up a gradient in the dtype of its parameter",
        "jaxpp/transforms/microbatch/_slices.py",
        "if not wider:",
        "if True:",
        ("mixed_precision::gradients_by_narrow_parameters_are_added_up_in_float32",),
    ),
    Mutation(
        "a cotangent is dropped",
        "jaxpp/transforms/microbatch/_slices.py",
        "(i, given[k] * g) for",
        "(i, g) for",
        ("microbatch::gradients_through_any_output",),
    ),
    Mutation(
        "the gradient by one of two outputs is dropped",
        "jaxpp/transforms/microbatch/_slices.py",
        "result[i] = part if result[i] is None else result[i] + part",
        "result[i] = part",
        ("microbatch::gradients_through_any_output",),
    ),
    Mutation(
        "gradients by slices are not divided",
        "jaxpp/transforms/microbatch/_slices.py",
        "s / self.count if mean else s",
        "s",
        ("microbatch::gradients_by_the_sliced_data",),
    ),
    Mutation(
        "an output's gradient is another's",
        "jaxpp/transforms/microbatch/_slices.py",
        "_replaced(zeros, [n], [one])",
        "list(map(jnp.ones_like, values))",
        ("microbatch::gradients_through_any_output",),
    ),
    Mutation(
        "what is carried begins anew with each slice",
        "jaxpp/transforms/microbatch/_slices.py",
        "(accs, those(_reductions.Carry, outputs))",
        "(accs, carried)",
        ("microbatch::a_carried_state_is_that_of_a_loop_over_the_slices_bit_for_bit",),
    ),
    Mutation(
        "what is added to a gradient is taken for zero",
        "jaxpp/transforms/tasks/_accumulators.py",
        "all(v is carry or _primitives.is_zero(v, maker) for v in eqn.invars)",
        "any(v is carry or _primitives.is_zero(v, maker) for v in eqn.invars)",
        ("schedule::each_stage_has_a_task_of_each_kind",),
    ),
    Mutation(
        "a sum of zeros and others is taken for zeros",
        "jaxpp/_primitives.py",
        "all(zero[i] for i in additive)",
        "any(zero[i] for i in additive)",
        ("primitives::one_operand_of_zeros_makes_zeros_of_a_product_alone",),
    ),
    Mutation(
        "a one is taken for a zero",
        "jaxpp/_primitives.py",
        "return np.ndim(atom.val) == 0 and atom.val == 0",
        "return np.ndim(atom.val) == 0",
        (
            "losses",
            "schedule::a_count_goes_up_in_the_stage_that_reads_it_and_what_is_never_read_needs_no_rank",
        ),
    ),
    Mutation(
        "a half of a backward reads a carry that the other half has yet to make",
        "jaxpp/transforms/tasks/_partition.py",
        "            if not more:\n",
        "            if True:\n",
        ("outer_losses::the_gradient_goes_back_through_what_is_carried",),
    ),
    Mutation(
        "both halves of a backward read the next value of a carry",
        "jaxpp/transforms/tasks/_partition.py",
        "return [*copies, *first], list(map(known.rename, second)), early",
        "return first, second, early",
        ("outer_losses::a_carry_that_both_halves_of_a_backward_read",),
    ),
    Mutation(
        "a forward that another one reads is computed in its backward",
        "jaxpp/transforms/tasks/_body.py",
        "any(map(is_backward_call, inner)) and not _are_chained(inner)",
        "any(map(is_backward_call, inner))",
        ("outer_losses::a_loss_over_the_whole_batch_is_scheduled",),
    ),
    Mutation(
        "what a checkpoint computes without a backward is computed in a backward",
        "jaxpp/transforms/tasks/_body.py",
        "any(map(is_backward_call, inner)) and not _are_chained(inner)",
        "not _are_chained(inner)",
        ("outer_losses::what_the_user_checkpoints_is_computed_again_in_its_backward",),
    ),
    Mutation(
        "a carry that no stage makes goes through the stages",
        "jaxpp/transforms/tasks/_partition.py",
        "    _free_carries.carry_before,\n",
        "",
        ("outer_losses::a_carry_that_no_stage_makes_is_read_by_all",),
    ),
    Mutation(
        "an accumulator is doubled",
        "jaxpp/transforms/tasks/_accumulators.py",
        "eqn.replace(invars=[carry, value], outvars=[out])",
        "eqn.replace(invars=[carry, carry], outvars=[out])",
        (
            "schedule::the_sum_of_a_tied_gradient_is_accumulated_apart",
            "placement::tied_parameters",
            "losses",
        ),
    ),
    Mutation(
        "one of two terms is taken twice",
        "jaxpp/transforms/tasks/_accumulators.py",
        "eqn.replace(invars=[value, v], outvars=[partial])",
        "eqn.replace(invars=[value, value], outvars=[partial])",
        ("losses",),
    ),
    Mutation(
        "a term leaves out its transpose",
        "jaxpp/transforms/tasks/_accumulators.py",
        "for eqn in term.linear:",
        "for eqn in term.linear[:0]:",
        ("mixed_precision::tied_parameters_differ_in_rounding_alone", "placement::tied_parameters"),
    ),
    Mutation(
        "a task reads a carry after it was changed",
        "jaxpp/transforms/tasks/_partition.py",
        "return v if writer == position else before",
        "return v",
        ("schedule::each_stage_carries_its_state_through_the_microbatches_in_order",),
    ),
    Mutation(
        "an effect is repeated where its value is read",
        "jaxpp/transforms/tasks/_partition.py",
        "if eqn.effects:\n            return False",
        "if False:\n            return False",
        (
            "effects::a_callback_in_a_stage_leaves_constant_results_alone",
            "effects::ordered_reports_of_one_task_keep_their_order_with_those_around",
            "LAW7",
        ),
    ),
    Mutation(
        "a result that nothing makes does not leave",
        "jaxpp/transforms/tasks/_partition.py",
        "if node.position == self.body.num_stages - 1:",
        "if False:",
        ("schedule::what_no_task_makes_leaves_the_loop",),
    ),
    Mutation(
        "an accumulator is the carry before it",
        "jaxpp/transforms/tasks/_partition.py",
        'if source == "carry" and v is body.carries[i]:',
        'if source == "carry":',
        ("schedule::the_gradient_of_the_mean_loss_is_scheduled_too",),
    ),
    Mutation(
        "a scan in halves runs forwards",
        "jaxpp/transforms/tasks/_split_backward.py",
        '("length", "reverse", "unroll")',
        '("length", "unroll")',
        (
            "split_backward::a_split_backward_gives_the_gradient",
            "split_backward::a_scan_over_layers_is_two_scans",
        ),
    ),
    Mutation(
        "the carries of a half are those of one iteration",
        "jaxpp/transforms/tasks/_split_backward.py",
        "if grown == mine:",
        "if True:",
        ("split_backward",),
    ),
    Mutation(
        "a light equation is moved although the second half makes its operand",
        "jaxpp/transforms/tasks/_split_backward.py",
        "absent.difference_update(eqn.outvars)",
        "absent.clear()",
        ("split_backward",),
    ),
    Mutation(
        "what a step gives back is donated",
        "jaxpp/transforms/place/_lower.py",
        "and (task.rank, value) not in uses.kept",
        "and True",
        ("placement::optimizer", "mesh", "LAWS"),
    ),
    Mutation(
        "an argument that is not donated is",
        "jaxpp/transforms/place/_lower.py",
        "and (value.argument is None or value.argument.donated)",
        "and True",
        ("mesh::arguments_that_are_not_donated_stay",),
    ),
    Mutation(
        "a constant is donated",
        "jaxpp/transforms/place/_lower.py",
        "and value.constant is None\n            and wanted",
        "and wanted",
        ("constants", "place::closing_over_arrays"),
    ),
    Mutation(
        "a reversed loop takes its slices forwards",
        "jaxpp/transforms/place/_task_graph.py",
        'length - 1 - task.microbatch if eqn.params["reverse"] else task.microbatch',
        "task.microbatch",
        ("laws::a_loop_that_runs_backwards_hands_its_state_backwards",),
    ),
    Mutation(
        "tasks that read slices are those that read constants",
        "jaxpp/transforms/place/_task_graph.py",
        '            tuple(r.source == "x" for r in body.inputs),\n',
        "",
        ("place::closing_over_arrays", "randomness", "losses"),
    ),
    Mutation(
        "loops of other lengths share tasks",
        "jaxpp/transforms/place/_task_graph.py",
        "length if indexed else None,",
        "None,",
        ("LAW7",),
    ),
    Mutation(
        "segments that donate other arguments are one",
        "jaxpp/transforms/place/_lower.py",
        "key = task.body, donated, in_specs, out_specs",
        "key = task.body, in_specs, out_specs",
        ("placement::optimizer", "mesh::arguments_that_are_not_donated_stay"),
    ),
    Mutation(
        "tasks of one kind are one",
        "jaxpp/transforms/place/_task_graph.py",
        "key = _jaxprs.structure(jaxpr), pattern",
        "key = body.kind, len(jaxpr.eqns), pattern",
        ("LAW7",),
    ),
    Mutation(
        "nothing is freed",
        "jaxpp/transforms/place/_lower.py",
        "if slots:\n",
        "if False:\n",
        ("place::every_slot_is_freed_after_its_last_use",),
    ),
    Mutation(
        "a value is freed before its last use",
        "jaxpp/transforms/place/_lower.py",
        "self.uses.last.get((self.rank, value), -2) <= index",
        "self.uses.last.get((self.rank, value), -2) <= index + 3",
        ("place::every_slot_is_freed_after_its_last_use", "placement::optimizer"),
    ),
    Mutation(
        "what is sent is sent twice",
        "jaxpp/transforms/place/_lower.py",
        "self.instructions.append(Send(tuple(map(self.slot, values)), message))",
        "self.instructions += [Send(tuple(map(self.slot, values)), message)] * 2",
        ("placement::optimizer", "LAWS"),
    ),
    Mutation(
        "what is received together changes places",
        "jaxpp/transforms/place/_lower.py",
        "Receive(tuple(map(self.slot, values)), message)",
        "Receive(tuple(map(self.slot, values[::-1])), message)",
        ("placement::optimizer", "losses", "LAWS"),
    ),
    Mutation(
        "a message is received at its last use",
        "jaxpp/transforms/place/_lower.py",
        "min(first_read.get(route, index), index)",
        "max(first_read.get(route, index), index)",
        ("placement::optimizer", "LAWS"),
    ),
    Mutation(
        "a constant gets a slot that is used again",
        "jaxpp/transforms/place/_lower.py",
        "if self.vacant and value.constant is None:",
        "if self.vacant:",
        ("place::closing_over_arrays", "constants", "mesh::nothing_is_kept_of_a_step"),
    ),
    Mutation(
        "numbers of one type are one",
        "jaxpp/transforms/place/_task_graph.py",
        "key = aval.dtype.name, np.asarray(literal.val, aval.dtype).tobytes()",
        "key = aval.dtype.name",
        ("placement::optimizer", "place::results_of_all_kinds"),
    ),
    Mutation(
        "arrays of one shape that a step closes over are one",
        "jaxpp/transforms/place/_task_graph.py",
        "key = id(literal.val)",
        "key = aval.shape",
        ("place::closing_over_arrays", "constants"),
    ),
    Mutation(
        "stacked results are in the first row",
        "jaxpp/transforms/place/_task_graph.py",
        "jax.lax.dynamic_update_index_in_dim(next(buffers), y, index, 0)",
        "jax.lax.dynamic_update_index_in_dim(next(buffers), y, 0 * index, 0)",
        ("directions::other_outputs_of_the_loop_are_combined_too", "place::results_of_all_kinds"),
    ),
    Mutation(
        "accumulators are copied, not updated in place",
        "jaxpp/transforms/place/_task_graph.py",
        "donated = (*carries, *range(first, first + len(y_avals)))",
        "donated = ()",
        ("place::accumulators_are_updated_in_place", "LAWS"),
    ),
    Mutation(
        "state is left where it was made",
        "jaxpp/transforms/place/_placement.py",
        "stages=state or home",
        "stages=home",
        (
            "mesh::no_call_moves_state",
            "mesh::results_are_where_the_next_call_needs_them",
            "placement",
        ),
    ),
    Mutation(
        "computations of two ranks are in one level",
        "jaxpp/transforms/place/_segments.py",
        "level[i] = max(level[i], level[j] + apart)",
        "level[i] = max(level[i], level[j])",
        ("placement", "LAWS"),
    ),
    Mutation(
        "what two loops read is one variable made twice",
        "jaxpp/transforms/place/_segments.py",
        "_jaxprs.Substitution((v, _jaxprs.fresh_var(v)) for v in variables)",
        "_jaxprs.Substitution((v, v) for v in variables)",
        ("step::the_last_pass_leaves_segments_and_loops_that_make_each_variable_once",),
    ),
    Mutation(
        "an effect is on all ranks of its value",
        "jaxpp/transforms/place/_placement.py",
        "self._pin(i, frozenset({min(place)}))",
        "self._pin(i, place)",
        ("laws::an_effect_of_a_value_on_several_ranks_happens_once", "effects"),
    ),
    Mutation(
        "the parts of a shared gradient are added up on one rank",
        "jaxpp/transforms/place/_placement.py",
        "places = [p for v, p in candidates if _size(v) == largest]",
        "places = [p for v, p in candidates if _size(v) == largest][:1]",
        ("placement::tied_parameters", "LAWS"),
    ),
    Mutation(
        "an effect before a loop comes after it",
        "jaxpp/transforms/place/_equations.py",
        "for v in [*self.reads[i], *after]:",
        "for v in self.reads[i]:",
        ("effects",),
    ),
    Mutation(
        "the branches of an opened conditional change places",
        "jaxpp/transforms/place/_conditionals.py",
        "if len(cases) == 2 else index, *cases)",
        "if len(cases) == 2 else index, *cases[::-1])",
        ("conditionals::either_branch_is_that_of_the_plain_step",),
    ),
    Mutation(
        "a guarded equation runs where its conditional is not taken",
        "jaxpp/transforms/place/_conditionals.py",
        "[v == k for v, k in zip(own, numbers, strict=True)]",
        "[v == v for v, k in zip(own, numbers, strict=True)]",
        ("conditionals",),
    ),
    Mutation(
        "the configuration is not in the key",
        "jaxpp/_jaxprs.py",
        "            eqn.ctx,\n",
        "",
        ("identity",),
    ),
    Mutation(
        "primitives are known by name",
        "jaxpp/_jaxprs.py",
        "eqn.primitive,\n",
        "eqn.primitive.name,\n",
        ("identity",),
    ),
    Mutation(
        "derivative rules never count",
        "jaxpp/_jaxprs.py",
        "eqn.primitive.name in _primitives.CUSTOM_RULES and not differentiable",
        "eqn.primitive.name in _primitives.CUSTOM_RULES",
        ("identity",),
    ),
    Mutation(
        "parameters called name never count",
        "jaxpp/_jaxprs.py",
        'ignored = {"name"} if eqn.primitive.name == "jit" else set()',
        'ignored = {"name"}',
        ("identity",),
    ),
    Mutation(
        "arrays of one shape are equal",
        "jaxpp/_jaxprs.py",
        "return (str(value.dtype), value.shape, value.tobytes())",
        "return (str(value.dtype), value.shape)",
        ("LAW7", "identity", "jaxprs"),
    ),
    Mutation(
        "0.0 is -0.0",
        "jaxpp/_jaxprs.py",
        "return (type(value), repr(value))",
        "return value",
        ("jaxprs", "identity"),
    ),
    Mutation(
        "numbers of one type are equal",
        "jaxpp/_jaxprs.py",
        '("literal", a.aval, _hashable(a.val, differentiable))',
        '("literal", a.aval)',
        ("jaxprs", "LAW7"),
    ),
    Mutation(
        "the order of operands does not count",
        "jaxpp/_jaxprs.py",
        "tuple(map(atom, eqn.invars)),\n",
        "frozenset(map(atom, eqn.invars)),\n",
        ("jaxprs", "LAW7"),
    ),
    Mutation(
        "the order of results does not count",
        "jaxpp/_jaxprs.py",
        "return head, body, tuple(map(atom, inside.outvars)), consts",
        "return head, body, frozenset(map(atom, inside.outvars)), consts",
        ("jaxprs", "LAW7"),
    ),
    Mutation(
        "an effect whose result nobody reads is dropped",
        "jaxpp/_jaxprs.py",
        "if eqns[i].effects or any(",
        "if any(",
        ("effects", "jaxprs"),
    ),
    Mutation(
        "donation is not in the key of an executable",
        "jaxpp/runtime/executor/_compile.py",
        "return _jaxprs.structure(computation.jaxpr), computation.donated, split, configuration",
        "return _jaxprs.structure(computation.jaxpr), split, configuration",
        ("mesh", "calls"),
    ),
    Mutation(
        "settings are not in the key of an executable",
        "jaxpp/runtime/executor/_compile.py",
        "computation.donated, split, configuration",
        "computation.donated, split, configuration[1]",
        (
            "mesh::another_setting_of_jax_compiles_anew",
            "calls::another_setting_traces_anew_and_an_earlier_one_does_not",
            "LAW7",
        ),
    ),
    Mutation(
        "weak types do not count",
        "jaxpp/transforms/_signature.py",
        "if own.weak_type != aval.weak_type:",
        "if False:",
        ("LAW7",),
    ),
    Mutation(
        "True is 1",
        "jaxpp/transforms/_signature.py",
        "(type(leaf) is not type(value) or leaf != value)",
        "(leaf != value)",
        ("calls", "place::other_shapes_and_dtypes_and_static_values_trace_again"),
    ),
    Mutation(
        "dtypes do not count",
        "jaxpp/transforms/_signature.py",
        "own.shape != aval.shape or own.dtype != aval.dtype",
        "own.shape != aval.shape",
        ("place::other_shapes_and_dtypes_and_static_values_trace_again",),
    ),
    Mutation(
        "what an effect gives is the same for all microbatches",
        "jaxpp/transforms/tasks/_invariants.py",
        "if eqn.effects or any(v in self.varying for v in read):",
        "if any(v in self.varying for v in read):",
        ("laws::what_an_effect_gives_is_not_computed_before_the_loop",),
    ),
    Mutation(
        "other rules are the same function",
        "jaxpp/transforms/tasks/_invariants.py",
        "differentiable=True",
        "differentiable=False",
        ("identity",),
    ),
    Mutation(
        "equal computations of other operands are one",
        "jaxpp/transforms/tasks/_invariants.py",
        "_jaxprs.structure(one.jaxpr, differentiable=True), one.inputs",
        "_jaxprs.structure(one.jaxpr, differentiable=True)",
        ("schedule::what_is_computed_before_a_loop_stays_before_it", "mixed_precision", "LAW7"),
    ),
    Mutation(
        "what the second direction accumulates is lost",
        "jaxpp/transforms/tasks/_accumulators.py",
        "functools.reduce(fold.bind, parts)",
        "parts[0]",
        (
            "directions::the_step_is_that_of_one_device",
            "schedule::the_sum_of_a_tied_gradient_is_accumulated_apart",
        ),
    ),
    Mutation(
        "a reversed loop runs forwards",
        "jaxpp/transforms/tasks/_loop.py",
        "jax.lax.scan(step, carry, xs, length=length, reverse=reverse)",
        "jax.lax.scan(step, carry, xs, length=length)",
        ("laws::a_loop_that_runs_backwards_hands_its_state_backwards",),
    ),
    Mutation(
        "a reversed loop in two directions runs forwards",
        "jaxpp/transforms/tasks/_loop.py",
        "[length - 1 - i for i in own] if reverse else own",
        "own",
        ("directions::a_loop_backwards_takes_its_slices_in_the_same_directions",),
    ),
    Mutation(
        "what a checkpoint computes again is kept",
        "jaxpp/transforms/tasks/_loop.py",
        "if body.recomputes:",
        "if False:",
        (
            "wrap_forward::on_one_device_too_a_backward_computes_again_what_its_forward_does_not_keep",
        ),
    ),
    Mutation(
        "a result is the array of an argument",
        "jaxpp/transforms/place/_flat_step.py",
        "if _jaxprs.is_literal(v) or v in taken:",
        "if _jaxprs.is_literal(v):",
        ("place::results_of_all_kinds", "place::same_argument_twice"),
    ),
    Mutation(
        "results are paired with arguments of other types",
        "jaxpp/transforms/place/_roles.py",
        "own if all(self.out_avals[o] == self.in_avals[i] for o, i in own) else None",
        "own",
        ("calls::what_is_alike_is_handed_on_by_what_it_is_computed_from", "place", "placement"),
    ),
    Mutation(
        "what is freed is held",
        "jaxpp/runtime/executor/_executor.py",
        "                for slot in instruction.slots:\n                    slots[slot] = None",
        "                pass",
        ("executor", "mesh::memory_does_not_grow"),
    ),
    Mutation(
        "a policy is ignored",
        "jaxpp/transforms/stages/_wrap_forward.py",
        "if own is None:",
        "if True:",
        ("wrap_forward::a_policy_keeps_less_and_computes_again",),
    ),
    Mutation(
        "a backward call is taken for a forward",
        "jaxpp/transforms/stages/_marks.py",
        "transposed=not transposed",
        "transposed=transposed",
        ("marks::calls_know_their_stage_and_direction",),
    ),
    Mutation(
        "each replica has the whole",
        "jaxpp/transforms/inside/replicas/_partial_sums.py",
        "jax.lax.broadcasted_iota(jnp.int32, shape, 0) == 0",
        "jax.lax.broadcasted_iota(jnp.int32, shape, 0) >= 0",
        ("deferred_sums::counts_are_exact",),
    ),
    Mutation(
        "the sum over replicas is the first of them",
        "jaxpp/transforms/inside/replicas/_partial_sums.py",
        "return jax.lax.reduce_sum(rows, (0,))",
        "return rows[0]",
        ("deferred_sums::counts_are_exact",),
    ),
    Mutation(
        "what nothing is known of is not named",
        "jaxpp/transforms/inside/propagation/_propagate.py",
        "if any(sizes[a] > 1 for a in axes) and eqn.primitive.name not in _rules.RULES:",
        "if False:",
        ("in_specs::an_unknown_primitive_that_makes_an_array_whole_is_named",),
    ),
    Mutation(
        "what a forward reads from a carry is computed again",
        "jaxpp/transforms/tasks/_loop.py",
        'again = ref.source == "value" and (_jaxprs.is_literal(v) or v not in stale)',
        'again = ref.source == "value"',
        ("recompute::what_a_stage_carries_is_handed_on_once",),
    ),
    Mutation(
        "what has an effect is computed again",
        "jaxpp/transforms/tasks/_loop.py",
        "[e for e in eqns if not (e.effects or lost & set(_jaxprs.variables(e.invars)))]",
        "list(eqns)",
        ("recompute::what_a_stage_prints_is_printed_once",),
    ),
    Mutation(
        "a backward reads what the forward has kept though it is computed again",
        "jaxpp/transforms/place/_task_graph.py",
        "again.get((mb, r.index, body.stage)) or between",
        "between",
        ("recompute::what_is_computed_again_is_dropped",),
    ),
    Mutation(
        "other stages read what a stage computes again",
        "jaxpp/transforms/place/_task_graph.py",
        "again.get((mb, r.index, body.stage)) or",
        "next((v for (m, n, _), v in again.items() if (m, n) == (mb, r.index)), None) or",
        ("recompute::gradients_are_the_same_bits",),
    ),
)

#: Files of what the certificate does not see: transfers, workers, and axes inside a rank.
UNSEEN = ("jaxpp/runtime/", "jaxpp/transforms/inside/")

#: The program on which the certificate refutes each mutation: a step of `tests/certification`, or
#: a random program.
REFUTED_ON = {
    "a mean is a sum": "layers, ZB-H1",
    "a maximum begins with zero": "tied, 1F1B",
    "the last is the first": "aux and keys",
    "examples are put together in another order": "aux and keys",
    "a cotangent is dropped": "gradient outside",
    "the gradient by one of two outputs is dropped": "gradient outside",
    "gradients by slices are not divided": "gradient outside",
    "an output's gradient is another's": "gradient outside",
    "what is carried begins anew with each slice": "carried",
    "what is added to a gradient is taken for zero": "layers, ZB-H1",
    "a one is taken for a zero": "carried",
    "an accumulator is doubled": "tied, 1F1B",
    "one of two terms is taken twice": "random 36",
    "a term leaves out its transpose": "tied, 1F1B",
    "a task reads a carry after it was changed": "carried",
    "an effect is repeated where its value is read": "effects",
    "a result that nothing makes does not leave": "random 36",
    "an accumulator is the carry before it": "layers, ZB-H1",
    "a scan in halves runs forwards": "stacked, ZB-H1",
    "the carries of a half are those of one iteration": "scan in a stage, ZB-H1",
    "what a step gives back is donated": "layers, DualPipe",
    "an argument that is not donated is": "closed over",
    "a constant is donated": "random 36",
    "a reversed loop takes its slices forwards": "carried",
    "tasks that read slices are those that read constants": "alike",
    "loops of other lengths share tasks": "two loops",
    "segments that donate other arguments are one": "random 10",
    "tasks of one kind are one": "alike",
    "a value is freed before its last use": "layers, ZB-H1",
    "what is sent is sent twice": "layers, ZB-H1",
    "what is received together changes places": "tied in other shapes",
    "a message is received at its last use": "layers, interleaved",
    "a constant gets a slot that is used again": "layers, ZB-H1",
    "numbers of one type are one": "layers, ZB-H1",
    "arrays of one shape that a step closes over are one": "closed over",
    "stacked results are in the first row": "aux and keys",
    "an effect is on all ranks of its value": "effects",
    "an effect before a loop comes after it": "effects",
    "the branches of an opened conditional change places": "two loops",
    "a guarded equation runs where its conditional is not taken": "random 36",
    "the configuration is not in the key": "two loops",
    "primitives are known by name": "alike",
    "parameters called name never count": "alike",
    "arrays of one shape are equal": "alike",
    "numbers of one type are equal": "alike",
    "the order of operands does not count": "alike",
    "the order of results does not count": "alike",
    "an effect whose result nobody reads is dropped": "effects",
    "what an effect gives is the same for all microbatches": "effects",
    "equal computations of other operands are one": "before the loop",
    "what the second direction accumulates is lost": "layers, DualPipe",
    "a backward call is taken for a forward": "layers, ZB-H1",
    "what a forward reads from a carry is computed again": "carried, recomputed",
    "what has an effect is computed again": "effects, recomputed",
}

#: Those that it accepts, and why.
KEPT = {
    "JAX adds up a gradient in the dtype of its parameter": (
        "a loop is compared with its definition over the real numbers, where it is the same"
    ),
    "a half of a backward reads a carry that the other half has yet to make": (
        "open: no program here has a state that halves of a backward carry"
    ),
    "both halves of a backward read the next value of a carry": (
        "open: no program here has a state that halves of a backward carry"
    ),
    "a forward that another one reads is computed in its backward": (
        "open: no program here has such a checkpoint"
    ),
    "what a checkpoint computes without a backward is computed in a backward": (
        "open: no program here has such a checkpoint"
    ),
    "a carry that no stage makes goes through the stages": (
        "open: no program here has a carry that no stage makes"
    ),
    "the gradient of a scalar beside another output is accumulated twice": (
        "no program here takes the gradient of an output beside one that is no scalar"
    ),
    "a mean is divided after it was made narrow": (
        "a loop is compared with its definition over the real numbers, where it is the same"
    ),
    "a number is that of one slice": (
        "the definition takes the outputs as `microbatch` has traced them"
    ),
    "an array that one entry covers with the batch is sliced": (
        "the definition takes the roles of inputs as `microbatch` has read them from its options"
    ),
    "a sum is in the output's dtype": (
        "the definition takes the operators as `microbatch` has read them from its options"
    ),
    "a sum of zeros and others is taken for zeros": (
        "no program here adds a number to rows that are known to be zeros"
    ),
    "a light equation is moved although the second half makes its operand": (
        "no program here has a scan in which an equation is moved before one that must stay"
    ),
    "nothing is freed": "the same values in more memory",
    "accumulators are copied, not updated in place": "the same values in more memory",
    "state is left where it was made": "the same values with more transfers",
    "computations of two ranks are in one level": (
        "levels are set a second time, from the last to the first; no program needs the first"
    ),
    "what two loops read is one variable made twice": (
        "both are made alike, and have the same value"
    ),
    "the parts of a shared gradient are added up on one rank": (
        "the same values with more transfers"
    ),
    "derivative rules never count": "nothing differentiates a placed step",
    "0.0 is -0.0": "they are one real number; `exact` is false, and was true",
    "weak types do not count": "a lowered step is the same; another call would be taken for it",
    "True is 1": "a lowered step is the same; another call would be taken for it",
    "dtypes do not count": "a lowered step is the same; another call would be taken for it",
    "other rules are the same function": "nothing differentiates a placed step",
    "a reversed loop runs forwards": "a placed step does not run the loop of one device",
    "a reversed loop in two directions runs forwards": (
        "a placed step does not run the loop of one device"
    ),
    "what a checkpoint computes again is kept": "a placed step does not run the loop of one device",
    "a result is the array of an argument": (
        "the same value; the caller's array would be given back, and not a copy"
    ),
    "results are paired with arguments of other types": "the same values with more transfers",
    "a policy is ignored": "the same values in more memory",
    "a backward reads what the forward has kept though it is computed again": (
        "the same values in more memory"
    ),
    "other stages read what a stage computes again": (
        "the same values; what is computed again would be sent"
    ),
}

#: Those that nothing catches, and why.
KNOWN = {
    "computations of two ranks are in one level": (
        "levels are set a second time, from the last to the first; no test needs the first"
    ),
    "a light equation is moved although the second half makes its operand": (
        "no test has a scan in which an equation is moved before one that must stay"
    ),
    "results are paired with arguments of other types": (
        "it costs transfers alone, and no test has alike pytrees of other types"
    ),
}
