"""Sixteen float32 lanes as a value inside compiled kernels, where loops alone do not vectorise well.

The compiler maps the lanes to whatever registers the processor has. Arrays are one-dimensional and contiguous; indices
are not checked. A 16-bit array is read as its bits: uint16 holds bfloat16, int16 holds float16.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16

_I32 = ir.IntType(32)
_F32 = ir.FloatType()
_FLOATS = ir.VectorType(_F32, LANES)


def _operation(build: Callable[..., Any]) -> Any:
    """Make ``build(typing_context, *types)``, giving a signature and a code generator, callable in compiled code."""
    return intrinsic(build)


class _Vector(types.Type):
    """The type of a value with sixteen float32 lanes."""

    def __init__(self) -> None:
        super().__init__(name="float32x16")


_vector = _Vector()


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, _FLOATS)


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index])


def _widen(builder: Any, value: Any, dtype: Any, lanes: int) -> Any:
    """Return ``value``, lanes of ``dtype`` as bits, as float32 lanes."""
    if dtype == types.float32:
        return value

    def many(element: Any) -> Any:
        return ir.VectorType(element, lanes)

    if dtype == types.uint16:
        bits = builder.shl(builder.zext(value, many(_I32)), ir.Constant(many(_I32), [16] * lanes))
        return builder.bitcast(bits, many(_F32))
    return builder.fpext(builder.bitcast(value, many(ir.HalfType())), many(_F32))


def _load(lanes: int, result: Any, array: Any, index: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        dtype = signature.args[0].dtype
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        raw = ir.VectorType(context.get_data_type(dtype), lanes)
        value = builder.load(builder.bitcast(pointer, raw.as_pointer()), align=dtype.bitwidth // 8)
        wide = _widen(builder, value, dtype, lanes)
        return wide if lanes > 1 else builder.extract_element(wide, ir.Constant(_I32, 0))

    return result(array, types.intp), codegen


@_operation
def load(typing_context: Any, array: Any, index: Any) -> Any:
    """``load(array, index)``: the lanes at ``index`` to ``index + 15``, as float32."""
    return _load(LANES, _vector, array, index)


@_operation
def load_one(typing_context: Any, array: Any, index: Any) -> Any:
    """``load_one(array, index)``: the element at ``index``, as float32."""
    return _load(1, types.float32, array, index)


@_operation
def store(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
    """``store(array, index, value)``: write the lanes to a float32 array at ``index`` to ``index + 15``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        builder.store(args[2], builder.bitcast(pointer, _FLOATS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, _vector), codegen


@_operation
def splat(typing_context: Any, value: Any) -> Any:
    """``splat(value)``: one float32 in every lane."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _splat(builder, args[0], _FLOATS)

    return _vector(types.float32), codegen


@_operation
def fma(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """``fma(a, b, c)``: ``a * b + c`` in each lane, rounded once."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function_type = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
        return builder.call(cgutils.get_or_insert_function(builder.module, function_type, "llvm.fma.v16f32"), args)

    return _vector(_vector, _vector, _vector), codegen


@_operation
def lane_sum(typing_context: Any, value: Any) -> Any:
    """``lane_sum(value)``: the sum of the lanes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function_type = ir.FunctionType(_F32, [_F32, _FLOATS])
        reduce = cgutils.get_or_insert_function(builder.module, function_type, "llvm.vector.reduce.fadd.v16f32")
        return builder.call(reduce, [ir.Constant(_F32, 0.0), args[0]], fastmath=("reassoc",))

    return types.float32(_vector), codegen


@_operation
def store_lane_sums(typing_context: Any, array: Any, index: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """``store_lane_sums(array, index, a, b, c, d)``: write the sum of each value's lanes to four elements.

    The four sums share their shuffles, which makes them three times cheaper than one by one.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums = _four_sums(builder, args[2:])
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        builder.store(sums, builder.bitcast(pointer, sums.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, _vector, _vector, _vector, _vector), codegen


@_operation
def prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """``prefetch(array, index)``: bring the cache line of an element nearer; the index may be anywhere."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte_pointer = ir.IntType(8).as_pointer()
        pointer = builder.bitcast(_pointer(context, builder, signature.args[0], args[0], args[1]), byte_pointer)
        function_type = ir.FunctionType(ir.VoidType(), [byte_pointer, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
        builder.call(function, [pointer, *(ir.Constant(_I32, hint) for hint in (0, 2, 1))])  # read, second cache, data
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


@_operation
def float_of_bits(typing_context: Any, bits: Any) -> Any:
    """``float_of_bits(bits)``: the float32 that an int32 is the bits of."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _F32)

    return types.float32(types.int32), codegen


def _splat(builder: Any, value: Any, kind: Any) -> Any:
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_I32, kind.count), [0] * kind.count))


def _shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))


def _four_sums(builder: Any, values: list[Any]) -> Any:
    """Return ``[sum(a), sum(b), sum(c), sum(d)]``: two transposing adds inside groups of four lanes, then halving."""

    def pair(left: Any, right: Any, low: list[int], high: list[int]) -> Any:
        groups = range(0, LANES, 4)
        lanes = [[group + lane for group in groups for lane in half] for half in (low, high)]
        return builder.fadd(*(_shuffle(builder, left, right, half) for half in lanes))

    a, b, c, d = values
    ab = pair(a, b, [0, 16, 1, 17], [2, 18, 3, 19])
    cd = pair(c, d, [0, 16, 1, 17], [2, 18, 3, 19])
    sums = pair(ab, cd, [0, 1, 16, 17], [2, 3, 18, 19])
    width = LANES
    while width > 4:
        width //= 2
        halves = (list(range(width)), list(range(width, 2 * width)))
        sums = builder.fadd(*(_shuffle(builder, sums, sums, half) for half in halves))
    return sums
