"""The differences between JAX versions; each function is named by what it gives.

This is the only module that tests versions, or that uses names which JAX does not export.
"""

import _thread
import contextlib
import functools
import importlib
import io
import logging
import os
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.extend.core as jex
import numpy as np
from jax._src import (
    api_util,
    array,
    checkify,
    clusters,
    config,
    core,
    dispatch,
    distributed,
    dtypes,
    effects,
    literals,
    source_info_util,
    xla_bridge,
)
from jax._src.interpreters.ad import JVPTrace, LinearizeTrace
from jax._src.interpreters.partial_eval import DynamicJaxprTrace
from jax._src.state import AbstractRef, discharge
from jax.core import Tracer
from jax.experimental import serialize_executable
from jax.experimental.key_reuse import _core as key_reuse
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import primitives
from jax.interpreters import partial_eval
from jax.sharding import AbstractMesh
from jaxlib import _jax, xla_client  # pyright: ignore[reportAttributeAccessIssue]

# This makes an equation's source line the user's, in error messages and in profiles.
source_info_util.register_exclusion(os.path.join(os.path.dirname(__file__), ""))

#: The memory kind of arrays in `jax.memory.Space.Host`.
PINNED_HOST = "pinned_host"

#: On JAX 0.12 a jaxpr and its constants are one class; before, they were two.
JaxprTypes = (jex.Jaxpr, jex.ClosedJaxpr)


def make_closed_jaxpr(invars, outvars, eqns, name: str = "jaxpp") -> jex.ClosedJaxpr:
    """Builds a closed jaxpr without constants from variables and equations."""
    debug_info = jex.DebugInfo(
        "jaxpp", name, tuple(f"x{i}" for i in range(len(invars))), ("",) * len(outvars)
    )
    effects = frozenset(e for eqn in eqns for e in eqn.effects)
    jaxpr = jex.Jaxpr([], list(invars), list(outvars), list(eqns), effects, debug_info)
    return jex.ClosedJaxpr(jaxpr, [])


def with_closed_type(jaxpr, template):
    """Gives `jaxpr` the type (open or closed) that a parameter `template` has."""
    closed = isinstance(template, jex.ClosedJaxpr)
    return jaxpr if closed else jaxpr.jaxpr


def with_equations(jaxpr, eqns, outvars=None, invars=None):
    """Replaces the equations and, if given, the results and inputs of an open or closed jaxpr.

    The jaxpr keeps its type and constants.
    """
    given = {"eqns": eqns, "outvars": outvars, "invars": invars}
    new = {name: list(own) for name, own in given.items() if own is not None}
    if isinstance(jaxpr, jex.Jaxpr):
        return jaxpr.replace(**new)
    return jaxpr.replace(jaxpr=jaxpr.jaxpr.replace(**new))


def constants_of(jaxpr) -> Sequence[Any]:
    """Returns the constants of an open or closed jaxpr (none of an open one)."""
    return getattr(jaxpr, "consts", ())


def params_of_hi_primitive(value: Any) -> dict[str, Any] | None:
    """Finds what a primitive of JAX 0.12 that is an object of its own was made of; None of others.

    Such an object is a parameter of `call_hi_primitive`, and is made anew by each trace.
    """
    is_one = hasattr(value, "in_avals_flat") and isinstance(getattr(value, "params", None), dict)
    return value.params if is_one else None


def typed(array: Any, aval: Any) -> Any:
    """Gives an array of NumPy a type that it keeps in a jaxpr, under any settings."""
    return literals.TypedNdArray(array, aval) if isinstance(array, np.ndarray) else array


def weakly_typed(x: jax.Array) -> jax.Array:
    """Gives an array the weak type that the results of Python numbers have."""
    if jax.typeof(x).weak_type:
        return x
    return jax.lax.convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=True, sharding=None)


def memory_space(aval: Any) -> Any:
    """Returns the memory of an array or a type; a `jax.ShapeDtypeStruct` has it in its sharding."""
    if isinstance(aval, jax.Array):  # that of a tracer is an error from JAX 0.12 on
        aval = jax.typeof(aval)
    kind = getattr(getattr(aval, "sharding", None), "memory_kind", None)
    default = jax.memory.Space.Host if kind == PINNED_HOST else jax.memory.Space.Device
    return getattr(aval, "memory_space", default)


