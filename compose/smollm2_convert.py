"""``python -m compose.smollm2_convert GGUF TARGET``: write SmolLM2's GGUF file as a folder that transformers loads.

Weights are written in float32, exactly as the 4-bit file dequantises: 540 MB instead of 270, but bfloat16 would change
the most likely next token at 3-6 positions in 1,000, and a reference that reads the GGUF file itself would no longer
agree with us token for token. The configuration says bfloat16, the type the model was trained and published in, which
is what ``--dtype auto`` takes on a GPU.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

CONTEXT = 8192
"""Tokens of the context that the model was trained for."""


def convert(gguf: Path, target: Path) -> None:
    """Write weights, configuration and tokenizer of ``gguf`` to the folder ``target``."""
    _write_model(gguf, target)
    _write_tokenizer(gguf, target)


def _write_model(gguf: Path, target: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **_dequantize()
    )
    model.save_pretrained(target)
    _patch(target / "config.json", dtype="bfloat16", _name_or_path="SmolLM2-135M-Instruct")


def _dequantize() -> dict[str, Any]:
    """Newer releases keep GGUF weights packed unless told otherwise; older ones know no such choice."""
    gguf_config = getattr(transformers, "GgufConfig", None)
    return {} if gguf_config is None else {"quantization_config": gguf_config(dequantize=True)}


def _write_tokenizer(gguf: Path, target: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file names its pre-tokenizer ("smollm": every digit alone, then bytes as in GPT-2); the conversion only knows
    # the second half, which cuts spaces before a digit differently.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(target)
    settings = target / "tokenizer_config.json"
    _patch(settings, tokenizer_class="PreTrainedTokenizerFast", model_max_length=CONTEXT)
    _drop(settings, "backend", "is_local", "local_files_only")


def _patch(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=2, sort_keys=True) + "\n")


def _drop(path: Path, *names: str) -> None:
    kept = {name: value for name, value in json.loads(path.read_text()).items() if name not in names}
    path.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
