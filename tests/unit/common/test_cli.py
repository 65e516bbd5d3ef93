"""Command lines from configuration dataclasses."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import pytest

from common.cli import application, command, execute, to_argv, without_options
from common.errors import ConfigError, Unavailable
from common.sizes import parse_size


@dataclass(frozen=True, slots=True)
class ToyConfig:
    """A toy process."""

    model: str = "small"
    """Name of the model to serve."""
    port: int = 8000
    """Port to listen on."""
    dtype: Literal["auto", "float32"] = "auto"
    """Type of the weights."""
    kv_memory: str = "1GiB"
    """Memory for blocks."""
    trace: bool = False
    """Log more."""
    cold: bool = True
    """Start cold."""
    peers: tuple[str, ...] = ()
    """Others."""
    token: str = ""
    """A secret."""

    def __post_init__(self) -> None:
        if self.port < 0:
            raise ConfigError(f"--port is {self.port}; it must be 0 or more")
        parse_size(self.kv_memory, flag="--kv-memory")


@dataclass(frozen=True, slots=True)
class DemandingConfig:
    """A toy process that cannot guess."""

    model: str
    """Name of the model to serve."""
    port: int = 8000
    """Port to listen on."""


def parse(*argv: str) -> ToyConfig:
    seen: list[ToyConfig] = []

    async def main(config: ToyConfig) -> None:
        seen.append(config)

    app = application("toy")
    app.default(command(ToyConfig, main))
    with pytest.raises(SystemExit) as stopped:
        execute(app, list(argv))
    assert stopped.value.code == (0 if seen else 2)
    return seen[0] if seen else ToyConfig(model="refused")


def test_defaults_without_flags() -> None:
    assert parse() == ToyConfig()


def test_flag_over_environment_over_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_PORT", "1")
    monkeypatch.setenv("BATON_DTYPE", "float32")
    monkeypatch.setenv("BATON_KV_MEMORY", "1KiB")
    assert parse("--port", "2") == ToyConfig(port=2, dtype="float32", kv_memory="1KiB")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--port", "many"), ("--port", "many")),
        (("--dtype", "int3"), ("--dtype", "int3", "float32")),
        (("--kv-memory", "big"), ("--kv-memory", "'big'", "2GiB")),
        (("--port", "-1"), ("--port", "0 or more")),
        (("--prt", "1"), ("--prt",)),
        (("8001",), ("8001",)),
    ],
)
def test_a_bad_flag_is_named_in_one_line_with_status_2(
    argv: tuple[str, ...], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse(*argv).model == "refused"
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert all(word in said for word in words)


def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("BATON_PORT", "many")
    parse()
    assert "BATON_PORT" in capsys.readouterr().err


def test_help_is_the_attribute_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    app = application("toy")

    async def main(config: ToyConfig) -> None:
        raise AssertionError(config)

    app.default(command(ToyConfig, main))
    with pytest.raises(SystemExit):
        execute(app, ["--help"])
    said = capsys.readouterr().out
    assert "A toy process." in said
    assert "Name of the model to serve." in said
    assert "BATON_MODEL" in said


def test_a_failure_at_run_time_is_one_line_with_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    async def main(_config: ToyConfig) -> None:
        raise Unavailable("nobody is there")

    app = application("toy")
    app.default(command(ToyConfig, main))
    with pytest.raises(SystemExit) as stopped:
        execute(app, [])
    assert stopped.value.code == 1
    assert capsys.readouterr().err == "error: nobody is there\n"


def test_argv_of_a_config_parses_back_to_it() -> None:
    config = ToyConfig("large", 0, "float32", "2KiB", True, False, ("a:1", "b:2"))
    assert parse(*to_argv(config)) == config
    assert to_argv(ToyConfig()) == []


def test_secrets_stay_off_the_command_line() -> None:
    config = ToyConfig(port=1, token="hush")
    assert to_argv(config, secret=frozenset({"token"})) == ["--port", "1"]


def test_children_do_not_inherit_the_options_of_their_parent() -> None:
    environ = {"BATON_PORT": "9", "BATON_PORT_FILE": "/p", "BATON_CACHE": "/c", "PATH": "/bin"}
    assert without_options(environ, [field.name for field in fields(ToyConfig)]) == {
        "BATON_CACHE": "/c",
        "PATH": "/bin",
    }


def test_an_option_without_default_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[DemandingConfig] = []

    async def main(config: DemandingConfig) -> None:
        seen.append(config)

    app = application("toy")
    app.default(command(DemandingConfig, main))
    with pytest.raises(SystemExit) as stopped:
        execute(app, ["--port", "1"])
    assert stopped.value.code == 2
    assert "--model" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        execute(app, ["--model", "m"])
    assert seen == [DemandingConfig("m")]
    assert to_argv(seen[0]) == ["--model", "m"]


def test_a_secret_can_be_in_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    monkeypatch.setenv("BATON_TOKEN_FILE", str(tmp_path / "token"))
    assert parse().token == "s3cret"
    assert parse("--token", "other").token == "other"


def test_a_secret_file_that_is_missing_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATON_TOKEN_FILE", str(tmp_path / "nowhere"))
    app = application("toy")
    app.default(command(ToyConfig, _never))
    with pytest.raises(SystemExit) as stopped:
        execute(app, [])
    assert stopped.value.code == 2
    assert f"BATON_TOKEN_FILE: {tmp_path / 'nowhere'} cannot be read" in capsys.readouterr().err


async def _never(config: ToyConfig) -> None:
    raise AssertionError("it must not start")
