"""What loading finds out, and what it refuses."""

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from common.errors import ConfigError, UnsupportedModel
from common.model.load import load_model
from common.model.loaded import LoadedModel
from common.model.spec import LayerSpec
from tests.support.tiny_models import build

ROOT = Path(__file__).parents[3]


def load(directory: Path, **changes: object) -> LoadedModel:
    options = {"dtype": "auto", "device": "cpu", "max_model_len": None} | changes
    return load_model(str(directory), **options)  # type: ignore[arg-type]


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def save(directory: Path, model_type: str, **settings: object) -> Path:
    """Save a random model of a kind that must be refused."""
    config = AutoConfig.for_model(model_type, vocab_size=64, pad_token_id=0, bos_token_id=0, eos_token_id=1, **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny-llama"
    build("llama", directory)
    return directory


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "copy"))


def built(family: str, tmp_path: Path) -> LoadedModel:
    build(family, tmp_path)
    return load(tmp_path)


def test_a_directory_gives_name_shapes_and_dtype(llama: Path):
    spec = load(llama).spec
    assert spec.name == "tiny-llama"
    assert spec.layers == (LayerSpec(kv_heads=2, k_dim=16, v_dim=16),) * 2
    assert spec.dtype == torch.float32
    assert spec.device == torch.device("cpu")
    assert spec.quantization == "none"


def test_widths_of_keys_and_values_may_differ(tmp_path: Path):
    assert built("deepseek_v2", tmp_path).spec.layers[0] == LayerSpec(kv_heads=4, k_dim=24, v_dim=16)


@pytest.mark.parametrize(
    ("family", "windows"), [("mistral", [24, 24]), ("gemma3_text", [20, 20, None]), ("qwen2", [None, 20])]
)
def test_windows_are_found_layer_by_layer(family: str, windows: list[int | None], tmp_path: Path):
    assert [layer.form.window for layer in built(family, tmp_path).attention] == windows


def test_a_window_that_only_the_mask_knows_is_found(tmp_path: Path):
    windows = [layer.form.window for layer in built("qwen2_moe", tmp_path).attention]
    assert 20 in windows


def test_chunks_and_query_temperature_are_found(tmp_path: Path):
    attention = built("llama4_text", tmp_path).attention
    assert [layer.form.chunk for layer in attention] == [20, 20, 20, None]
    assert [layer.temperature is not None for layer in attention] == [False, False, False, True]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_in_the_dtype_that_was_asked_for(llama: Path, dtype: str):
    loaded = load(llama, dtype=dtype)
    assert loaded.spec.dtype == getattr(torch, dtype)
    assert {parameter.dtype for parameter in loaded.module.parameters()} == {loaded.spec.dtype}


def test_end_of_sequence_from_generation_settings_then_configuration(copy: Path):
    generation = json.loads((copy / "generation_config.json").read_text())
    (copy / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": [2, 7]}))
    assert load(copy).spec.eos_token_ids == (2, 7)
    (copy / "generation_config.json").unlink()
    edit_config(copy, eos_token_id=9)
    assert load(copy).spec.eos_token_ids == (9,)


def test_a_limit_is_taken_over_and_one_beyond_the_positions_refused(llama: Path):
    assert load(llama).spec.max_model_len == 2048
    assert load(llama, max_model_len=100).spec.max_model_len == 100
    with pytest.raises(ConfigError, match="--max-model-len is 4096, but the model's positions end at 2048"):
        load(llama, max_model_len=4096)


def test_rotary_positions_that_move_with_length_hold_the_limit_down(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    build("phi3", tmp_path)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 256,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
    }
    edit_config(tmp_path, rope_parameters=rope, original_max_position_embeddings=256)
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path).spec.max_model_len == 256
    assert "longrope" in caplog.text
    assert "256 tokens instead of 2048" in caplog.text
    assert load(tmp_path, max_model_len=200).spec.max_model_len == 200


