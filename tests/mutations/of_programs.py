"""Mutations of programs, of what devices of a rank do, and of what runs them."""

from tests.mutations.mutation import Mutation

MUTATIONS = (
    Mutation(
        "what a step gives back is donated",
        "jaxpp/transforms/graph/_graph.py",
        "and (task.rank, value) not in uses.kept",
        "and True",
        tests=("placement::optimizer", "mesh", "LAWS"),
        refuted_on="layers, DualPipe",
    ),
    Mutation(
        "an argument that is not donated is",
        "jaxpp/transforms/graph/_graph.py",
        "is_ours = value.argument is None or value.argument.donated",
        "is_ours = True",
        tests=("mesh::arguments_that_are_not_donated_stay",),
        refuted_on="closed over",
    ),
    Mutation(
        "a constant is donated",
        "jaxpp/transforms/graph/_graph.py",
        "return is_last and is_ours and value.constant is None",
        "return is_last and is_ours",
        tests=("constants", "place::closing_over_arrays"),
        refuted_on="random 36",
    ),
    Mutation(
        "segments that donate other arguments are one",
        "jaxpp/transforms/graph/_graph.py",
        "key = task.body, donated, in_specs, out_specs",
        "key = task.body, in_specs, out_specs",
        tests=("placement::optimizer", "mesh::arguments_that_are_not_donated_stay"),
        refuted_on="random 10",
    ),
    Mutation(
        "nothing is freed",
        "jaxpp/transforms/graph/_graph.py",
        "if slots:\n",
        "if False:\n",
        tests=("place::every_slot_is_freed_after_its_last_use",),
        kept="the same values in more memory",
    ),
    Mutation(
        "a value is freed before its last use",
        "jaxpp/transforms/graph/_graph.py",
        "self.uses.last.get((self.rank, value), -2) <= index",
        "self.uses.last.get((self.rank, value), -2) <= index + 3",
        tests=("place::every_slot_is_freed_after_its_last_use", "placement::optimizer"),
        refuted_on="layers, ZB-H1",
        like="an activation freed while it is needed",
    ),
    Mutation(
        "what is sent is sent twice",
        "jaxpp/transforms/graph/_graph.py",
        "self.instructions.append(Send(tuple(map(self.slot, values)), message))",
        "self.instructions += [Send(tuple(map(self.slot, values)), message)] * 2",
        tests=("placement::optimizer", "LAWS"),
        refuted_on="layers, ZB-H1",
    ),
    Mutation(
        "what is received together changes places",
        "jaxpp/transforms/graph/_graph.py",
        "Receive(tuple(map(self.slot, values)), message)",
        "Receive(tuple(map(self.slot, values[::-1])), message)",
        tests=("placement::optimizer", "losses", "LAWS"),
        refuted_on="tied in other shapes",
        like="sends and receives in another order",
    ),
    Mutation(
        "a message is received at its last use",
        "jaxpp/transforms/graph/_graph.py",
        "min(first_read.get(route, index), index)",
        "max(first_read.get(route, index), index)",
        tests=("placement::optimizer", "LAWS"),
        refuted_on="layers, interleaved",
    ),
    Mutation(
        "a constant gets a slot that is used again",
        "jaxpp/transforms/graph/_graph.py",
        "if self.vacant and value.constant is None:",
        "if self.vacant:",
        tests=("place::closing_over_arrays", "constants", "mesh::nothing_is_kept_of_a_step"),
        refuted_on="layers, ZB-H1",
    ),
    Mutation(
        "donation is not in the key of an executable",
        "jaxpp/runtime/executor/_compile.py",
        "return jaxprs.structure(computation.jaxpr), computation.donated, split, configuration",
        "return jaxprs.structure(computation.jaxpr), split, configuration",
        tests=("mesh", "calls"),
        unseen="executables are made of the programs, after them",
    ),
    Mutation(
        "settings are not in the key of an executable",
        "jaxpp/runtime/executor/_compile.py",
        "computation.donated, split, configuration",
        "computation.donated, split, configuration[1]",
        tests=(
            "mesh::another_setting_of_jax_compiles_anew",
            "calls::another_setting_traces_anew_and_an_earlier_one_does_not",
            "LAW7",
        ),
        unseen="executables are made of the programs, after them",
    ),
    Mutation(
        "what is freed is held",
        "jaxpp/runtime/executor/_executor.py",
        "                for slot in instruction.slots:\n                    slots[slot] = None",
        "                pass",
        tests=("executor", "mesh::memory_does_not_grow"),
        unseen="the programs free it; what runs them comes after",
    ),
    Mutation(
        "the sum over replicas is the first of them",
        "jaxpp/transforms/inside/_batch.py",
        "total = collective(summed, axis)",
        "total = summed",
        tests=("replicas::three_steps_are_bitwise_those_of_a_loop_over_replicas",),
        refuted_on="replicas on devices",
    ),
    Mutation(
        "sums of gradients are not scattered",
        "jaxpp/transforms/inside/_batch.py",
        "return next((n for n, (after, before) in pairs if after != before), None)",
        "return None",
        tests=("replicas::the_compiled_tasks_have_no_collective_over_the_replicas",),
        kept="the same values with more transfers",
    ),
    Mutation(
        "explicit axes move the examples of replicas",
        "jaxpp/transforms/inside/_batch.py",
        "changed.update(found)",
        "pass",
        tests=("axis_types::replicas_have_their_own_examples_on_explicit_axes_too",),
        unseen="how arrays are split is the compiler's",
    ),
    Mutation(
        "a device shares no microbatch with the others",
        "jaxpp/transforms/inside/_batch.py",
        "entries[dimension] = (*entries[dimension], name)",
        "pass",
        tests=("in_specs::devices_share_the_examples_of_a_loop_without_replicas",),
        unseen="how arrays are split is the compiler's",
    ),
    Mutation(
        "what is sent is given away",
        "jaxpp/transforms/graph/_graph.py",
        "        self.kept |= {(source, value), (target, value)}\n",
        "",
        refuted_on="replicas, DualPipe",
    ),
    Mutation(
        "what is sent is freed before",
        "jaxpp/transforms/graph/_graph.py",
        "        writer.send(sends.get((index, task.rank), ()))\n        writer.free()",
        "        writer.free()\n        writer.send(sends.get((index, task.rank), ()))",
        refuted_on="layers, ZB-H1",
        like="an activation freed before it is sent",
    ),
    Mutation(
        "all messages have one tag",
        "jaxpp/transforms/graph/_graph.py",
        "            tag,\n            source,",
        "            0,\n            source,",
        refuted_on="layers, ZB-H1",
    ),
    Mutation(
        "what a task makes is sent before it",
        "jaxpp/transforms/graph/_graph.py",
        "sends.setdefault((index, source), []).append((values, message))",
        (
            "sends.setdefault((index - 1 if index > 0 else -1, source), "
            "[]).append((values, message))"
        ),
        refuted_on="layers, ZB-H1",
        like="send and receive in another order",
    ),
    Mutation(
        "results of the step change places",
        "jaxpp/transforms/graph/_graph.py",
        "writers[rank].outputs.append((n, writers[rank].slot(value)))",
        "writers[rank].outputs.append((len(graph.results) - 1 - n, writers[rank].slot(value)))",
        refuted_on="layers, ZB-H1",
    ),
    Mutation(
        "arguments of the step change places",
        "jaxpp/transforms/graph/_graph.py",
        "writers[rank].inputs.append((n, writers[rank].slot(value)))",
        "writers[rank].inputs.append((len(graph.arguments) - 1 - n, writers[rank].slot(value)))",
        refuted_on="layers, ZB-H1",
        like="ZeRO: the state of another part",
    ),
    Mutation(
        "what later tasks read is given away",
        "jaxpp/transforms/graph/_graph.py",
        "uses.last[task.rank, value] == index",
        "uses.last[task.rank, value] >= index",
        refuted_on="nested conditionals",
        like="an activation freed early",
    ),
    Mutation(
        "a value's slot is that of another",
        "jaxpp/transforms/graph/_graph.py",
        (
            "            if self.vacant and value.constant is None:\n"
            "                self.slots[value] = self.vacant.pop()"
        ),
        (
            "            if self.vacant and value.constant is None:\n"
            "                self.slots[value] = self.vacant[-1]"
        ),
        refuted_on="layers, ZB-H1",
    ),
    Mutation(
        "only the first value of a message is sent",
        "jaxpp/transforms/graph/_graph.py",
        "self.instructions.append(Send(tuple(map(self.slot, values)), message))",
        (
            "self.instructions.append(Send(tuple(map(self.slot, values[:1] * "
            "len(values))), message))"
        ),
        refuted_on="replicas, DualPipe",
    ),
    Mutation(
        "results that stay whole are left on one rank",
        "jaxpp/transforms/graph/_graph.py",
        "        for rank in ranks:\n            writers[rank].outputs",
        "        for rank in ranks[:1]:\n            writers[rank].outputs",
        tests=("placement::tied_parameters", "mesh::no_call_moves_state"),
        kept="the same values with more transfers",
        like="parameters updated on one rank alone",
    ),
    Mutation(
        "all replicas have the rows of the first",
        "jaxpp/transforms/inside/_batch.py",
        "summed = functools.reduce(combine, list(rows))",
        "summed = rows[0]",
        refuted_on="replicas on devices",
        like="gradients of one replica of a device",
    ),
    Mutation(
        "the greatest of replicas is that of sums",
        "jaxpp/transforms/inside/_batch.py",
        "        key = how, dimension, rows.aval\n",
        "        key = dimension, rows.aval\n",
        refuted_on="replicas on devices",
    ),
    Mutation(
        "a sum over devices is a mean",
        "jaxpp/transforms/inside/_batch.py",
        '"sum": (jnp.add, jax.lax.psum),',
        '"sum": (jnp.add, jax.lax.pmean),',
        refuted_on="replicas on devices",
        like="gradients divided by the number of replicas once more",
    ),
    Mutation(
        "the greatest over devices is the least",
        "jaxpp/transforms/inside/_batch.py",
        "return functools.reduce(combine, list(parts))",
        "return functools.reduce(jnp.minimum, list(parts))",
        refuted_on="replicas on devices",
    ),
    Mutation(
        "what is scattered is the sum of the first part",
        "jaxpp/transforms/inside/_batch.py",
        "total = jax.lax.psum_scatter(summed, axis, scatter_dimension=dimension, tiled=True)",
        (
            "size = summed.shape[dimension] // jax.lax.axis_size(axis)\n"
            "            total = jax.lax.slice_in_dim(jax.lax.psum(summed, axis), 0, size, "
            "axis=dimension)"
        ),
        refuted_on="replicas, ZeRO",
        like="ZeRO: the wrong part of the gradients",
    ),
    Mutation(
        "a part of a gradient is not reduced before it is scattered",
        "jaxpp/transforms/inside/_batch.py",
        "total = jax.lax.psum_scatter(summed, axis, scatter_dimension=dimension, tiled=True)",
        (
            "size = summed.shape[dimension] // jax.lax.axis_size(axis)\n"
            "            start = jax.lax.axis_index(axis) * size\n"
            "            total = jax.lax.dynamic_slice_in_dim(summed, start, size, dimension)"
        ),
        refuted_on="replicas, ZeRO",
        like="ZeRO and pipelines: DeepSpeed 855, gradients never reduced",
    ),
    Mutation(
        "each device runs all its replicas on the rows of the first",
        "jaxpp/transforms/inside/_batch.py",
        "lambda _, given: (None, of_replica(given))",
        "lambda _, given: (None, of_replica([x[0] for x in rows]))",
        refuted_on="replicas on devices",
    ),
    Mutation(
        "a scan over the rows of replicas gives each the first",
        "jaxpp/transforms/inside/_batch.py",
        "return [y[None] for y in of_replica([jax.lax.squeeze(x, (0,)) for x in rows])]",
        (
            "return [y[None] for y in of_replica([jax.lax.all_gather(x, inside.replicas, "
            "tiled=True)[0] if inside else x[0] for x in rows])]"
        ),
        refuted_on="replicas, ZeRO",
        like="all replicas see the batch of the first",
    ),
    Mutation(
        "the sum of scattered rows is put together along the first dimension",
        "jaxpp/transforms/inside/_batch.py",
        "scattered = PartitionSpec(*[None] * (dimension or 0), axis)",
        "scattered = PartitionSpec(axis)",
        refuted_on="replicas, ZeRO",
        like="ZeRO: partitions put together along another dimension",
    ),
    Mutation(
        "examples that devices share take the place of others",
        "jaxpp/transforms/inside/_batch.py",
        "operands[n] = result = jaxprs.fresh_var(v)",
        "operands[-2] = result = jaxprs.fresh_var(v)",
        refuted_on="shared examples",
    ),
    Mutation(
        "messages are split as others",
        "jaxpp/transforms/graph/_graph.py",
        (
            "            tuple(v.aval for v in values),\n"
            "            tuple(specs[v] for v in values) if specs else (),"
        ),
        (
            "            tuple(v.aval for v in values),\n"
            "            tuple(specs[v] for v in values[::-1]) if specs else (),"
        ),
        tests=("replicas",),
        unseen="how arrays are split in a rank is JAX's",
    ),
    Mutation(
        "operands of computations are split as others",
        "jaxpp/transforms/graph/_graph.py",
        "            for values in (task.inputs, task.outputs)",
        (
            "            for values in (task.inputs[::-1] if "
            "len({v.aval.ndim for v in task.inputs}) == 1 else task.inputs, task.outputs)"
        ),
        tests=("replicas",),
        unseen="how arrays are split in a rank is JAX's, which refuses it",
    ),
    Mutation(
        "an argument's slot is freed after its first use",
        "jaxpp/transforms/graph/_graph.py",
        "        self.last[rank, value] = index\n",
        "        self.last.setdefault((rank, value), index)\n",
        refuted_on="layers, ZB-H1",
    ),
    Mutation(
        "the greatest over devices is that of the first",
        "jaxpp/transforms/inside/_batch.py",
        "return functools.reduce(combine, list(parts))",
        "return parts[0]",
        refuted_on="replicas on devices",
    ),
)
