"""What two workers must have in common before one may read the other's blocks."""

import hashlib

import msgspec

from common.errors import FingerprintMismatch
from common.messages import Fingerprint, Hello, HelloReply
from common.model.spec import ModelSpec
from kvstore import layout as block_layout
from kvstore.layout import KvLayout


def fingerprint(spec: ModelSpec, layout: KvLayout) -> Fingerprint:
    """Return the fingerprint of a worker that keeps the KV of ``spec`` in ``layout``."""
    widths = ";".join(f"{layer.kv_heads},{layer.k_dim},{layer.v_dim}" for layer in layout.layers)
    return Fingerprint(
        model=spec.model_digest,
        tokenizer=spec.tokenizer_digest,
        kv_shape=hashlib.blake2b(widths.encode(), digest_size=16).hexdigest(),
        kv_dtype=str(layout.dtype).removeprefix("torch."),
        quantization=spec.quantization,
        block_size=layout.block_size,
        layout=block_layout.NAME,
    )


def first_difference(a: Fingerprint, b: Fingerprint) -> str | None:
    """Return the name of the first field that differs, or None when the two may exchange blocks."""
    for field in msgspec.structs.fields(Fingerprint):
        if getattr(a, field.name) != getattr(b, field.name):
            return field.name
    return None


def require_same(ours: HelloReply, theirs: Hello | HelloReply) -> None:
    """Raise FingerprintMismatch, which names the field and both values, unless the two may exchange blocks."""
    field = first_difference(ours.fingerprint, theirs.fingerprint)
    if field is not None:
        raise FingerprintMismatch(
            f"workers {ours.worker_id} and {theirs.worker_id} differ in {field}: "
            f"{getattr(ours.fingerprint, field)} and {getattr(theirs.fingerprint, field)}"
        )
