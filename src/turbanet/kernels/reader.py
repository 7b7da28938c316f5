"""Read a member's training step as a flat list of operations that one kernel can hold, or say why it cannot."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Literal

REGISTER_FILE = 256 * 1024  # bytes of a multiprocessor's registers, on every NVIDIA GPU since 2012
LIMIT = REGISTER_FILE // 2  # bytes of a step's arrays; the rest is for addresses and the compiler's copies
WARP = 32  # threads: a number that all of them need takes a register of each
TENSOR_CORES = 16  # smallest side of a product that uses them
SHORT = 8, 4, 2, 1  # axes of at most so many numbers are held number by number: the first of these with which ...
MOST_BLOCKS = 16  # ... no array takes more than so many blocks
DTYPES = "float32", "int32", "uint32", "bool"
CALLS = "jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"
IDENTITY = "copy", "copy_p", "reshard", "stop_gradient"
ELEMENTWISE = """
    abs add add_any and ceil clamp convert_element_type cos div eq exp exp2 expm1 floor ge gt integer_pow is_finite le
    log log1p logistic lt max min mul ne neg not one_minus_square or pow rem rsqrt select_n sign sin sqrt square sub tan
    tanh xor
"""
MOVES = """
    broadcast_in_dim concatenate dot_general expand_dims iota pad reduce_max reduce_min reduce_or reduce_sum reshape
    slice split squeeze transpose
"""
WHOLE = "dot_general", "reduce_max", "reduce_min", "reduce_or", "reduce_sum", "transpose"
ALLOWED = frozenset([*IDENTITY, *ELEMENTWISE.split(), *MOVES.split()])
NAMES = {
    "conv_general_dilated": "a convolution",
    "scan": "a recurrence (scan)",
    "while": "a loop (while)",
    "cond": "a branch (cond)",
    "gather": "a gather: compare class labels with jnp.arange(classes) instead of indexing by them",
    "dynamic_slice": "a slice whose start is data",
    "threefry2x32": "random numbers, as dropout does",
    "reduce_window_max": "pooling",
}


class Refused(ValueError):
    """Raised for a step that one kernel cannot hold; the message says why."""


@dataclasses.dataclass(eq=False)
class Value:
    """An array of a step: its shape and dtype."""

    shape: tuple[int, ...]
    dtype: Any


@dataclasses.dataclass(eq=False)
class Operation:
    """One primitive; its inputs are values or NumPy scalars."""

    primitive: Any
    params: dict[str, Any]
    inputs: list[Any]
    outputs: list[Value]

    @property
    def name(self) -> str:
        return self.primitive.name


@dataclasses.dataclass(eq=False)
class Program:
    """A step without dead code: `operations`, in order, compute the outputs from inputs and constants."""

    inputs: list[Value]  # the leaves of the state, then those of the batch
    constants: dict[Value, Any]  # arrays that the step closes over
    operations: list[Operation]
    outputs: list[Any]  # the leaves of the state, then the loss: values, or NumPy scalars
    short: int = 1
    bytes: int = 0  # the most that padded arrays take at one time

    def long(self, shape: Sequence[int]) -> list[int]:
        """Return the axes of `shape` that are padded to powers of two; each number of the others is its own block."""
        return [axis for axis, size in enumerate(shape) if size > self.short]

    def padded(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of each block of an array of `shape`: its long axes, as powers of two."""
        return tuple(1 << (shape[axis] - 1).bit_length() for axis in self.long(shape))

    def blocks(self, shape: Sequence[int]) -> int:
        """Return the number of blocks of an array of `shape`."""
        return math.prod(size for size in shape if size <= self.short)

    def size(self, value: Value) -> int:
        """Return the bytes of `value` in registers."""
        numbers = max(math.prod(self.padded(value.shape)), WARP)
        return self.blocks(value.shape) * numbers * np.dtype(value.dtype).itemsize