def test_dynamic_rotary_positions_stay_below_the_length_at_which_they_grow(copy: Path):
    edit_config(copy, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    assert load(copy).spec.max_model_len == 2048


def test_the_same_files_elsewhere_have_the_same_digests(llama: Path, copy: Path):
    here, there = load(llama).spec, load(copy).spec
    assert (here.model_digest, here.tokenizer_digest) == (there.model_digest, there.tokenizer_digest)
    edit_config(copy, transformers_version="4.0", dtype="bfloat16", _name_or_path="elsewhere")
    assert load(copy).spec.model_digest == here.model_digest


def test_other_weights_configuration_or_tokenizer_have_other_digests(llama: Path, copy: Path):
    here = load(llama).spec
    edit_config(copy, rms_norm_eps=1e-3)
    assert load(copy).spec.model_digest != here.model_digest
    shutil.copy(llama / "config.json", copy)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-3] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert load(copy).spec.model_digest != here.model_digest
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    assert load(copy).spec.tokenizer_digest != here.tokenizer_digest


@pytest.mark.parametrize(("model_type", "name"), [("bloom", "bloom"), ("mpt", "mpt")])
def test_position_biases_are_refused_by_name(model_type: str, name: str, tmp_path: Path):
    settings = {"bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 2}, "mpt": {"d_model": 32, "n_layers": 2}}
    with pytest.raises(UnsupportedModel, match=f"^{name} uses ALiBi"):
        load(save(tmp_path, model_type, **settings[model_type]))


def test_a_falcon_with_position_biases_is_refused(tmp_path: Path):
    save(tmp_path, "falcon", hidden_size=32, num_hidden_layers=2, num_attention_heads=2, alibi=True)
    with pytest.raises(UnsupportedModel, match=r"^falcon uses ALiBi"):
        load(tmp_path)


def test_an_encoder_decoder_is_refused(tmp_path: Path):
    AutoConfig.for_model("t5", d_model=16, num_layers=1).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="t5 is an encoder-decoder"):
        load(tmp_path)


def test_a_recurrent_model_is_refused(tmp_path: Path):
    save(tmp_path, "mamba", hidden_size=16, num_hidden_layers=2, state_size=4, max_position_embeddings=64)
    with pytest.raises(UnsupportedModel, match="MambaForCausalLM"):
        load(tmp_path)


def test_a_model_with_state_beside_its_attention_is_refused(tmp_path: Path):
    save(
        tmp_path,
        "falcon_h1",
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        mamba_d_ssm=32,
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_d_state=8,
        initializer_range=0.2,
        max_position_embeddings=64,
    )
    with pytest.raises(UnsupportedModel, match="FalconH1ForCausalLM"):
        load(tmp_path)


def test_a_model_without_a_language_head_is_refused(tmp_path: Path):
    AutoConfig.for_model("vit", hidden_size=16, max_position_embeddings=64).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="vit is not a causal language model"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int7"}, "--dtype is 'int7'"),
        ({"device": "tpu"}, "--device is 'tpu'"),
    ],
)
def test_wrong_options_name_the_flag(llama: Path, changes: dict[str, str], message: str):
    with pytest.raises(ConfigError, match=message):
        load(llama, **changes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_said(llama: Path):
    with pytest.raises(ConfigError, match="no CUDA device"):
        load(llama, device="cuda")


def test_a_missing_model_and_one_without_weights_are_said(tmp_path: Path, copy: Path):
    with pytest.raises(ConfigError, match="neither a model directory"):
        load(tmp_path / "nothing-here")
    (copy / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="weights of --model"):
        load(copy)


def test_our_kernels_folder_does_not_pass_for_the_package_that_transformers_probes_for():
    program = (
        "import kernels; assert kernels.__version__ == '0', kernels.__version__\n"
        "from transformers import LlamaForCausalLM\n"
        "from transformers.utils import is_kernels_available\n"
        "print(LlamaForCausalLM.__name__, is_kernels_available())"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["LlamaForCausalLM", "False"], done.stderr
