"""What makes two workers a pair."""

from dataclasses import replace

import msgspec
import pytest
import torch

from common.errors import FingerprintMismatch
from common.ids import Epoch, WorkerId
from common.messages import Fingerprint, Hello, HelloReply
from common.model.spec import LayerSpec, ModelSpec
from kvstore.fingerprint import fingerprint, first_difference, require_same
from kvstore.layout import KvLayout

LAYERS = (LayerSpec(2, 8, 8), LayerSpec(2, 8, 8))
SPEC = ModelSpec(
    name="tiny",
    layers=LAYERS,
    vocab_size=100,
    max_model_len=64,
    dtype=torch.bfloat16,
    device=torch.device("cpu"),
    eos_token_ids=(1,),
    model_digest="m",
    tokenizer_digest="t",
)


def of(spec: ModelSpec, block_size: int = 16, dtype: torch.dtype = torch.bfloat16) -> Fingerprint:
    return fingerprint(spec, KvLayout(spec.layers, block_size, dtype))


def test_two_workers_with_the_same_model_agree_wherever_they_run():
    assert first_difference(of(SPEC), of(replace(SPEC, name="other", max_model_len=32))) is None


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (of(replace(SPEC, model_digest="x")), "model"),
        (of(replace(SPEC, tokenizer_digest="x")), "tokenizer"),
        (of(replace(SPEC, layers=LAYERS[:1])), "kv_shape"),
        (of(replace(SPEC, layers=(LAYERS[0], LayerSpec(2, 8, 4)))), "kv_shape"),
        (of(SPEC, dtype=torch.float32), "kv_dtype"),
        (of(replace(SPEC, quantization="int8")), "quantization"),
        (of(SPEC, block_size=32), "block_size"),
        (msgspec.structs.replace(of(SPEC), layout="other"), "layout"),
        (msgspec.structs.replace(of(SPEC), protocol=99), "protocol"),
    ],
)
def test_the_differing_field_is_named(other: Fingerprint, field: str):
    assert first_difference(of(SPEC), other) == field
    ours = HelloReply(WorkerId("p0"), Epoch(1), of(SPEC))
    with pytest.raises(FingerprintMismatch, match=f"workers p0 and d0 differ in {field}: "):
        require_same(ours, Hello(WorkerId("d0"), Epoch(1), other))


def test_equal_workers_pass():
    require_same(HelloReply(WorkerId("p0"), Epoch(1), of(SPEC)), Hello(WorkerId("d0"), Epoch(9), of(SPEC)))
