"""The compiled operations against their eager twins, at every instruction-set level that this processor has."""

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from common.model.race import race, race_in_numpy
from kernels.attention_form import AttentionForm
from kernels.cpu.native.build import build
from kernels.cpu.native.library import choose_level, load_library
from kernels.cpu.native.operations import Native, as_layer, as_linear, as_stack
from kernels.cpu.plan import CpuPlan
from kernels.decoder_layer import LayerWeights, LinearWeights, decoder_layer_eager
from kernels.elementwise import EagerElementwise
from kernels.norm_form import NormForm
from tests.kernels.cases import Shape, new_case
from tests.kernels.native import built_native

EAGER = EagerElementwise()
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
SIZES = [(1, 1), (3, 7), (4, 16), (33, 31), (40, 576), (100, 65), (200, 70), (64, 34)]
"""Outputs and inputs of a linear map."""


@pytest.fixture(params=["avx512_bf16", "avx512", "avx2", "portable"])
def native(request: pytest.FixtureRequest) -> Iterator[Native]:
    """The operations with one thread at one level; the highest level is back afterwards."""
    library = load_library() if built_native() is not None else None
    if library is None:
        pytest.skip("there is no C compiler")
    if choose_level(library, request.param) is None:
        pytest.skip(f"this processor has no {request.param}")
    yield Native(library, num_threads=1)
    choose_level(library)


def close(actual: Tensor, expected: Tensor, num_roundings: int = 1) -> None:
    assert actual.dtype == expected.dtype
    limit = num_roundings * TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), atol=limit, rtol=limit)


def randn(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def new_linear(outputs: int, inputs: int, dtype: torch.dtype, *, bias: bool, seed: int = 1) -> LinearWeights:
    weight = randn(outputs, inputs, dtype=dtype, seed=seed, scale=inputs**-0.5)
    return LinearWeights(weight, randn(outputs, dtype=dtype, seed=seed + 1) if bias else None)


@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 1000, 49_152])
def test_the_race_has_the_winner_that_numpy_finds(native: Native, num_tokens: int) -> None:
    draw = np.random.default_rng(num_tokens)
    weights = np.exp(draw.normal(scale=3, size=num_tokens)) * (draw.random(num_tokens) < 0.9)
    weights[draw.integers(num_tokens)] = 1.0
    ids = np.sort(draw.choice(10 * num_tokens, num_tokens, replace=False))
    for key in draw.integers(2**64, size=50, dtype=np.uint64).tolist():
        for tokens in (None, ids):
            assert race(weights, tokens, key) == race_in_numpy(weights, tokens, key)


def test_the_one_token_with_a_weight_wins_the_race(native: Native) -> None:
    weights = np.zeros(200)
    for winner in (0, 63, 64, 199):
        weights[:] = 0
        weights[winner] = 5e-324  # the smallest there is
        assert race(weights, None, winner) == race_in_numpy(weights, None, winner) == winner


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_map_of_any_number_of_rows(native: Native, size: tuple[int, int], dtype: torch.dtype, bias: bool):
    outputs, inputs = size
    weights = new_linear(outputs, inputs, dtype, bias=bias)
    for rows in (1, 2, 3, 4, 5, 9, 64, 65, 131, 205):
        x = randn(rows, inputs, dtype=dtype)
        expected = torch.nn.functional.linear(x.double(), weights.weight.double())
        expected = expected + weights.bias.double() if weights.bias is not None else expected
        close(native.linear(x, as_linear(weights)), expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_company(native: Native, dtype: torch.dtype):
    linear = as_linear(new_linear(50, 100, dtype, bias=True))
    x = randn(500, 100, dtype=dtype)
    few, many = native.linear(x[:67], linear), native.linear(x, linear)
    for begin, end in ((0, 1), (1, 3), (5, 8), (3, 64), (66, 67)):
        assert torch.equal(native.linear(x[begin:end], linear), few[begin:end])
    for begin, end in ((0, 129), (1, 200), (97, 400), (371, 500)):
        assert torch.equal(native.linear(x[begin:end], linear), many[begin:end])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 15, 16, 40, 576])
