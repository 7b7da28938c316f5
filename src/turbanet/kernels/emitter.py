"""Train each member of a swarm in one program of a GPU kernel, whose registers hold it for all epochs of a call.

The kernel is emitted by Pallas' Triton backend (tested: jax 0.10.2, 0.11.2), deprecated since 0.11; its successor
behind the same interface is jax-triton. An array of a member is a NumPy array of objects, its blocks. A short axis is
an axis of the objects: it needs no padding, and reductions over it no exchange between threads. A long axis is an axis
of each block, padded to a power of two. Values in the padding are arbitrary, so that sums over it must mask them.
"""

import math
import warnings
from collections.abc import Callable, Iterable
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from turbanet.kernels.reader import IDENTITY, TENSOR_CORES, Operation, Program, Value, read

Blocks = np.ndarray  # of arrays; of the shape of the whole array, but 1 along its long axes


def train(
    step: Callable,
    state: Any,
    data: tuple,
    epochs: Any,
    order: jax.Array | None = None,
    *,
    steps: int = 1,
    most_epochs: int,
    interpret: bool = False,
) -> tuple[Any, jax.Array]:
    """Train one member for `epochs` x `steps` of `step(state, *batch) -> (state, loss)` in one kernel.

    `jax.vmap` makes a kernel of all members of it.

    Parameters
    ----------
    step : of one member; arrays that it closes over may be the member's own
    data : arrays [row, ...]; without an order they are the batch of every step
    epochs : int or scalar array, at most `most_epochs`; another number does not compile again
    order : int32 [epoch x step, batch], the rows of each step
    steps : of an epoch
    interpret : whether to run without a GPU, slowly

    Returns
    -------
    (state, mean loss of each epoch float32 [most_epochs], undefined after `epochs`)

    Raises
    ------
    Refused : if a kernel cannot hold the step; the message says why.
    """
    program = read(step, state, *batch(data, order))
    (leaves, tree), rows = jax.tree.flatten(state), jax.tree.leaves(data)
    values, inputs = program.inputs[: len(leaves)], program.inputs[len(leaves) :]
    leaves = [_pad(leaf, program, value.shape) for leaf, value in zip(leaves, values)]
    rows = [_pad(row, program, value.shape, order is not None) for row, value in zip(rows, inputs)]
    constants = [_pad(jnp.asarray(array), program, value.shape) for value, array in program.constants.items()]
    order = None if order is None else _pad(order, program, order.shape[-1:])
    warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    losses = jax.ShapeDtypeStruct((most_epochs,), jnp.float32)
    kernel = partial(_kernel, program, steps)
    settings = triton.CompilerParams(num_warps=_warps(program), num_stages=1)  # a step's rows hang on its order alone
    call = pl.pallas_call(kernel, (shapes, losses), name="train", interpret=interpret, compiler_params=settings)
    after, losses = call(jnp.asarray(epochs, jnp.int32), leaves, order, rows, constants)
    after = [leaf[tuple(map(slice, value.shape))] for leaf, value in zip(after, values)]
    return jax.tree.unflatten(tree, after), losses


def batch(data: tuple, order: Any = None) -> tuple:
    """Return the shapes and types of the batch of a step that reads `data` [row, ...] by an order [step, batch]."""
    lead = () if order is None else (order.shape[-1],)
    return jax.tree.map(lambda row: jax.ShapeDtypeStruct(lead + row.shape[len(lead) :], row.dtype), data)


def _kernel(program, steps, epochs, own, order, rows, constants, out, losses):
    """The kernel of one member, on references to memory; vmap makes a grid of it."""
    state, batch = program.inputs[: len(own)], program.inputs[len(own) :]
    fixed = {id(value): _load(program, value, ref) for value, ref in zip(program.constants, constants)}
    if order is None:
        fixed |= {id(value): _load(program, value, ref) for value, ref in zip(batch, rows)}

    def one_step(number, carry):
        env = fixed | dict(zip(map(id, state), _join(carry[:-1], program, state)))
        if order is not None:
            picked = _rows(program, batch[0].shape[0], order, number)
            env |= {id(value): _load(program, value, ref, picked) for value, ref in zip(batch, rows)}
        *after, loss = run(program, env)
        return (*_split(after), carry[-1] + loss.item())

    def epoch(number, carry):
        carry = (*carry, _broadcast(np.float32(0), ()))
        carry = lax.fori_loop(number * steps, (number + 1) * steps, one_step, carry)
        losses[number] = carry[-1] / np.float32(steps)
        return carry[:-1]

    begin = _split([_load(program, value, ref) for value, ref in zip(state, own)])
    end = lax.fori_loop(np.int32(0), epochs[...], epoch, begin)
    for value, ref, blocks in zip(state, out, _join(end, program, state)):
        for index, block in np.ndenumerate(blocks):
            ref[_where(program, value.shape, index)] = block