def read(step: Callable, state: Any, *batch: Any) -> Program:
    """Read the operations of one member's `step(state, *batch) -> (state, loss)`.

    Parameters
    ----------
    step : of one member; JAX traces it
    state, batch : of one member, arrays or `jax.ShapeDtypeStruct`s

    Raises
    ------
    Refused : if one kernel cannot hold the step, as `LIMIT` bytes of arrays
    """
    leaves, tree = jax.tree.flatten((state, batch))
    before: Any = jax.tree.structure(state)

    def flat(*leaves):
        state, batch = jax.tree.unflatten(tree, leaves)
        after, loss = step(state, *batch)
        if jax.tree.structure(after) != before:
            raise Refused("The kernel needs a step that returns a state of the structure it was given.")
        return [*jax.tree.leaves(after), loss]

    closed = jax.make_jaxpr(flat)(*leaves)
    inputs = [Value(tuple(leaf.shape), leaf.dtype) for leaf in leaves]
    constants: dict[Value, Any] = {}
    operations: list[Operation] = []
    outputs = _inline(closed, inputs, constants, operations)
    operations = _live(operations, outputs)
    used = {id(value) for value in outputs} | {id(value) for op in operations for value in op.inputs}
    constants = {value: array for value, array in constants.items() if id(value) in used}
    program = Program(inputs, constants, operations, outputs)
    check(program, before.num_leaves)
    values = [*inputs, *constants, *(value for op in operations for value in op.outputs)]
    for program.short in SHORT:
        if max(program.blocks(value.shape) for value in values) <= MOST_BLOCKS:
            break
    check_moves(program)
    check_products(program)
    program.bytes = _most_bytes(program)
    if program.bytes > LIMIT:
        raise Refused(
            f"The kernel holds a step of at most {LIMIT} bytes of weights, moments, gradients and activations in a"
            f" multiprocessor's registers; this one has {program.bytes}: take a smaller network or batch."
        )
    return program


def check(program: Program, leaves: int) -> None:
    """Raise Refused for an unknown operation or dtype, a state that changes its shape, and a loss that is no scalar."""
    for op in program.operations:
        if op.name not in ALLOWED:
            name = "random numbers, as dropout does" if op.name.startswith("random") else op.name
            raise Refused(f"The kernel does not take {NAMES.get(op.name, name)}.")
        _check_operation(op)
    for value in [*program.inputs, *program.constants, *(v for op in program.operations for v in op.outputs)]:
        if str(value.dtype) not in DTYPES:
            raise Refused(f"The kernel takes arrays of {', '.join(DTYPES)}; this step has one of {value.dtype}.")
    for value, after in zip(program.inputs[:leaves], program.outputs):
        if value.shape != after.shape or value.dtype != after.dtype:
            was, new = f"{value.dtype}{list(value.shape)}", f"{after.dtype}{list(after.shape)}"
            raise Refused(f"The kernel needs a state whose arrays keep shape and dtype; {was} became {new}.")
    if program.outputs[-1].shape != ():
        raise Refused(f"The kernel needs a scalar loss; this one has shape {list(program.outputs[-1].shape)}.")


def _check_operation(op):
    """Raise Refused for a known operation in a form that the kernel does not take."""
    if op.name == "dot_general":
        (first, second), batched = op.params["dimension_numbers"]
        free = [sum(n > 1 for i, n in enumerate(v.shape) if i not in d) for v, d in zip(op.inputs, (first, second))]
        inner = sum(op.inputs[0].shape[i] > 1 for i in first)
        if len(first) != 1 or any(batched) or max(*free, inner) > 1:
            shapes = " and ".join(str(list(value.shape)) for value in op.inputs)
            raise Refused(f"The kernel takes products of two matrices, not of {shapes}: flatten or split them.")
    if op.name == "reshape":
        before, after = ([n for n in v.shape if n > 1] for v in (op.inputs[0], op.outputs[0]))
        if before != after:
            raise Refused(f"The kernel does not reshape {list(op.inputs[0].shape)} to {list(op.outputs[0].shape)}.")
    if op.name == "pad" and (isinstance(op.inputs[1], Value) or any(n for _, _, n in op.params["padding_config"])):
        raise Refused("The kernel pads only at the ends of an axis, and with a constant.")
    if op.name == "select_n" and len(op.inputs) != 3:
        raise Refused("The kernel selects between two arrays, not more.")


def check_moves(program: Program) -> None:
    """Raise Refused unless what is cut or joined along an axis is held number by number."""
    for op in program.operations:
        if op.name in ("concatenate", "pad", "slice", "split"):
            sizes = list(zip(*(value.shape for value in [*op.inputs, *op.outputs] if value.shape)))
            padding = op.params.get("padding_config", [(0, 0, 0)] * len(sizes))
            longest = max((max(n) for n, pads in zip(sizes, padding) if len(set(n)) > 1 or any(pads)), default=0)
            if longest > program.short:
                raise Refused(f"The kernel does not {op.name} along axes of {longest}, but of up to {program.short}.")


def check_products(program: Program) -> None:
    """Raise Refused for a float32 product of matrices that are large enough for tensor cores, which take TF32.

    A thread's share of its factors does not fit into registers: compiled, most write 2 to 21 KB to memory a step.
    """
    for op in program.operations:
        if op.name != "dot_general" or lax.Precision.HIGHEST not in np.atleast_1d(op.params["precision"]):
            continue
        sides = [program.padded(value.shape) for value in op.inputs]
        if all(len(side) == 2 and min(side) >= TENSOR_CORES for side in sides):
            shapes = " and ".join(str(list(value.shape)) for value in op.inputs)
            raise Refused(f"The kernel multiplies matrices of {shapes} in TF32, not in float32 ('highest').")