def memory_kind(aval: Any) -> str | None:
    """Returns the memory kind of a type: that of the host's memory, or None for the device's."""
    return PINNED_HOST if memory_space(aval) == jax.memory.Space.Host else None


def mesh_of(eqn) -> AbstractMesh:
    """Returns the abstract mesh under which an equation was traced; it may be empty."""
    return eqn.ctx.cur_abstract_mesh


def in_memory_of(x: Any, aval: Any) -> Any:
    """Moves an array to the memory of a type.

    On one device JAX traces an argument of a `jax.ShapeDtypeStruct` as if it were in the memory of
    the device, whatever its sharding says.
    """
    return x if memory_kind(aval) is None else jax.device_put(x, jax.memory.Space.Host)


def scan_parts(eqn) -> tuple[int, int]:
    """Counts the constants and the carries of a `scan` equation.

    They are read off the numbers of axes of its variables (an array that is scanned over has one
    axis more outside than inside the body), because the parameters for them changed in JAX 0.12.
    """
    body = eqn.params["jaxpr"].jaxpr
    xs = sum(
        outer.aval.ndim > inner.aval.ndim
        for outer, inner in zip(eqn.invars, body.invars, strict=True)
    )
    carries = sum(
        outer.aval.ndim == inner.aval.ndim
        for outer, inner in zip(eqn.outvars, body.outvars, strict=True)
    )
    return len(eqn.invars) - carries - xs, carries


def eliminate_dead_code(jaxpr: jex.ClosedJaxpr, used: Sequence[bool]) -> jex.ClosedJaxpr:
    """Removes equations that the `used` outputs do not need, in calls too; keeps all inputs."""
    slim, _ = partial_eval.dce_jaxpr(jaxpr.jaxpr, list(used), instantiate=True)
    return jex.ClosedJaxpr(slim, [])


def is_ref(var) -> bool:
    """Tells whether a variable is a reference, as `jax.new_ref` makes it."""
    return isinstance(var.aval, AbstractRef)


def makes_refs(jaxpr_or_eqn) -> bool:
    """Tells whether a jaxpr, or an equation, makes references of its own."""
    return any(isinstance(e, core.InternalMutableArrayEffect) for e in jaxpr_or_eqn.effects)


