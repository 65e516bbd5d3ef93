"""The small real model, as ``baton fetch-model`` leaves it."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from compose.smollm2 import NAME
from tests.e2e.test_baton import baton


def test_a_second_fetch_finds_it_and_fetches_nothing(model_dir: Path) -> None:
    ended = baton("fetch-model", NAME)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"{model_dir}\n", "")


def test_it_answers_in_plain_transformers(model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    token_ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    answer = model.generate(token_ids, max_new_tokens=2, do_sample=False)
    assert tokenizer.decode(answer[0]) == "The capital of France is Paris."


def test_an_answer_ends_at_the_end_of_a_turn(model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    assert tokenizer.eos_token == "<|im_end|>"
    assert GenerationConfig.from_pretrained(model_dir).eos_token_id == tokenizer.eos_token_id


def test_its_chat_template_is_the_models_own(model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    chat = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_every_digit_is_a_token_and_spaces_before_it_stay_together(model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    assert tokenizer.tokenize("a  2026") == ["a", "ĠĠ", "2", "0", "2", "6"]