def _inline(jaxpr, inputs, constants, operations):
    """Append the operations of a jaxpr, with calls inlined, to `operations`, and return its outputs."""
    consts = getattr(jaxpr, "consts", ())
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    env = dict(zip(jaxpr.invars, inputs))
    for var, array in zip(jaxpr.constvars, consts):
        env[var] = _constant(array, constants)

    def value(var: Any) -> Any:
        if not isinstance(var, Literal):
            return env[var]
        aval: Any = var.aval
        return _scalar(var.val, aval.dtype)

    for equation in jaxpr.eqns:
        ins, params = [value(var) for var in equation.invars], equation.params
        if equation.primitive.name in CALLS:
            inner = next(params[name] for name in ("jaxpr", "call_jaxpr", "fun_jaxpr") if name in params)
            outs = _inline(inner, ins, constants, operations)
        else:
            outs = _folded(equation, ins)
            if outs is None:
                outs = [Value(tuple(out.shape), out.dtype) for out in (var.aval for var in equation.outvars)]
                operations.append(Operation(equation.primitive, params, ins, outs))
        env.update(zip(equation.outvars, outs))
    return [value(var) for var in jaxpr.outvars]


def _folded(equation, inputs):
    """Return the outputs of an equation of constants, which some of Triton's rules do not accept, or None.

    Also of a sum with zero, as in Adam's root; as in XLA, -0 + 0 stays -0.
    """
    (out, *more), name = (var.aval for var in equation.outvars), equation.primitive.name
    if name == "add":
        for x, zero in (inputs, inputs[::-1]):
            if isinstance(zero, np.generic) and zero == 0 and isinstance(x, Value) and x.shape == out.shape:
                return [x]
    if more or out.shape != () or not all(isinstance(number, np.generic) for number in inputs) or not inputs:
        return None
    if name not in IDENTITY + tuple(ELEMENTWISE.split()):
        return None
    with jax.ensure_compile_time_eval():
        return [_scalar(equation.primitive.bind(*inputs, **equation.params), out.dtype)]


def _scalar(number, dtype):
    return np.dtype(dtype).type(np.asarray(number).item())


def _constant(array, constants):
    if array.shape == () and not isinstance(array, jax.core.Tracer):
        return _scalar(array, array.dtype)
    value = Value(tuple(array.shape), array.dtype)
    constants[value] = array
    return value


def _live(operations, outputs):
    """Return the operations that `outputs` need: first what products and reductions need, as traced, then the rest.

    As traced: Triton splits all products of a chain among the warps as the first one that it meets, and another order
    doubled the work. Each of the rest comes just before its first use, so that an optimizer's arrays are alive for one
    leaf at a time. All others are dead, such as random keys that a step traces and does not use.
    """
    makes = {id(value): op for op in operations for value in op.outputs}
    order: dict[int, Operation] = {}
    waiting = [(makes[id(value)], False) for value in reversed(outputs) if id(value) in makes]
    while waiting:
        op, ready = waiting.pop()
        if id(op) in order:
            continue
        if ready:
            order[id(op)] = op
            continue
        waiting.append((op, True))
        waiting += [(makes[id(value)], False) for value in reversed(op.inputs) if id(value) in makes]
    first: set[int] = set()
    needed: set[int] = set()
    for op in reversed(order.values()):
        if op.name in WHOLE or any(id(value) in needed for value in op.outputs):
            first.add(id(op))
            needed |= {id(value) for value in op.inputs}
    return [op for op in operations if id(op) in first] + [op for op in order.values() if id(op) not in first]


def _most_bytes(program):
    """Return the most bytes of arrays that are alive at one time; the state is alive until its successor exists.

    They are counted at products, reductions and transposes, which need their inputs whole; a compiler fuses the rest.
    """
    operations, kept = program.operations, {id(value) for value in [*program.inputs, *program.constants]}
    kept |= {id(value) for value in program.outputs}
    last = {id(value): number for number, op in enumerate(operations) for value in [*op.inputs, *op.outputs]}
    state = program.inputs[: len(program.outputs) - 1]
    successor = {id(new): program.size(old) for old, new in zip(state, program.outputs)}
    alive = most = sum(program.size(value) for value in [*program.inputs, *program.constants])
    for number, op in enumerate(operations):
        if all(isinstance(value, np.generic) for value in op.inputs):  # costs no register
            continue
        ends = {id(v): v for v in [*op.inputs, *op.outputs] if last.get(id(v)) == number and id(v) not in kept}
        freed = sum(program.size(value) for value in ends.values() if isinstance(value, Value))
        made = sum(program.size(value) - successor.get(id(value), 0) for value in op.outputs)
        if op.name in WHOLE:
            most = max(most, alive + made)
        alive += made - freed
    return most
