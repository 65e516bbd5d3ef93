"""Small real tokenizers of every kind that models use, built in memory, and a model directory around one."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The capital of France is Paris. The capital of Italy is Rome.",
    "Hello world, hello there! How are you today? I'm fine, thank you.",
    "Stop here. STOP. END of the story",
    "日本語のテキスト 한국어 텍스트 हिन्दी पाठ 👩‍👩‍👧‍👦 café naïve",
    "def main(argc: int) -> int:\n    return 0\n",
]

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level(*, add_prefix_space: bool = False) -> Tokenizer:
    """Return a byte-level BPE tokenizer, as GPT-2, Llama 3, Qwen or SmolLM have."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<think>", "⟦tool⟧"])
    return tokenizer


def sentencepiece(*, strip: bool = True, bos: bool = True) -> Tokenizer:
    """Return a BPE tokenizer with byte fallback, as Llama 2 and Mistral (``strip``) or Gemma have."""
    words = sorted({word for line in CORPUS for word in line.replace("日", "").split()})
    vocab: dict[str, int] = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ["▁", "▁▁", *sorted({character for word in words for character in word})]:
        vocab.setdefault(piece, len(vocab))
    for word in words:
        vocab.setdefault("▁" + word, len(vocab))
    merges: list[tuple[str, str]] = []
    for word in words:
        left = "▁"
        for character in word:
            vocab.setdefault(left + character, len(vocab))
            merges.append((left, character))
            left += character
    tokenizer = Tokenizer(models.BPE(vocab, list(dict.fromkeys(merges)), byte_fallback=True, unk_token="<unk>"))
    prepend = [normalizers.Prepend("▁")] if strip else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    tail = [decoders.Strip(" ", 1, 0)] if strip else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *tail])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def metaspace(prepend_scheme: str = "always") -> Tokenizer:
    """Return a unigram tokenizer with metaspace, as T5 or XGLM have."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_level() -> Tokenizer:
    """Return a tokenizer whose decoder is none of the well-known ones."""
    words = ["<unk>", "</s>", "the", "un", "##known", "##s", "house", ".", "!"]
    tokenizer = Tokenizer(models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


def write_model(
    folder: Path,
    tokenizer: Tokenizer | None = None,
    *,
    chat_template: str | None = CHATML,
    eos_token: str = "<|im_end|>",
    bos_token: str | None = None,
) -> Path:
    """Write the files of a model that a gateway reads, and return their folder."""
    tokenizer = tokenizer or byte_level()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)
    special: dict[str, Any] = {"eos_token": eos_token, "bos_token": bos_token}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    (folder / "config.json").write_text(json.dumps({"vocab_size": tokenizer.get_vocab_size() + 8}))
    generation = {"eos_token_id": [tokenizer.token_to_id(eos_token)]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder
