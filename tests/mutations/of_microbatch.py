"""Mutations of `microbatch`."""

from tests.mutations.mutation import Mutation

MUTATIONS = (
    Mutation(
        "a mean is a sum",
        "jaxpp/transforms/microbatch/_reductions.py",
        "lambda acc, m: acc / m,",
        "lambda acc, m: acc,",
        tests=("microbatch::the_gradient_is_that_of_the_full_batch",),
        refuted_on="layers, ZB-H1",
        like="gradients added up over microbatches, and not averaged: DeepSpeed, issue 7773",
    ),
    Mutation(
        "a maximum begins with zero",
        "jaxpp/transforms/microbatch/_reductions.py",
        "filled(x, -jnp.inf)",
        "filled(x, 0)",
        tests=("microbatch::reductions",),
        refuted_on="tied, 1F1B",
    ),
    Mutation(
        "the last is the first",
        "jaxpp/transforms/microbatch/_reductions.py",
        "lambda acc, x: x, lambda",
        "lambda acc, x: acc, lambda",
        tests=("microbatch::reductions",),
        refuted_on="aux and keys",
    ),
    Mutation(
        "examples are put together in another order",
        "jaxpp/transforms/microbatch/_reductions.py",
        "return stacked.reshape(stacked.shape[0] * stacked.shape[1],",
        "return stacked.swapaxes(0, 1).reshape(stacked.shape[0] * stacked.shape[1],",
        tests=("microbatch::reductions",),
        refuted_on="aux and keys",
    ),
    Mutation(
        "a mean is taken for a sum",
        "jaxpp/transforms/microbatch/_reductions.py",
        "operator = REDUCTIONS[reduce]",
        'operator = REDUCTIONS["mean" if reduce == "sum" else reduce]',
        tests=("microbatch::reductions",),
        refuted_on="gradient outside",
    ),
    Mutation(
        "the accumulators of outputs change places",
        "jaxpp/transforms/microbatch/_outputs.py",
        'of_arrays(dtype, "accumulator_dtype", is_none)',
        'of_arrays(dtype, "accumulator_dtype", is_none)[::-1]',
        tests=("mixed_precision",),
        refuted_on="as given",
    ),
    Mutation(
        "the last slice comes first",
        "jaxpp/transforms/microbatch/_arguments.py",
        "return jnp.moveaxis(jax.lax.reshape(x, shape, out_sharding=split), axis, 0)",
        "return jnp.moveaxis(jax.lax.reshape(x, shape, out_sharding=split), axis, 0)[::-1]",
        tests=("microbatch::reductions",),
        refuted_on="layers, ZB-H1",
    ),
    Mutation(
        "another axis is sliced",
        "jaxpp/transforms/microbatch/_arguments.py",
        "axis = axis % x.ndim",
        "axis = 0",
        tests=("microbatch",),
        refuted_on="as given",
    ),
    Mutation(
        "a sum is in the output's dtype",
        "jaxpp/transforms/microbatch/_reductions.py",
        "jnp.dtype(jnp.float32) if jnp.finfo(x.dtype).bits < 32 else x.dtype",
        "x.dtype",
        tests=("mixed_precision::sums_are_in_the_accumulators_dtype",),
        refuted_on="as given",
    ),
    Mutation(
        "the gradient of a scalar beside another output is accumulated twice",
        "jaxpp/transforms/microbatch/_slices.py",
        "parts = loop.gradients(",
        "parts += loop.gradients(",
        tests=("schedule::the_gradient_of_any_output_is_scheduled",),
        refuted_on="over the batch",
    ),
    Mutation(
        "a mean is divided after it was made narrow",
        "jaxpp/transforms/microbatch/_reductions.py",
        "finish(acc, m).astype(result)",
        "finish(acc.astype(result), m)",
        tests=("mixed_precision::a_mean_does_not_overflow_before_it_is_divided",),
        kept=(
            "it overflows in other places; a cast and a division are in either order the "
            "same numbers"
        ),
    ),
    Mutation(
        "a number is that of one slice",
        "jaxpp/transforms/microbatch/_microbatch.py",
        "_jaxprs.trace(_with_arrays(fun),",
        "_jaxprs.trace(_signature.positional(fun),",
        tests=("microbatch::the_sum_of_a_count_is_that_of_the_whole_batch",),
        refuted_on="as given",
    ),
    Mutation(
        "an array that one entry covers with the batch is sliced",
        "jaxpp/transforms/microbatch/_arguments.py",
        "entry.number is None or entry.number in examples",
        "False",
        tests=("microbatch::an_array_as_long_as_there_are_microbatches_is_no_entry_of_the_batch",),
        kept="what should be an error is computed as `in_axes` says",
    ),
    Mutation(
        "JAX adds up a gradient in the dtype of its parameter",
        "jaxpp/transforms/microbatch/_slices.py",
        "if not wider:",
        "if True:",
        tests=("mixed_precision::gradients_by_narrow_parameters_are_added_up_in_float32",),
        refuted_on="contrastive, half precision",
    ),
    Mutation(
        "a cotangent is dropped",
        "jaxpp/transforms/microbatch/_slices.py",
        "(i, given[k] * g) for",
        "(i, g) for",
        tests=("microbatch::gradients_through_any_output",),
        refuted_on="gradient outside",
    ),
    Mutation(
        "the gradient by one of two outputs is dropped",
        "jaxpp/transforms/microbatch/_slices.py",
        "result[i] = part if result[i] is None else result[i] + part",
        "result[i] = part",
        tests=("microbatch::gradients_through_any_output",),
        refuted_on="gradient outside",
    ),
    Mutation(
        "gradients by slices are not divided",
        "jaxpp/transforms/microbatch/_slices.py",
        "s / self.count if mean else s",
        "s",
        tests=("microbatch::gradients_by_the_sliced_data",),
        refuted_on="gradient outside",
    ),
    Mutation(
        "an output's gradient is another's",
        "jaxpp/transforms/microbatch/_slices.py",
        "_replaced(zeros, [n], [one])",
        "list(map(jnp.ones_like, values))",
        tests=("microbatch::gradients_through_any_output",),
        refuted_on="gradient outside",
    ),
    Mutation(
        "what is carried begins anew with each slice",
        "jaxpp/transforms/microbatch/_slices.py",
        "(accs, those(_reductions.Carry, outputs))",
        "(accs, carried)",
        tests=("microbatch::a_carried_state_is_that_of_a_loop_over_the_slices_bit_for_bit",),
        refuted_on="carried",
    ),
    Mutation(
        "the dtype that the user gives for sums is ignored",
        "jaxpp/transforms/microbatch/_reductions.py",
        ("        return jnp.dtype(dtype)\n    return jnp.dtype(jnp.float32)"),
        ("        return x.dtype\n    return jnp.dtype(jnp.float32)"),
        refuted_on="half precision",
        like="Megatron: main gradients in bfloat16",
    ),
    Mutation(
        "the cotangents of rows are those of other microbatches",
        "jaxpp/transforms/microbatch/_reductions.py",
        "ct = ct.reshape(num_microbatches, len(ct) // num_microbatches, *ct.shape[1:])",
        (
            "ct = ct.reshape(len(ct) // num_microbatches, num_microbatches, "
            "*ct.shape[1:]).swapaxes(0, 1)"
        ),
        refuted_on="over the batch",
    ),
    Mutation(
        "the cotangent of a mean is that of a sum",
        "jaxpp/transforms/microbatch/_reductions.py",
        'return "whole", ct / num_microbatches if operator.name == "mean" else ct',
        'return "whole", ct',
        refuted_on="over the batch",
        like="DeepSpeed issue 7773: sums of gradients for means",
    ),
    Mutation(
        "gradients are added up in the narrowest dtype",
        "jaxpp/transforms/microbatch/_reductions.py",
        "return max(dtypes, key=lambda dtype: dtype.itemsize, default=x.dtype)",
        "return min(dtypes, key=lambda dtype: dtype.itemsize, default=x.dtype)",
        refuted_on="outside, half precision",
    ),
    Mutation(
        "the greatest of integers is at least zero",
        "jaxpp/transforms/microbatch/_reductions.py",
        "return _filled(x, jnp.iinfo(x.dtype).min)",
        "return _filled(x, 0)",
        refuted_on="integers",
    ),
    Mutation(
        "any truth value is true",
        "jaxpp/transforms/microbatch/_reductions.py",
        "return _filled(x, False)",
        "return _filled(x, True)",
        refuted_on="integers",
    ),
    Mutation(
        "what replicas carry becomes that of the last",
        "jaxpp/transforms/microbatch/_reductions.py",
        'own = "mean" if merge is None and is_inexact(x) else merge',
        'own = "last" if merge is None and is_inexact(x) else merge',
        refuted_on="replicas",
        like="BatchNorm statistics of one replica",
    ),
    Mutation(
        "an operator of the user's does not finish",
        "jaxpp/transforms/microbatch/_reductions.py",
        "return Custom(reduce.init, reduce.combine, reduce.finish, merge=merge)",
        "return Custom(reduce.init, reduce.combine, lambda acc, m: acc, merge=merge)",
        refuted_on="operators",
    ),
    Mutation(
        "an operator of the user's takes its operands in another order",
        "jaxpp/transforms/microbatch/_reductions.py",
        "return Custom(reduce.init, reduce.combine, reduce.finish, merge=merge)",
        (
            "return Custom(reduce.init, lambda a, x: reduce.combine(x, a), reduce.finish, "
            "merge=merge)"
        ),
        refuted_on="operators",
    ),
    Mutation(
        "a weak type is lost",
        "jaxpp/transforms/microbatch/_reductions.py",
        'if not x.shape and getattr(x, "weak_type", False):',
        "if False:",
        refuted_on="as given",
    ),
    Mutation(
        "a slice has every so many examples",
        "jaxpp/transforms/microbatch/_arguments.py",
        "return jnp.moveaxis(jax.lax.reshape(x, shape, out_sharding=split), axis, 0)",
        (
            "return jnp.stack([jnp.take(x, jnp.arange(i, x.shape[axis], count), axis) for "
            "i in range(count)])"
        ),
        refuted_on="layers, ZB-H1",
    ),
    Mutation(
        "the first microbatch is seen twice, and the last never",
        "jaxpp/transforms/microbatch/_arguments.py",
        "return jnp.moveaxis(jax.lax.reshape(x, shape, out_sharding=split), axis, 0)",
        (
            "rows = jnp.moveaxis(jax.lax.reshape(x, shape, out_sharding=split), axis, 0)\n"
            "    return jnp.concatenate([rows[:1], rows[:-1]])"
        ),
        refuted_on="layers, ZB-H1",
        like="the last microbatch is missing",
    ),
    Mutation(
        "all microbatches are the first",
        "jaxpp/transforms/microbatch/_arguments.py",
        "return jnp.moveaxis(jax.lax.reshape(x, shape, out_sharding=split), axis, 0)",
        (
            "rows = jnp.moveaxis(jax.lax.reshape(x, shape, out_sharding=split), axis, 0)\n"
            "    return jnp.concatenate([rows[:1]] * count)"
        ),
        refuted_on="dropout",
        like="dropout seed or positions of the first microbatch for all",
    ),
    Mutation(
        "a mean over replicas is not divided by their number",
        "jaxpp/transforms/microbatch/_slices.py",
        "return op.finish(next(accs), self.count)",
        "return op.finish(next(accs), self.count // self.replicas)",
        refuted_on="replicas",
        like="DeepSpeed, Megatron: gradients scaled by the number of replicas",
    ),
    Mutation(
        "what replicas carry is added up",
        "jaxpp/transforms/microbatch/_slices.py",
        (
            "return (total / rows.shape[0]).astype(rows.dtype) if is_carried and how == "
            '"mean" else total'
        ),
        "return total",
        refuted_on="replicas",
    ),
    Mutation(
        "the last of replicas is the first",
        "jaxpp/transforms/microbatch/_slices.py",
        ("def _last(rows: Any) -> Any:\n    return rows[-1]"),
        ("def _last(rows: Any) -> Any:\n    return rows[0]"),
        kept="a scheduled loop takes the last by a rule of its own",
    ),
    Mutation(
        "the greatest over replicas is the least",
        "jaxpp/transforms/microbatch/_slices.py",
        "for combine in (jnp.add, jnp.maximum))",
        "for combine in (jnp.add, jnp.minimum))",
        refuted_on="replicas",
    ),
    Mutation(
        "rows of replicas are in turns",
        "jaxpp/transforms/microbatch/_slices.py",
        "    return jax.lax.reshape(rows, shape, out_sharding=split)\n",
        "    return jax.lax.reshape(rows.swapaxes(0, 1), shape, out_sharding=split)\n",
        refuted_on="replicas",
    ),
    Mutation(
        "replicas take each other's slices",
        "jaxpp/transforms/microbatch/_slices.py",
        "rows = [_by_replica(x, replicas) for x in slices]",
        "rows = [_by_replica(x, replicas)[::-1] for x in slices]",
        refuted_on="replicas",
    ),
    Mutation(
        "accumulators of replicas are merged in another order",
        "jaxpp/transforms/microbatch/_slices.py",
        "return functools.reduce(combine, each)",
        "return functools.reduce(lambda a, b: combine(b, a), each)",
        refuted_on="operators, replicas",
    ),
    Mutation(
        "the gradient of rows is a mean",
        "jaxpp/transforms/microbatch/_slices.py",
        'names = ["stack" if self.roles[i] == "slice" else "sum" for i in active]',
        'names = ["stack" if self.roles[i] == "slice" else "mean" for i in active]',
        refuted_on="over the batch",
        like="AReaL 1273: gradients divided once too often",
    ),
    Mutation(
        "gradients of other outputs are dropped",
        "jaxpp/transforms/microbatch/_slices.py",
        "if active and not given.keys() <= set(loop.scalars):",
        "if active and not given.keys() & set(loop.scalars):",
        refuted_on="over the batch",
        like="NeMo 1412: the auxiliary loss has no gradient",
    ),
    Mutation(
        "a cotangent counts twice",
        "jaxpp/transforms/microbatch/_slices.py",
        "(i, given[k] * g) for",
        "(i, given[k] * given[k] * g) for",
        refuted_on="gradient outside",
        like="a loss scale that is applied twice",
    ),
    Mutation(
        "microbatches come in the reverse order",
        "jaxpp/transforms/microbatch/_slices.py",
        "step, (init, first), list(slices), length=length\n",
        "step, (init, first), list(slices), length=length, reverse=True\n",
        refuted_on="aux and keys",
    ),
    Mutation(
        "a gradient comes in the dtype of its sum",
        "jaxpp/transforms/microbatch/_slices.py",
        (
            "return tuple(g if g is None or g.dtype == x.dtype else g.astype(x.dtype) for "
            "g, x in pairs)"
        ),
        "return tuple(g for g, x in pairs)",
        refuted_on="mean outside, half precision",
    ),
    Mutation(
        "cotangents of rows stay wide",
        "jaxpp/transforms/microbatch/_slices.py",
        "return pullback([ct.astype(y.dtype) for ct, y in zip(cts, primals, strict=True)])",
        (
            "return pullback([ct.astype(jnp.bfloat16).astype(y.dtype) for ct, y in "
            "zip(cts, primals, strict=True)])"
        ),
        refuted_on="over the batch",
    ),
    Mutation(
        "the accumulator keeps the last gradient alone",
        "jaxpp/transforms/microbatch/_slices.py",
        "accs = [op.combine(acc, outputs[i]) for (i, op), acc in pairs]",
        "accs = [op.combine(op.init(shapes[i]), outputs[i]) for (i, op), acc in pairs]",
        refuted_on="layers, ZB-H1",
        like="NeMo 3530: accumulated gradients are wiped between microbatches",
    ),
    Mutation(
        "gradients are divided in each microbatch",
        "jaxpp/transforms/microbatch/_reductions.py",
        ("lambda acc, x: acc + x,\n        lambda acc, m: acc / m,"),
        ("lambda acc, x: (acc + x) / 2,\n        lambda acc, m: acc,"),
        refuted_on="layers, ZB-H1",
        like="torchtitan 1733: an average that forgets",
    ),
    Mutation(
        "a gradient is doubled in each microbatch",
        "jaxpp/transforms/microbatch/_reductions.py",
        ("lambda acc, x: acc + x,\n        lambda acc, m: acc / m,"),
        ("lambda acc, x: acc + acc + x,\n        lambda acc, m: acc / m,"),
        refuted_on="scaled half precision",
        like="Megatron 6660: gradients doubled with each microbatch",
    ),
)