def discharge_refs(jaxpr: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Puts values in place of the references that a program's equations make.

    Derivative rules survive, but for those inside an equation that takes a reference.
    """
    return discharge.discharge_state(jaxpr, should_discharge=False, lower=False)


def without_ref_effects(eqn):
    """Removes from an equation the effects of making references."""
    own = {e for e in eqn.effects if not isinstance(e, core.InternalMutableArrayEffect)}
    return eqn.replace(effects=own)


def call_apart(fun: Callable, name: str, *args):
    """Calls a function as an equation of its own, which XLA is told to leave a call."""

    def called(*args):
        with set_xla_metadata(inlineable=None):  # calls inside it are as they are
            return fun(*args)

    called.__name__ = called.__qualname__ = name
    with set_xla_metadata(inlineable="false"):
        return jax.jit(called)(*args)


def is_call_apart(eqn) -> bool:
    """Tells whether an equation was made by `call_apart`."""
    return (eqn.ctx.xla_metadata or {}).get("inlineable") == "false"


def typed_apart(eqn):
    """Makes a call of an equation that JAX 0.10.2 refuses for operands typed under two meshes.

    Its type of a `fold_in` wants one mesh of the key and the number, where those of other
    operations take a mesh with and one without devices. A call keeps the types of its body.
    """
    if eqn.primitive.name != "random_fold_in":
        return eqn
    with eqn.ctx.manager:
        (call,) = jax.make_jaxpr(jax.jit(eqn.primitive.bind))(*(v.aval for v in eqn.invars)).eqns
    return call.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)


def is_ordered(eqn) -> bool:
    """Tells whether an equation has an effect that keeps its order among others."""
    return any(map(effects.ordered_effects.contains, eqn.effects))


def acts(eqn) -> bool:
    """Tells whether an equation has an effect; to be over an axis with a name is none."""
    return not all(isinstance(e, core.NamedAxisEffect) for e in eqn.effects)


def knows_axis(eqn, name: Any) -> bool:
    """Tells whether an equation is over an axis, as a collective is, or is of its indices."""
    return any(isinstance(e, core.NamedAxisEffect) and e.name == name for e in eqn.effects)


def source_line(eqn) -> str:
    """Returns the user's file and line that an equation came from, or an empty string.

    For an equation of a library of layers, it is the line that calls the library.
    """
    frames = list(source_info_util.user_frames(eqn.source_info.traceback))
    frame = next(
        (f for f in frames if not _LAYERS.search(f.file_name)), frames[0] if frames else None
    )
    return f"{frame.file_name}:{frame.start_line}" if frame else ""


_LAYERS = re.compile(r"[/\\]site-packages[/\\](equinox|flax|haiku|optax)[/\\]")


def at_source_line(eqn) -> str:
    """Says where an equation came from, to end a clause: ` at file:line`, or an empty string."""
    line = source_line(eqn)
    return f" at {line}" if line else ""


def at_line_of(eqn, other):
    """Lets an equation come from the source line of another."""
    source = eqn.source_info.replace(traceback=other.source_info.traceback)
    return eqn.replace(source_info=source)


def in_scope(eqn, name: str):
    """Puts one more name before an equation's name stack."""
    source = eqn.source_info
    stack = source_info_util.new_name_stack(name) + source.name_stack
    return eqn.replace(source_info=source.replace(name_stack=stack))


def scope_names(eqn) -> list[str]:
    """Returns the names on an equation's name stack, the outermost first."""
    return [entry.name for entry in eqn.source_info.name_stack.stack]


def is_transposed(eqn) -> bool:
    """Tells whether an equation is of the backward of a gradient that was taken."""
    stack = eqn.source_info.name_stack.stack
    return any(type(e) is source_info_util.Transform and e.name == "transpose" for e in stack)


def rename_scopes(eqn, names: Mapping[str, str | None]):
    """Replaces names on an equation's name stack; removes those that become None."""
    source = eqn.source_info
    stack = [e._replace(name=names.get(e.name, e.name)) for e in source.name_stack.stack]
    kept = type(source.name_stack)(tuple(entry for entry in stack if entry.name is not None))
    return eqn.replace(source_info=source.replace(name_stack=kept))


def is_split(aval: Any) -> bool:
    """Tells whether a type says how its arrays are split over the axes of a mesh."""
    spec = getattr(getattr(aval, "sharding", None), "spec", ())
    return any(axis is not None for axis in spec) or bool(getattr(aval, "vma", None))


def derivative_rule(rule: Any) -> Any:
    """Returns what tells the rule of a `jax.custom_jvp` from others; else the object itself.

    Each call of such a function has an object of its own for the rule, made of the user's function
    and of how its arguments are flattened.
    """

    def inside(function: Any, name: str) -> Any:
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        cells = dict(zip(names, getattr(function, "__closure__", None) or (), strict=True))
        return cells[name].cell_contents if name in cells else None

    own = inside(inside(getattr(rule, "f", None), "fn"), "jvp")
    if getattr(own, "transforms", None) is None or getattr(own, "f", None) is None:
        return rule
    # The places in which results are left are new for each call.
    transforms = tuple(
        (change, tuple(a for a in given if "<lambda>" not in getattr(a, "__qualname__", "")))
        for change, given in own.transforms
    )
    return own.f, transforms, own.params


def bind_call(eqn, args, name: str) -> list[Any]:
    """Calls the jaxpr of a `jax.jit` equation again, under another name."""
    return eqn.primitive.bind(*args, **{**eqn.params, "name": name})


def under_scope(eqn, caller):
    """Puts the name stack of a call before that of `eqn`, an equation of the called jaxpr.

    An equation of a library's own function gets the source line of the call.
    """
    source = eqn.source_info
    stack = caller.source_info.name_stack + source.name_stack
    traceback = source.traceback
    if source_info_util.user_frame(traceback) is None:
        traceback = caller.source_info.traceback
    return eqn.replace(source_info=source.replace(name_stack=stack, traceback=traceback))


def under_mesh(eqn, change: Callable[[AbstractMesh], AbstractMesh]):
    """Puts an equation under another abstract mesh than the one that was set when it was traced."""
    return eqn.replace(ctx=_context(eqn.ctx, change))


@functools.cache
def _context(context, change: Callable[[AbstractMesh], AbstractMesh]):
    mesh = change(context.cur_abstract_mesh)
    with context.manager, jax.sharding.use_abstract_mesh(mesh):
        return type(context)()


def compiled(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles what was lowered; it takes arrays of types below a byte, as `jax.jit` does."""
    return taking_narrow(lowered.compile())


def taking_narrow(compiled: jax.stages.Compiled) -> jax.stages.Compiled:
    """Lets an executable take arrays of types below a byte, such as int4.

    On CPU an array of JAX 0.10.2 says nothing of the bits of an element in its layout, so that it
    would be refused. `jax.jit` does not compare the layouts.
    """
    own: Any = compiled._executable
    pairs = zip(own._xla_in_layouts, own.in_avals, strict=True)
    own._xla_in_layouts = [None if bits_of(aval) < 8 else layout for layout, aval in pairs]
    return compiled


def bits_of(aval: Any) -> int:
    """Returns the bits of a number of a type; 8 if it is of something else, such as keys."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or not jax.numpy.issubdtype(dtype, np.number):
        return 8
    is_inexact = jax.numpy.issubdtype(dtype, np.inexact)
    return (jax.numpy.finfo if is_inexact else jax.numpy.iinfo)(dtype).bits


def load_on_devices(
    compiled: jax.stages.Compiled, devices: Sequence[Any]
) -> jax.stages.Compiled | None:
    """Loads an executable compiled for some devices onto others without compiling again.

    Returns None where the backend cannot do it; the caller then compiles. Also returns None with
    JAX's persistent compilation cache: an executable that came out of it cannot be serialised again
    on CPU (it loads, and fails when it is called), and compiling again is cheap.
    """
    config: Any = jax.config
    if config.jax_enable_compilation_cache and config.jax_compilation_cache_dir:
        return None

    if len(devices) > 1:  # it would hold the shardings over the first devices
        return None
    (device,) = devices

    class Unpickler(serialize_executable._JaxPjrtUnpickler):
        def persistent_load(self, pid):
            if pid[0] == "device":
                return device
            if pid[0] == "exec":
                options = xla_client.CompileOptions()
                options.num_replicas = options.num_partitions = 1
                options.device_assignment = xla_client.DeviceAssignment.create(
                    np.array([[device.id]])
                )
                return self.backend.deserialize_executable(
                    pid[1], executable_devices=self.execution_devices, compile_options=options
                )
            return super().persistent_load(pid)

    try:
        payload, in_tree, out_tree = serialize_executable.serialize(compiled)
        unloaded, args_info, no_kwargs = Unpickler(
            io.BytesIO(payload), device.client, [device]
        ).load()
        loaded = jax.stages.Compiled(
            unloaded.load(), [], in_tree.unflatten(args_info), out_tree, no_kwargs=no_kwargs
        )
        return taking_narrow(loaded)
    except (ValueError, NotImplementedError, TypeError, AttributeError, jax.errors.JaxRuntimeError):
        return None


def copier_to(device: Any) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Returns a function that copies arrays to a device, as `jax.device_put` does.

    Committed arrays of one device take the call that `jax.device_put` ends in, and so a fraction of
    its time. That call does not check for deleted arrays, and leaves uncommitted ones so.
    """
    copy = getattr(xla_client, "batched_copy_array_to_devices_with_sharding", None)
    if copy is None:
        return functools.partial(_put, device)
    sharding = jax.sharding.SingleDeviceSharding(device)
    where, reuse = sharding._internal_device_list, xla_client.ArrayCopySemantics.REUSE_INPUT

    def copy_all(arrays: Sequence[Any]) -> Sequence[Any]:
        count = len(arrays)
        try:
            for array in arrays:
                if not array._committed or array.is_deleted():
                    return _put(device, arrays)
            return copy(arrays, [where] * count, [sharding] * count, [reuse] * count)
        except (AttributeError, TypeError, jax.errors.JaxRuntimeError):  # not plain, or refused
            return _put(device, arrays)

    return copy_all


def _put(device: Any, arrays: Sequence[Any]) -> Sequence[Any]:
    return jax.device_put(arrays, device)


def join_shards(aval: Any, sharding: Any, shards: Sequence[Any], *, committed: bool = True) -> Any:
    """Makes an array of its shards, as `jax.make_array_from_single_device_arrays` does.

    That function gives no array the weak type that `aval` may have. An array that is not
    `committed` to its devices is made of one with a weak type alone.
    """
    if not getattr(aval, "weak_type", False):
        return jax.make_array_from_single_device_arrays(aval.shape, sharding, list(shards))
    weak = core.ShapedArray(aval.shape, aval.dtype, weak_type=True, memory_space=memory_space(aval))
    return array.ArrayImpl(weak, sharding, list(shards), committed=committed)


def serve_collectives_at(host: str) -> None:
    """Sets the address at which other processes reach this host for collectives on CPU.

    By default JAX takes the address of the host's own name, often the loopback address, and has no
    option for it. This function has to be called before JAX starts its backends.
    """

    def make_client():
        client = distributed.global_state.client
        config: Any = jax.config
        if client is None or config.jax_cpu_collectives_implementation != "gloo":
            return xla_bridge.make_cpu_client()
        collectives = _jax.make_gloo_tcp_collectives(distributed_client=client, hostname=host)
        return xla_bridge.make_cpu_client(collectives)

    xla_bridge.register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)


def joined_processes() -> tuple[str, int, int] | None:
    """Returns what `jax.distributed` has joined; None if it has not.

    These are the coordinator's address, the number of processes, and that of this one. JAX's own
    functions for them start its backends.
    """
    state = distributed.global_state
    if state.client is None or state.coordinator_address is None:
        return None
    return state.coordinator_address, state.num_processes, state.process_id


def detect_cluster() -> tuple[str, int, int] | None:
    """Returns the same of the launcher that has started this process; None if JAX knows of none.

    `jax.distributed.initialize` asks for it, and does not tell what it has found.
    """
    found = clusters.ClusterEnv.auto_detect_unset_distributed_params(None, None, None, [], None, 60)
    address, count, number, _ = found
    if address is None or count is None or number is None:
        return None
    return address, count, number


def started_platform() -> str | None:
    """Returns the platform that JAX computes on by default; None if JAX has not been used yet."""
    return jax.default_backend() if xla_bridge.backends_are_initialized() else None


def is_tracer(value) -> bool:
    """Tells whether a value is being traced by a JAX transformation."""
    return isinstance(value, Tracer)


def is_of_this_trace(value) -> bool:
    """Tells whether a value is traced by the innermost transformation: others cannot return it."""
    return isinstance(value, Tracer) and value._trace is core.trace_ctx.trace


def is_tracing() -> bool:
    """Tells whether the current computation runs inside a JAX transformation."""
    return not core.trace_state_clean()


#: Functions of JAX that only look at a program, by which nothing runs: `make_jaxpr`, `eval_shape`,
#: `lower` and `trace` of a jitted function.
_LOOKS = frozenset(
    {"jit_trace", "jit_lower", "make_jaxpr_f", "eval_shape", "lower", "closure_convert"}
)


def looks_on() -> bool:
    """Tells whether a function is traced only to be looked at, and not to be run.

    The functions of JAX that are under way tell; none of JAX's values does.
    """
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("jax.") and frame.f_code.co_name in _LOOKS:
            return True
        frame = frame.f_back
    return False


def writes_jaxpr() -> bool:
    """Tells whether the current computation is written to a jaxpr, at once or in the end.

    It is not where values are known: outside of transformations, and in `jax.grad` or `jax.vmap` of
    a call with arrays.
    """
    traces = core.unsafe_get_trace_stack(core.trace_ctx.trace)
    return any(isinstance(trace, DynamicJaxprTrace) for trace in traces)


def is_differentiating() -> bool:
    """Tells whether the current computation is differentiated: derivative rules count then."""
    traces = core.unsafe_get_trace_stack(core.trace_ctx.trace)
    return any(isinstance(trace, JVPTrace | LinearizeTrace) for trace in traces)


def is_jit_disabled() -> bool:
    """Tells whether `jax.disable_jit` is set, under which a jitted function is the plain one."""
    return config.disable_jit.value


def trace_context() -> Any:
    """Returns JAX's current settings: `jax.jit` traces anew where they differ."""
    return config.trace_context()


def is_in_context(settings: Any) -> bool:
    """Tells whether JAX's current settings are these, but for those that it did not have then.

    From JAX 0.12 on, the first kernel of Pallas that is lowered adds a setting.
    """
    now = trace_context()
    return type(now) is type(settings) and all(a == b for a, b in zip(settings, now, strict=False))


def checkify_as(primitive: jex.Primitive, run: Callable[..., Any]) -> None:
    """Lets `checkify.checkify` see what `run` does, in place of a primitive."""

    def rule(*args, **params):
        first = next(i for i, x in enumerate(args) if isinstance(x, checkify.Error))
        error, enabled, *operands = args[first:]  # before them JAX 0.12 has a context
        jaxpr = jax.make_jaxpr(functools.partial(run, **params))(*operands)
        return checkify.checkify_jaxpr(*args[:first], jaxpr, enabled, error, *operands)

    checkify.error_checks[primitive] = rule


def is_check(eqn) -> bool:
    """Tells whether an equation is a `checkify.check`, which `jax.jit` refuses to compile."""
    allowed = config.xla_runtime_errors.value
    return eqn.primitive is checkify.check_p and not eqn.params["debug"] and not allowed


def is_error_if(eqn) -> bool:
    """Tells whether an equation is the callback by which `eqx.error_if` raises."""
    function = getattr(eqn.params.get("callback"), "callback_func", None)
    return getattr(function, "__module__", None) == "equinox._errors"


def captured(fun: types.FunctionType) -> dict[str, Any]:
    """Returns what a function closes over, by name, but for the text of the stack of its caller.

    `eqx.error_if` closes over this text, which each trace makes anew.
    """
    names = fun.__code__.co_freevars
    cells = dict(zip(names, fun.__closure__ or (), strict=True))
    if fun.__module__ == "equinox._errors":
        cells.pop("stack", None)
    found = {}
    for name, cell in cells.items():
        with contextlib.suppress(ValueError):  # it is empty
            found[name] = cell.cell_contents
    return found


_ERROR_NUMBERS: dict[Any, int] = {}


@contextlib.contextmanager
def numbered_errors():
    """Gives a check of `checkify` one number however often it is traced, as JAX 0.12 does."""
    if not hasattr(checkify, "next_code"):
        yield
        return
    plain, new = checkify.assert_func, checkify.next_code

    def assert_func(error, pred, new_error):
        kind = jax.tree.structure(new_error)
        number = _ERROR_NUMBERS.get(kind)
        if number is None:
            number = _ERROR_NUMBERS[kind] = new()
        checkify.next_code = lambda: number
        return plain(error, pred, new_error)

    checkify.assert_func = assert_func
    try:
        yield
    finally:
        checkify.assert_func, checkify.next_code = plain, new


def public_error(error: Any) -> Any:
    """Returns the error that `jax.jit` or `eqx.filter_jit` raises in place of an executable's."""
    if isinstance(error, api_util.InternalFloatingPointError):
        return FloatingPointError(f"invalid value ({error.ty}) encountered")
    if isinstance(error, jax.errors.JaxRuntimeError) and _ERROR_IF in str(error):
        return eqx.EquinoxRuntimeError(str(error).split(_ERROR_IF)[1].split("\n\n\n---")[0])
    return error


_ERROR_IF = "_EquinoxRuntimeError: "


@contextlib.contextmanager
def raising_once():
    """Keeps JAX from telling again of a callback's error that is raised inside this context.

    It would log the error with its traceback, and raise it in `jax.effects_barrier` and at exit.
    """
    logger, refuse = logging.getLogger("jax._src.callback"), lambda record: False
    logger.addFilter(refuse)
    try:
        yield
    except Exception:
        tokens = dispatch.runtime_tokens.output_runtime_tokens
        for device, token in list(tokens.items()):
            try:
                token.block_until_ready()
            except jax.errors.JaxRuntimeError:
                tokens.pop(device)
        raise
    finally:
        logger.removeFilter(refuse)


def forget_effects() -> None:
    """Forgets what JAX keeps of effects, and so the errors of callbacks; all must have ended."""
    dispatch.runtime_tokens.clear()


#: The version whose XLA computes a reduction wrong on CPU, and from how many bytes of a column on.
_WRONG_PRODUCTS, _WRONG_FROM = (0, 10, 2), 2**17


def reduces_a_wrong_product(eqns: Sequence[Any]) -> Any:
    """Finds a product that this JAX may reduce to wrong values on CPU; None where there is none.

    XLA of jaxlib 0.10.2 fuses a product of a matrix of three columns and more than 128 KiB a column
    by a matrix of three rows with the reduction of its few columns, and gets rows past these
    wrong: github.com/jax-ml/jax/issues/39103. It is right before and after.
    """
    if jax.__version_info__ != _WRONG_PRODUCTS or jax.default_backend() != "cpu":
        return None
    for eqn in eqns:
        if eqn.primitive.name != "dot_general":
            continue
        (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
        shape = eqn.outvars[0].aval.shape
        few = [axis for axis, size in enumerate(shape) if size in (2, 3)]
        size = eqn.outvars[0].aval.dtype.itemsize * max(shape, default=0)
        inner = [eqn.invars[0].aval.shape[axis] for axis in contracted]
        if batch or inner != [3] or len(shape) != 2 or not few or size <= _WRONG_FROM:
            continue
        if any(
            other.primitive.name.startswith("reduce_")
            and other.invars[0].aval.shape == shape
            and set(other.params.get("axes", ())) <= set(few)
            for other in eqns
        ):
            return eqn
    return None


def refuse_as_argument(cls: type, refuse: Callable[[Any], Any]) -> None:
    """Lets `refuse` raise the error where JAX is asked to compute with an instance of a class.

    JAX traces with the types of instances. A jitted function looks at their shardings, which
    `refuse_as_place` is for.
    """
    core.pytype_aval_mappings[cls] = lambda x: core.ShapedArray(
        x.shape, x.dtype, weak_type=x.weak_type
    )
    dtypes.register_canonicalize_value_handler(cls, refuse)


def refuse_as_place(cls: Any, refuse: Callable[[Any], Any]) -> None:
    """Lets `refuse` raise the error where JAX is asked to compute in a sharding of a class.

    What JAX makes like an array there, such as zeros, goes to the default device.
    """
    cls._device_assignment = property(refuse)
    cls._is_concrete = False


def custom_vjp(
    fun: Callable, forward: Callable, backward: Callable, **options: Any
) -> Callable[..., Any]:
    """Returns a `jax.custom_vjp` that stands in a jaxpr as a call of `fun`, under any settings.

    Under `jax_custom_vjp3` it would be a primitive of its own.
    """

    def call(*args):
        with config.custom_vjp3(False):
            rule = jax.custom_vjp(fun)
            rule.defvjp(forward, backward, **options)
            return rule(*args)

    return call


def hand_on_keys(primitive: jex.Primitive) -> None:
    """Lets `jax_debug_key_reuse` know that a primitive gives its operands, and uses no key."""

    def forward(eqn):
        pairs = (key_reuse.Forward(n, n) for n in range(len(eqn.invars)))
        return key_reuse.KeyReuseSignature(*pairs)

    key_reuse.key_reuse_signatures[primitive] = key_reuse.dynamic_key_reuse_signature(forward)


def use_keys_as(primitive: jex.Primitive, plain: Callable[[Any], jex.ClosedJaxpr]) -> None:
    """Lets `jax_debug_key_reuse` know that an equation uses keys as a plain jaxpr does."""

    def signature(eqn):
        return key_reuse.jaxpr_type_signature(plain(eqn).jaxpr)

    key_reuse.key_reuse_signatures[primitive] = key_reuse.dynamic_key_reuse_signature(signature)


class KeyUse:
    """The random keys that a traced function uses up, which `jax_debug_key_reuse` watches.

    Args:
        jaxpr: the function; with the setting, a key that it uses twice is an error.
        closed_over: the first inputs of the jaxpr, which each call has.

    Raises:
        jax.errors.KeyReuseError: it uses a key twice.
    """

    def __init__(self, jaxpr: jex.ClosedJaxpr, closed_over: Sequence[Any]):
        self._closed_over: tuple[Any, ...] = ()
        self._signature = None
        if config.debug_key_reuse.value:
            self._closed_over = tuple(closed_over)
            self._signature = key_reuse.jaxpr_type_signature(jaxpr.jaxpr)

    def call(self, run: Callable[[Sequence[Any]], list[Any]], args: Sequence[Any]) -> list[Any]:
        """Runs the function; with the setting, a key that is used up already is an error.

        What runs are parts of the function, in which JAX would find keys used twice.
        """
        if self._signature is None:
            return run(args)
        inputs = [*self._closed_over, *args]
        self._signature.check_signature(*inputs, funcname="placed function")
        with config.debug_key_reuse(False):
            results = run(args)
        self._signature.update_consumption(inputs, results)
        return results


# ---- jaxprs in another process ------------------------------------------------------------------


def reduced(value: Any) -> Any:
    """Says how pickle makes an object of JAX anew, in the form of `__reduce__`.

    Returns `NotImplemented` for an object that pickle knows how to make. The other process has to
    run the same version of JAX.

    Raises:
        ValueError: no module has a primitive under a name of its own.
    """
    if isinstance(value, core.Primitive | effects.Effect):
        name = _name_in_module(value)
        if name is None and isinstance(value, core.Primitive):
            raise ValueError(
                f"the primitive `{value}` has no name in a module that another process can import; "
                f"assign it to a global variable of a module other than the script that is run"
            )
        return NotImplemented if name is None else (_find_in_module, name)
    if isinstance(value, literals.TypedNdArray):  # of JAX 0.10.2, which loses the aval
        return literals.TypedNdArray, (np.asarray(value), value.aval)
    if isinstance(value, core.JaxprEqnContext):  # JAX would make that of the other process
        return _make_context, tuple(getattr(value, name) for name in _CONTEXT_FIELDS)
    if isinstance(value, _jax.Traceback):
        frames = source_info_util.user_frames(value)
        return _make_traceback, (tuple(map(tuple, frames)),)
    return NotImplemented


def _name_in_module(value: Any) -> tuple[str, str] | None:
    """Returns the module and the name there of a primitive or an effect; None where it has none."""
    found = _names_in_modules(len(sys.modules)).get(id(value))
    return found[:2] if found else None


@functools.cache
def is_of_library(primitive: jex.Primitive) -> bool:
    """Tells whether a primitive is one of JAX, Equinox or jaxpp: then its name says what it is."""
    if any(primitive is known for known in vars(primitives).values()):
        return True
    module, _ = _name_in_module(primitive) or ("", "")
    return module.split(".")[0] in ("jax", "jaxlib", "equinox", "jaxpp")


@functools.lru_cache(maxsize=1)
def _names_in_modules(count: int) -> dict[int, tuple[str, str, Any]]:
    """Finds primitives and effects by their ids, in all modules; there are so many modules."""
    del count
    found: dict[int, tuple[str, str, Any]] = {}
    for name, module in sorted(sys.modules.items()):
        if name in ("__main__", "__mp_main__"):  # another process has another one
            continue
        for key, value in list(getattr(module, "__dict__", {}).items()):
            if isinstance(value, core.Primitive | effects.Effect):
                found.setdefault(id(value), (name, key, value))
    return found


def _find_in_module(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


_CONTEXT_FIELDS = [n for n in core.JaxprEqnContext.__slots__ if n not in ("configs", "__weakref__")]


def _make_context(*fields: Any) -> Any:
    create: Any = core.JaxprEqnContext._create
    *others, metadata = fields
    return create(*others, None if metadata is None else tuple(sorted(metadata.items())))


@functools.lru_cache(maxsize=4096)
def _make_traceback(frames: tuple[tuple[Any, ...], ...]) -> Any:
    """Makes a traceback of the frames of another process, the innermost first."""
    call: Callable[[], Any] = _jax.Traceback.get_traceback
    for frame in frames:
        call = functools.partial(types.FunctionType(_code_at(*frame), {}), call)
    if not frames:
        return None
    found, done = [], _thread.allocate_lock()

    def make() -> None:
        found.append(call())
        done.release()

    done.acquire()
    _thread.start_new_thread(make, ())  # which has no frames of this process
    with done:
        return found[0]


@functools.lru_cache(maxsize=4096)
def _code_at(
    file: str, name: str, line: int, column: int, end_line: int, end_column: int
) -> types.CodeType:
    """Makes the code of a function `f(call)` that calls `call`, all of it at a place in a file.

    The table of places is that of CPython 3.11 and later, with entries of the long form:
    https://github.com/python/cpython/blob/3.13/InternalDocs/code_objects.md
    """
    code = (lambda call: call()).__code__
    place = bytes([0, *_varint(end_line - line), *_varint(column + 1), *_varint(end_column + 1)])
    units = len(code.co_code) // 2
    sizes = [min(8, units - i) for i in range(0, units, 8)]
    table = b"".join(bytes([0x80 | 14 << 3 | size - 1]) + place for size in sizes)
    return code.replace(
        co_filename=file,
        co_name=name.rpartition(".")[2],
        co_qualname=name,
        co_firstlineno=line,
        co_linetable=table,
    )


def _varint(number: int) -> list[int]:
    """Encodes a number in bytes of six bits each, the lowest first."""
    digits = [number & 63]
    while number := number >> 6:
        digits[-1] |= 64
        digits.append(number & 63)
    return digits