def run(program: Program, env: dict[int, Blocks]) -> list[Blocks]:
    """Return the outputs of a program whose inputs and constants are in `env`, by the ids of their values."""

    def blocks(value):
        return env[id(value)] if isinstance(value, Value) else _blocks((), lambda _: value)

    for op in program.operations:
        emit: Any = EMIT.get(op.name, _elementwise)
        out = emit(program, op, *map(blocks, op.inputs))
        env.update(zip(map(id, op.outputs), out if isinstance(out, list) else [out]))
    return [blocks(value) for value in program.outputs]


# Arrays in registers


def _warps(program: Program) -> int:
    """Return the warps of a member: each thread holds 32 to 63 numbers of its largest array."""
    values = [value for op in program.operations for value in op.outputs]
    largest = max(math.prod(program.padded(value.shape)) for value in values)
    return min(1 << max(largest // 1024, 1).bit_length() - 1, 8)


def _pad(leaf, program, shape, indexed=False):
    """Pad the long axes of `leaf` [..., *shape], but for the first one if it is indexed."""
    padded, ahead = dict(zip(program.long(shape), program.padded(shape))), leaf.ndim - len(shape)
    width = [(0, 0)] * ahead + [(0, padded.get(i, n) - n if i >= indexed else 0) for i, n in enumerate(shape)]
    return jnp.pad(leaf, width) if any(after for _, after in width) else leaf


def _blocks(extents: Iterable[int], make: Callable) -> Blocks:
    """Return the array of objects of this shape whose element at an index is make(index)."""
    blocks = np.empty(tuple(extents), object)
    for index in np.ndindex(blocks.shape):
        blocks[index] = make(index)
    return blocks


def _extents(program, shape):
    """Return the shape of the array of objects that holds an array of `shape`."""
    return tuple(n if n <= program.short else 1 for n in shape)


def _where(program, shape, index):
    """Return the index into a reference for the block at `index`."""
    long = program.long(shape)
    return tuple(slice(None) if axis in long else number for axis, number in enumerate(index)) or ...


def _rows(program, size, order, number):
    """Return the rows of step `number`: one array, or a number for each row."""
    return [order[number, :]] if size > program.short else [order[number, row] for row in range(size)]


def _load(program, value, ref, rows=None):
    """Load the blocks of `value` from memory: all of it, or these rows."""

    def block(index):
        where = _where(program, value.shape, index)
        return ref[where if rows is None else (rows[index[0]], *where[1:])]

    return _blocks(_extents(program, value.shape), block)


def _split(many):
    return tuple(block for blocks in many for block in blocks.flat)


def _join(flat, program, values):
    """Return the blocks of each of `values` from `flat`, which holds all of them in order."""
    flat = iter(flat)
    return [_blocks(_extents(program, value.shape), lambda _: next(flat)) for value in values]


def _broadcast(block, shape, axes=()):
    """Broadcast a block or a NumPy scalar to this shape; its axis i becomes axes[i]."""
    if isinstance(block, np.generic):  # bound, as some of Triton's rules accept no literals
        return (
            block
            if shape == ()
            else lax.broadcast_in_dim_p.bind(block, shape=tuple(shape), broadcast_dimensions=(), sharding=None)
        )
    return block if block.shape == tuple(shape) else lax.broadcast_in_dim(block, shape, axes)


def _select(where, block, other):
    return lax.select(where, block, _broadcast(other, block.shape))


def _number(block, axis):
    """Return the position along `axis` of each number of a block."""
    return lax.broadcasted_iota(jnp.int32, block.shape, axis)


def _cleared(block, axis, size, fill):
    """Return a block with `fill` in the padding beyond `size`."""
    if block.shape[axis] == size:
        return block
    return _select(_number(block, axis) < size, block, block.dtype.type(fill))


def _pick(block, axis, index):
    """Return the numbers at `index` of `axis`, without that axis, exactly; every thread then holds them."""
    return _select(_number(block, axis) == index, block, block.dtype.type(0)).sum(axis, dtype=block.dtype)


# Operations


def _largest(a, b):
    """Return the maximum, NaN where either is NaN, as in XLA; Triton's own returns the other number."""
    return lax.select((a < b) | (b != b), b, a)


def _smallest(a, b):
    return lax.select((a > b) | (b != b), b, a)


FUNCTIONS = {
    "max": _largest,
    "min": _smallest,
    "clamp": lambda low, x, high: _smallest(_largest(x, low), high),
    "logistic": lambda x: 1 / (1 + lax.exp(-x)),
    "is_finite": lambda x: lax.abs(x) < np.float32(np.inf),
    "one_minus_square": lambda x: (1 + x) * (1 - x),
    "square": lambda x: x * x,
    **dict.fromkeys(IDENTITY, lambda x: x),
}


def _elementwise(program: Program, op: Operation, *inputs: Blocks) -> Blocks:
    """Apply an operation elementwise; scalars and axes of size 1 are broadcast."""
    shape = op.outputs[0].shape
    function: Any = FUNCTIONS.get(op.name) or partial(op.primitive.bind, **op.params)
    spread = [_spread(program, before, x, shape, range(x.ndim)) for before, x in zip(op.inputs, inputs)]
    return _blocks(_extents(program, shape), lambda i: _applied(function, *(x[i] for x in spread)))


def _applied(function, *blocks):
    """Return function(*blocks); of constants a NumPy scalar, as some of Triton's rules accept no literals."""
    if not all(isinstance(block, np.generic) for block in blocks):
        return function(*blocks)
    with jax.ensure_compile_time_eval():
        return np.asarray(function(*blocks))[()]


def _divide(program, op, a, b):
    """Divide elementwise: an array by one number as times its reciprocal, as a quotient takes several instructions.

    A number below 3e-39 counts as 0.
    """
    number = b.item() if b.shape == () else None
    if isinstance(number, np.generic | None) or op.outputs[0].shape == () or op.outputs[0].dtype != np.float32:
        return _elementwise(program, op, a, b)
    return _blocks(a.shape, lambda i: a[i] * _broadcast(1 / number, a[i].shape))


COMBINE = {"reduce_sum": lax.add, "reduce_max": _largest, "reduce_min": _smallest}


def _extreme(dtype, sign):
    """Return the identity of a maximum (sign -1) or minimum (1) of numbers of this dtype."""
    return sign * np.inf if dtype == np.float32 else (np.iinfo(dtype).max if sign > 0 else np.iinfo(dtype).min)


def _reduce(program, op, x):
    """Reduce over short axes first, which takes no exchange between threads."""
    shape, dtype, axes = op.inputs[0].shape, op.outputs[0].dtype, op.params["axes"]
    if not axes:
        return x
    long = program.long(shape)
    neutral = {"reduce_sum": 0, "reduce_max": _extreme(dtype, -1), "reduce_min": _extreme(dtype, 1)}[op.name]

    def reduced(index):
        block = reduce(partial(_applied, COMBINE[op.name]), x[index].flat)
        for axis in sorted(set(axes) & set(long), reverse=True):
            position = long.index(axis)
            block = _cleared(block, position, shape[axis], neutral)
            out = op.primitive.bind(block, **op.params | {"axes": (position,)})
            if op.name != "reduce_sum" and dtype == np.float32:  # in which Triton loses a NaN
                is_nan = (block != block).astype(jnp.int32).sum(position) > 0
                out = lax.select(is_nan, _broadcast(np.float32(np.nan), out.shape), out)
            block = out
        return block

    kept = [axis for axis in range(len(shape)) if axis not in axes]
    x = x.transpose(*kept, *axes)
    return _blocks(x.shape[: len(kept)], reduced)


def _any(program, op, x):
    """Return any() as a sum of ones above 0; Triton has no rule for it."""
    before, after = (Value(value.shape, np.dtype(np.int32)) for value in (*op.inputs, *op.outputs))
    params = {"axes": op.params["axes"], "out_sharding": None}
    ones = _blocks(x.shape, lambda i: x[i].astype(np.int32))
    total = _reduce(program, Operation(lax.reduce_sum_p, params, [before], [after]), ones)
    return _blocks(total.shape, lambda i: total[i] > 0)


def _broadcast_in_dim(program, op, x):
    return _spread(program, op.inputs[0], x, op.params["shape"], op.params["broadcast_dimensions"])


def _spread(program, before, x, shape, axes):
    """Broadcast the blocks `x` of the value `before` (or a NumPy scalar) to `shape`; axis i becomes axes[i]."""
    long = program.long(shape)
    held = [long.index(axis) for axis, n in zip(axes, before.shape) if n > program.short]
    aligned = [1] * len(shape)
    for axis, n in zip(axes, x.shape):
        aligned[axis] = n
    x = np.broadcast_to(x.reshape(aligned), _extents(program, shape))
    return _blocks(x.shape, lambda i: _broadcast(x[i], program.padded(shape), held))


def _reshape(program, op, x):
    """Add or remove axes of size 1, as `reader.check` allows no other reshape."""
    return x.reshape(_extents(program, op.outputs[0].shape))


def _transpose(program, op, x):
    axes, long = op.params["permutation"], program.long(op.inputs[0].shape)
    held = [long.index(axis) for axis in axes if axis in long]
    x = x.transpose(axes)
    if held == sorted(held):
        return x
    return _blocks(x.shape, lambda i: lax.transpose(x[i], held))


def _iota(program, op):
    shape, axis = op.params["shape"], op.params["dimension"]
    padded, long = program.padded(shape), program.long(shape)

    def numbers(index):
        if axis in long:
            return lax.broadcasted_iota(op.params["dtype"], padded, long.index(axis))
        return lax.full(padded, index[axis], op.params["dtype"])

    return _blocks(_extents(program, shape), numbers)


def _dot(program, op, a, b):
    """Multiply two matrices: short sides number by number, by tensor cores where all sides are long enough."""
    ((i,), (j,)), _ = op.params["dimension_numbers"]
    a_shape, b_shape = (value.shape for value in op.inputs)
    inner, size = a_shape[i] > program.short, a_shape[i]
    free = len(a_shape) - 1

    def block(index):
        left, right = _at(a, i, index[:free]), _at(b, j, index[free:])
        return reduce(lax.add, [multiply(x, y) for x, y in zip(left, right)])

    def multiply(x, y):
        """Multiply blocks [row, inner] and [inner, column], each with or without row, column and inner."""
        if not inner:
            shape = x.shape + y.shape
            return _broadcast(x, shape, range(x.ndim)) * _broadcast(y, shape, range(x.ndim, len(shape)))
        x_inner, y_inner = program.long(a_shape).index(i), program.long(b_shape).index(j)
        x, y = _cleared(x, x_inner, size, 0), _cleared(y, y_inner, size, 0)
        if x.ndim == 2 and y.ndim == 2:
            return _matrices(op, x, x_inner, y, y_inner, size)
        if x.ndim == 1:  # a vector by a matrix or a vector
            out = _broadcast(x, y.shape, (y_inner,)) * y
            return out.sum(y_inner)
        return (x * _broadcast(y, x.shape, (x_inner,))).sum(x_inner)

    extents = [n for axis, n in enumerate(a.shape) if axis != i] + [n for axis, n in enumerate(b.shape) if axis != j]
    return _blocks(extents, block)


def _at(x, axis, index):
    """Return the blocks along `axis` at this index of the other axes."""
    return np.moveaxis(x, axis, -1)[index].flat


def _matrices(op, x, i, y, j, size):
    """Multiply two blocks over axis i of x and j of y, of `size` numbers before padding."""
    rows, columns = x.shape[1 - i], y.shape[1 - j]
    if min(rows, columns, x.shape[i]) >= TENSOR_CORES:
        kwargs = {"precision": op.params["precision"], "preferred_element_type": jnp.float32}
        if rows > columns:  # transposed, as Triton splits a wide product better among the warps
            return lax.dot_general(y, x, (((j,), (i,)), ((), ())), **kwargs).T
        return lax.dot_general(x, y, (((i,), (j,)), ((), ())), **kwargs)
    shape = rows, columns
    if x.shape[i] <= min(shape):  # one outer product after the other
        picked = [(_pick(x, i, k), _pick(y, j, k)) for k in range(size)]
        return reduce(lax.add, [_broadcast(a, shape, (0,)) * _broadcast(b, shape, (1,)) for a, b in picked])
    axis = int(columns <= rows)  # one column after the other, or one row
    if axis == 0:
        x, i, y, j = y, j, x, i
    out = _broadcast(np.float32(0), shape)
    for k in range(shape[axis]):
        line = (x * _broadcast(_pick(y, 1 - j, k), x.shape, (i,))).sum(i)
        out = _select(_number(out, axis) == k, _broadcast(line, shape, (1 - axis,)), out)
    return out


def _slice(program, op, x):
    """Take every so many numbers of short axes; a long axis is taken whole, as `reader.check_moves` holds."""
    strides = op.params["strides"] or [1] * x.ndim
    return x[tuple(map(slice, op.params["start_indices"], op.params["limit_indices"], strides))]


def _pieces(program, op, x):
    """Split along one axis into pieces of these sizes."""
    return np.split(x, np.cumsum(op.params["sizes"])[:-1], op.params["axis"])


def _padded(program, op, x, fill):
    """Pad short axes at their ends; less than nothing is cut off."""
    block = _broadcast(fill.item(), program.padded(op.outputs[0].shape))
    lows = [low for low, _, _ in op.params["padding_config"]]

    def at(index):
        source = tuple(i - low for i, low in zip(index, lows))
        return x[source] if all(0 <= i < n for i, n in zip(source, x.shape)) else block

    return _blocks(_extents(program, op.outputs[0].shape), at)


def _concatenate(program, op, *inputs):
    return np.concatenate(inputs, op.params["dimension"])


EMIT = {
    "div": _divide,
    **dict.fromkeys(COMBINE, _reduce),
    "reduce_or": _any,
    "broadcast_in_dim": _broadcast_in_dim,
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), _reshape),
    "transpose": _transpose,
    "iota": _iota,
    "dot_general": _dot,
    "slice": _slice,
    "split": _pieces,
    "pad": _padded,
    "concatenate": _concatenate,
}
