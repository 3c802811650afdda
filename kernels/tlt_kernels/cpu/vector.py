"""The two sums of attention, written as LLVM instructions so that no compiler decides their order.

`dots`: lane i sums x[d] * y[d] over d = i, i + 16, ... by fused multiply-adds in rising d; the 16
lanes are then added as a tree of halves. `weighted_sums`: fused multiply-adds in the order of the
keys. No fast-math flag is set, so a result has the same bits in any company. Addresses are int64s;
vectors are float32 and need no alignment. The attention kernel calls both.
"""

from __future__ import annotations

from llvmlite import ir
from numba import float32, int64, types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
KEYS = 8  # keys per call
_FLOAT, _INT32, _INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_HALF = ir.VectorType(_FLOAT, LANES // 2)
_ZERO = ir.Constant(_VECTOR, [0.0] * LANES)


@intrinsic
def dots(typing_context, query_0, query_1, keys, width, scale, out_0, out_1):
    """Write the dot products of two queries with eight keys, times `scale`, into out_0[:8] and
    out_1[:8]; `keys` holds eight addresses.
    """

    def generate(context, builder, signature, arguments):
        query_0, query_1, keys, width, scale, *outs = arguments
        key_address = [
            _load(builder, builder.add(keys, _INT64(8 * i)), _INT64, 8) for i in range(KEYS)
        ]
        vectors = [query_0, query_1, *key_address]
        sums = [
            cgutils.alloca_once_value(builder, _ZERO) for _ in range(2 * KEYS)
        ]  # registers, once LLVM has promoted them
        whole = builder.and_(width, _INT64(-LANES))
        with cgutils.for_range_slice(builder, _INT64(0), whole, _INT64(LANES)) as (d, _):
            offset = builder.shl(d, _INT64(2))
            _multiply_add(
                builder,
                sums,
                [_load(builder, builder.add(vector, offset), _VECTOR, 4) for vector in vectors],
            )
        with builder.if_then(builder.icmp_signed("!=", whole, width), likely=False):
            _multiply_add(
                builder, sums, [_load_rest(builder, vector, whole, width) for vector in vectors]
            )
        total = builder.fmul(
            _add_lanes(builder, [builder.load(cell) for cell in sums]), _broadcast(builder, scale)
        )
        for i, out in enumerate(outs):
            half = builder.shuffle_vector(
                total,
                total,
                ir.Constant(ir.VectorType(_INT32, KEYS), list(range(KEYS * i, KEYS * (i + 1)))),
            )
            builder.store(half, builder.inttoptr(out, _HALF.as_pointer())).align = 4
        return context.get_dummy_value()

    return types.void(int64, int64, int64, int64, float32, int64, int64), generate


@intrinsic
def weighted_sums(typing_context, weights_0, weights_1, values, count, width, out_0, out_1):
    """Write the sums of weights[c] * value c over c < count, into out_0 and out_1 of `width`;
    `values` holds `count` addresses.
    """

    def generate(context, builder, signature, arguments):
        weights_0, weights_1, values, count, width, *outs = arguments
        done = _INT64(0)
        for kind, blocks in ((_VECTOR, 4), (_VECTOR, 1), (_FLOAT, 1)):  # as wide as still fits
            lanes = LANES if kind is _VECTOR else 1
            step = lanes * blocks
            stop = builder.and_(width, _INT64(-step))
            with cgutils.for_range_slice(builder, done, stop, _INT64(step)) as (d, _):
                offsets = [
                    builder.shl(builder.add(d, _INT64(lanes * i)), _INT64(2)) for i in range(blocks)
                ]
                _weighted_sum_block(
                    builder, kind, (weights_0, weights_1), values, count, offsets, outs
                )
            done = stop
        return context.get_dummy_value()

    return types.void(int64, int64, int64, int64, int64, int64, int64), generate


def _weighted_sum_block(builder, kind, weights, values, count, offsets, outs):
    zero = ir.Constant(kind, None)
    sums = [[cgutils.alloca_once_value(builder, zero) for _ in offsets] for _ in outs]
    for row in sums:
        for cell in row:
            builder.store(zero, cell)
    with cgutils.for_range_slice(builder, _INT64(0), count, _INT64(1)) as (c, _):
        value = _load(builder, builder.add(values, builder.shl(c, _INT64(3))), _INT64, 8)
        parts = [_load(builder, builder.add(value, offset), kind, 4) for offset in offsets]
        for weight, row in zip(weights, sums, strict=True):
            scalar = _load(builder, builder.add(weight, builder.shl(c, _INT64(2))), _FLOAT, 4)
            factor = _broadcast(builder, scalar) if kind is _VECTOR else scalar
            for part, cell in zip(parts, row, strict=True):
                builder.store(_fused(builder, kind, factor, part, builder.load(cell)), cell)
    for out, row in zip(outs, sums, strict=True):
        for offset, cell in zip(offsets, row, strict=True):
            builder.store(
                builder.load(cell), builder.inttoptr(builder.add(out, offset), kind.as_pointer())
            ).align = 4


def _fused(builder, kind, a, b, c):
    """Return a * b + c, rounded once."""
    name = f"llvm.fma.v{LANES}f32" if kind is _VECTOR else "llvm.fma.f32"
    return builder.call(
        cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), name),
        [a, b, c],
    )


def _load(builder, address, kind, align):
    load = builder.load(builder.inttoptr(address, kind.as_pointer()))
    load.align = align
    return load


def _load_rest(builder, address, start, stop):
    """Load elements [start, stop), fewer than a vector's; the other lanes are 0."""
    vector = cgutils.alloca_once_value(builder, _ZERO)
    builder.store(_ZERO, vector)
    with cgutils.for_range_slice(builder, start, stop, _INT64(1)) as (d, _):
        element = _load(builder, builder.add(address, builder.shl(d, _INT64(2))), _FLOAT, 4)
        builder.store(
            builder.insert_element(builder.load(vector), element, builder.sub(d, start)), vector
        )
    return builder.load(vector)


def _multiply_add(builder, sums, vectors):
    for q, query in enumerate(vectors[:2]):
        for k, key in enumerate(vectors[2:]):
            cell = sums[q * KEYS + k]
            builder.store(_fused(builder, _VECTOR, query, key, builder.load(cell)), cell)


def _add_lanes(builder, vectors):
    """Reduce 16 vectors to one, whose lane i is the sum of the lanes of vectors[i]."""
    half = LANES // 2
    while half:
        first, second = ([i for i in range(2 * LANES) if i // half % 2 == side] for side in (0, 1))
        vectors = [
            builder.fadd(_shuffle(builder, a, b, first), _shuffle(builder, a, b, second))
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        half //= 2
    return vectors[0]


def _shuffle(builder, a, b, lanes):
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_INT32, LANES), lanes))


def _broadcast(builder, scalar):
    return _shuffle(builder, builder.insert_element(_ZERO, scalar, _INT32(0)), _ZERO, [0] * LANES)
