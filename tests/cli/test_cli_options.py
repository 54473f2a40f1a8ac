"""Options made from ServerArgs: every field, its type, its default, its rules."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from click.testing import CliRunner

from jaxserve.cli.main import cli, run
from jaxserve.config import ServerArgs


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServerArgs]:
    """What `jaxserve serve` would launch."""
    seen: list[ServerArgs] = []

    def launch_server(args: ServerArgs) -> int:
        seen.append(args)
        return 7

    monkeypatch.setattr("jaxserve.server.launch.launch_server", launch_server)
    return seen


def test_without_options_every_default_is_the_fields(served: list[ServerArgs]) -> None:
    assert run(["serve", "m"]) == 7
    assert run(["serve", "--model-path", "m"]) == 7
    assert run(["serve", "--model", "m", "--tp", "1"]) == 7
    assert served == [ServerArgs(model_path="m")] * 3


def test_every_field_has_an_option_and_its_help() -> None:
    page = " ".join(CliRunner().invoke(cli, ["serve", "--help"], terminal_width=300).output.split())
    for field in dataclasses.fields(ServerArgs):
        assert "--" + field.name.replace("_", "-") in page, field.name
        assert " ".join(field.metadata["help"].split()) in page, field.name


def test_values_are_parsed_to_the_fields_types(served: list[ServerArgs]) -> None:
    line = (
        "serve m --port 8000 --api-key k --mem-fraction-static 0.5 --enable-mixed-chunk --no-sleep-on-idle "
        "--schedule-policy lpm --chunked-prefill-size -1 --decode-row-buckets 1,4,16 --watchdog-timeout 2.5"
    ).replace("--enable-mixed-chunk ", "")
    assert run(line.split()) == 7
    assert served == [
        ServerArgs(
            model_path="m", port=8000, api_key="k", mem_fraction_static=0.5, sleep_on_idle=False, schedule_policy="lpm",
            chunked_prefill_size=-1, decode_row_buckets=(1, 4, 16), watchdog_timeout=2.5,
        )
    ]  # fmt: skip


def test_adapters_are_named_with_commas(served: list[ServerArgs]) -> None:
    assert run(["serve", "m", "--lora-paths", "a=/1,b=/2=3,/4"]) == 7
    assert served[0].lora_paths == ("a=/1", "b=/2=3", "/4")
    assert served[0].serves_lora and not served[0].enable_lora


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("serve", "A model is needed"),
        ("serve m --no-such-option", "No such option '--no-such-option'"),
        ("serve m --port http", "'http' is not a valid integer"),
        ("serve m --port 70000", "--port must be in [0, 65535]; got 70000."),
        ("serve m --schedule-policy best", "'best' is not one of"),
        ("serve m --decode-row-buckets 1,x", "'1,x' is not a list of numbers"),
        ("serve m --decode-row-buckets 4,1", "increasing"),
        ("serve m --enable-mixed-chunk --chunked-prefill-size -1", "--enable-mixed-chunk needs chunked prefill"),
        ("serve m --lora-paths a=/1,a=/2", "--lora-paths must name different adapters; 'a' comes twice."),
        ("serve m --lora-paths a=/1 b=/2", "unexpected extra argument"),
        ("serve a --model-path b", "Two models are named"),
        ("serve a b", "unexpected extra argument"),
        ("fly", "No such command 'fly'"),
        ("generate --host x", "No such option '--host'"),
        ("generate --temperature -1 --model-path m x", "-1"),
    ],
)
def test_what_is_asked_wrongly_is_one_line_and_exit_code_2(
    line: str, words: str, capsys: pytest.CaptureFixture[str], served: list[Any]
) -> None:
    assert run(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jaxserve: error: ")
    assert err.count("\n") == 1
    assert words in err
    assert served == []