def test_norm_and_activation(native: Native, dtype: torch.dtype, width: int):
    x, up, weight = (randn(19, width, dtype=dtype, seed=seed, scale=3.0) for seed in (1, 2, 3))
    close(native.rms_norm(x, weight[0].float(), 1e-5), EAGER.rms_norm(x, weight[0], NormForm(1e-5)))
    close(native.silu_mul(x, up), EAGER.silu_mul(torch.cat((x, up), dim=-1)))


def test_the_activation_has_its_limits_far_out(native: Native):
    gate = torch.tensor([-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30] * 5)
    actual = native.silu_mul(gate[None], torch.ones(1, 35))
    torch.testing.assert_close(actual[0], torch.where(gate > 0, gate, 0.0), atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "width"), [(8, 8), (24, 24), (64, 64), (40, 20)])
def test_rotation(native: Native, dtype: torch.dtype, dim: int, width: int):
    x = randn(5, 3, dim, dtype=dtype)
    angles = randn(5, width, dtype=torch.float32)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    turned = x[..., :width].transpose(0, 1)[None]
    expected = EAGER.rotary(turned, turned, cos[None], sin[None])[0][0].transpose(0, 1)
    expected = torch.cat((expected, x[..., width:]), dim=-1)
    native.rotate_(x, cos, sin)
    close(x, expected)


def new_layer(shape: Shape, hidden: int, form: AttentionForm, *, bias: bool, head_norms: bool) -> LayerWeights:
    dtype, dim = shape.dtype, shape.k_dim
    q_size, kv_size, inner = shape.kv_heads * shape.group * dim, shape.kv_heads * dim, hidden + 24
    sizes = {
        "q": (q_size, hidden),
        "k": (kv_size, hidden),
        "v": (kv_size, hidden),
        "o": (hidden, q_size),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    linears = {name: new_linear(*size, dtype, bias=bias, seed=sum(name.encode())) for name, size in sizes.items()}
    norms = [1 + randn(size, dtype=dtype, seed=size, scale=0.1) for size in (hidden, hidden + 1, dim, dim + 1)]
    return LayerWeights(
        **linears,
        attention_norm=norms[0],
        mlp_norm=norms[1][1:],
        q_norm=norms[2] if head_norms else None,
        k_norm=norms[3][1:] if head_norms else None,
        epsilon=1e-5,
        head_dim=dim,
        rotary=True,
        form=form,
    )


def widened(layer: LayerWeights) -> LayerWeights:
    """Return ``layer`` in float32, whose eager twin is the exact result that both dtypes should come near to."""
    linears = {
        name: LinearWeights(one.weight.float(), None if one.bias is None else one.bias.float())
        for name in ("q", "k", "v", "o", "gate", "up", "down")
        for one in [getattr(layer, name)]
    }
    norms = {name: getattr(layer, name) for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm")}
    return replace(layer, **linears, **{name: None if norm is None else norm.float() for name, norm in norms.items()})


ROWS = [(1, 1), (1, 17), (3, 33), (1, 16), (2, 2), (4, 60)]
CHUNKS = [(5, 5), (1, 9), (33, 60), (64, 64), (2, 40)]
LONG = [(1, 1), (150, 150), (3, 33), (40, 300)]


@pytest.mark.parametrize("sequences", [ROWS, CHUNKS, LONG])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "group", "dim"), [(3, 3, 64), (1, 1, 16), (2, 4, 24), (1, 7, 8)])
@pytest.mark.parametrize("extras", [False, True])
def test_decoder_layers(
    native: Native,
    sequences: list[tuple[int, int]],
    dtype: torch.dtype,
    kv_heads: int,
    group: int,
    dim: int,
    extras: bool,
):
    shape = Shape(kv_heads, group, dim, dim, dtype=dtype)
    form = AttentionForm(dim**-0.5, window=9 if extras else None)
    layer = new_layer(shape, 72, form, bias=extras, head_norms=extras)
    layers = [replace(layer, rotary=not extras or dim != 24), layer]
    cases = [new_case(shape, sequences) for _ in layers]  # the same rows in every layer
    wanted = [new_case(replace(shape, dtype=torch.float32), sequences) for _ in layers]
    for right, case in zip(wanted, cases, strict=True):
        right.pool.copy_(case.pool)
    x = randn(len(cases[0].q), 72, dtype=dtype)
    angles = randn(len(x), dim, dtype=torch.float32)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    expected = x.float()
    for one, right in zip(layers, wanted, strict=True):
        expected = decoder_layer_eager(widened(one), expected, cos.float(), sin.float(), right.kv, right.rows)
    plan = CpuPlan.of(cases[0].rows, cases[0].kv.num_blocks, shape.block_size)
    caches, stack = [case.kv for case in cases], as_stack([as_layer(one) for one in layers])
    if plan.chunks and not native.can_run_layers(stack, caches, plan, dtype):
        pytest.skip("chunks go through the layer's pieces")
    actual = native.decoder_layers(stack, x, cos, sin, caches, plan)
    close(actual, expected.to(dtype), num_roundings=len(layers))
    for case, right in zip(cases, wanted, strict=True):
        limit = len(layers) * TOLERANCE[dtype]
        torch.testing.assert_close(case.pool.float(), right.pool, atol=limit, rtol=limit, equal_nan=True)


