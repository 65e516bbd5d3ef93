"""From what ``--model`` says to a folder."""

from pathlib import Path

import pytest

from common.errors import ConfigError
from compose.model_source import link_to, resolve_model
from compose.smollm2 import check_sha256


def test_a_folder_with_a_configuration_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_folder_without_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        resolve_model(str(tmp_path))


def test_a_name_that_can_be_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        resolve_model("no-such-model")


def test_a_file_that_is_not_the_known_one_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"abc")
    check_sha256(file, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
    with pytest.raises(ConfigError, match=r"model\.gguf .*SHA-256"):
        check_sha256(file, "0" * 64)


def test_a_link_leads_to_the_newest_model_wherever_its_folder_is_mounted(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
    link = tmp_path / "current"
    for name in ("one", "two", "two"):
        link_to(tmp_path / name, link)
        assert (link / "config.json").read_text() == name
    moved = tmp_path.rename(tmp_path.with_name("elsewhere"))
    assert (moved / "current" / "config.json").read_text() == "two"


def test_a_link_cannot_take_a_folders_place(tmp_path: Path) -> None:
    (tmp_path / "current" / "model").mkdir(parents=True)
    with pytest.raises(ConfigError, match="--link"):
        link_to(tmp_path, tmp_path / "current")
