"""`--config`: options from a YAML file below those of the command line, and a sentence for what is wrong in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxserve.cli.config_file import read_config
from jaxserve.cli.main import run
from jaxserve.config import ServerArgs


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServerArgs]:
    """What `jaxserve serve` would launch."""
    seen: list[ServerArgs] = []
    monkeypatch.setattr("jaxserve.server.launch.launch_server", lambda args: seen.append(args) or 0)
    return seen


@pytest.fixture
def config(tmp_path: Path) -> Any:
    def write(text: str) -> str:
        path = tmp_path / "server.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_options_of_a_file_stand_below_those_of_the_command_line(served: list[ServerArgs], config: Any) -> None:
    path = config(
        "model: m\ntp-size: 1\npage_size: 32\nenable-mixed-chunk: true\nsleep-on-idle: false\nport: 1\nwatchdog-timeout: 5\n"
        "json-model-override-args: {rope_theta: 3}\ndecode-row-buckets: [1, 8]\nprefill-token-buckets: 16,64\napi-key: '1'\n"
        "max-running-requests: null\n"
    )
    assert run(["serve", "--config", path, "--port", "2"]) == 0
    assert served == [
        ServerArgs(
            model_path="m", page_size=32, enable_mixed_chunk=True, sleep_on_idle=False, port=2, watchdog_timeout=5.0,
            api_key="1", json_model_override_args='{"rope_theta": 3}', decode_row_buckets=(1, 8),
            prefill_token_buckets=(16, 64),
        )
    ]  # fmt: skip
    assert run(["serve", "other", "--port", "3", "--config", path]) == 0
    assert (served[-1].model_path, served[-1].port) == ("other", 3)
    assert run(["serve", "m", "--config", config("")]) == 0
    assert served[-1] == ServerArgs(model_path="m")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 1", "There is no option prot. Did you mean port?"),
        ("page-size: 1\npage_size: 2", "page_size is given twice."),
        ("tp-size: 1\ntp: 2", "tp_size is given twice, also as tp."),
        ("- port", "It must hold lines of the form name: value."),
        ("port: [", "It is not YAML: while parsing"),
        ("port: !!python/object:os.system 1", "It is not YAML: could not determine a constructor"),
        ("port: high", "port cannot be 'high'."),
        ("port: true", "port cannot be True."),
        ("weight-version: 1.10", "weight-version cannot be 1.1. Put it in quotes."),
        ("schedule-policy: best", "schedule-policy must be one of fcfs, lpm"),
        ("page-size: 0", "--page-size must be in [1, 128]; got 0."),
    ],
)
def test_what_is_wrong_in_a_file(config: Any, capsys: pytest.CaptureFixture[str], text: str, words: str) -> None:
    assert run(["serve", "m", "--config", config(text)]) == 2
    assert words in capsys.readouterr().err


def test_a_file_that_is_not_there_and_two_files(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "m", "--config", "/nowhere.yaml"]) == 2
    assert "/nowhere.yaml: The file of options cannot be read: No such file" in capsys.readouterr().err
    path = config("port: 1")
    assert run(["serve", "m", "--config", path, "--config", path]) == 2
    assert "Give one file of options, not several." in capsys.readouterr().err


def test_a_file_for_a_server_serves_commands_without_http(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ServerArgs] = []

    def engine(server_args: ServerArgs) -> None:
        seen.append(server_args)
        raise ValueError("far enough")

    monkeypatch.setattr("jaxserve.server.engine.Engine", engine)
    assert run(["generate", "hi", "--config", config("model: m\nport: 5\npage-size: 8")]) == 1
    assert (seen[0].model_path, seen[0].page_size, seen[0].port) == ("m", 8, 30000)


def test_every_option_can_stand_in_a_file(config: Any) -> None:
    defaults = ServerArgs(model_path="m", max_total_tokens=5, speculative_algorithm="NGRAM")
    import yaml

    text = yaml.safe_dump({k: list(v) if isinstance(v, tuple) else v for k, v in defaults.public_dict().items()})
    assert ServerArgs(**read_config(config(text))) == defaults