@pytest.mark.parametrize("sequences", [ROWS, LONG])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("extras", [False, True])
def test_keys_and_values_alone_have_the_same_bits(
    native: Native, sequences: list[tuple[int, int]], dtype: torch.dtype, extras: bool
):
    shape = Shape(2, 4, 24, 24, dtype=dtype)
    layer = as_layer(new_layer(shape, 72, AttentionForm(24**-0.5), bias=extras, head_norms=extras))
    whole, alone = (new_case(shape, sequences) for _ in range(2))
    x = randn(len(whole.q), 72, dtype=dtype)
    angles = randn(len(x), 24, dtype=torch.float32)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    plan = CpuPlan.of(whole.rows, whole.kv.num_blocks, shape.block_size)
    if not native.can_run_layers(as_stack([layer]), [whole.kv], plan, dtype):
        pytest.skip("the layer goes in pieces")
    native.decoder_layers(as_stack([layer]), x, cos, sin, [whole.kv], plan)
    before = x.clone()
    native.layer_kv(layer, x, cos, sin, alone.kv, plan)
    assert torch.equal(x, before)
    assert not torch.equal(alone.pool.nan_to_num(), new_case(shape, sequences).pool.nan_to_num())
    assert torch.equal(alone.pool.nan_to_num(), whole.pool.nan_to_num())


def test_threads_share_the_work_without_changing_it():
    one, four = built_native(1), built_native(4)
    if one is None or four is None:
        pytest.skip("there is no C compiler")
    linears = [as_linear(new_linear(outputs, 64, torch.float32, bias=False)) for outputs in (1, 40, 700)]
    x = randn(3, 64, dtype=torch.float32)
    expected = [one.linear(x, linear) for linear in linears]
    for _ in range(300):
        for linear, wanted in zip(linears, expected, strict=True):
            assert torch.equal(four.linear(x, linear), wanted)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the nice values of threads apart")
def test_helpers_are_as_nice_as_the_thread_that_calls():
    native = built_native(3)
    if native is None:
        pytest.skip("there is no C compiler")
    linear, x = as_linear(new_linear(700, 64, torch.float32, bias=False)), randn(3, 64, dtype=torch.float32)

    def nices_of_new_threads(nice: int) -> list[int]:
        """Return how nice the threads are that a caller on a thread of its own, so much nicer, brings."""

        def call() -> list[int]:
            before = set(os.listdir("/proc/self/task"))
            os.nice(nice)
            native.linear(x, linear)
            started = set(os.listdir("/proc/self/task")) - before
            return [os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in started]

        with ThreadPoolExecutor(1) as caller:
            return caller.submit(call).result()

    own = os.getpriority(os.PRIO_PROCESS, 0)
    for nice in (4, 0, 7, 0):
        assert nices_of_new_threads(nice) == [min(own + nice, 19)] * 2


def test_without_a_library_there_is_none(tmp_path: Path):
    assert load_library(tmp_path / "missing.so") is None
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    assert load_library(broken) is None


def test_a_build_without_a_working_compiler_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "no C compiler" in str(build(tmp_path / "a.so"))
    monkeypatch.setenv("CC", "false")
    assert "failed" in str(build(tmp_path / "a.so"))
    assert list(tmp_path.iterdir()) == []
