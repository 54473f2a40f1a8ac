"""Every example runs: against one server of the demo model, and without a server, where it says how to start one."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest
from live_server import LiveServer, environment, free_port

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
CLIENTS = ("openai_client.py", "async_many.py", "langchain_chat.py")


def run(name: str, *arguments: str, cache: str = "") -> subprocess.CompletedProcess[str]:
    env = {**environment(), **({"XDG_CACHE_HOME": cache} if cache else {})}
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, check=False)


def output_of(name: str, *arguments: str, cache: str = "") -> str:
    ended = run(name, *arguments, cache=cache)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_every_example_is_tested_and_named() -> None:
    tested = {*CLIENTS, "engine.py", "rollouts.py", "grpo.py", "batch_file.py"}
    tested |= {"demo.py", "kv_events.py"}  # `make demo` and its own tests; tests/server/test_kv_events.py
    tested |= {"grpo_tunix.py"}  # tests/integrations/test_tunix_example.py
    tested |= {"ray_engine.py", "ray_hosts.py", "ray_serve.py"}  # test_ray_examples.py
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested
    readme = (EXAMPLES.parent / "README.md").read_text()
    assert all(f"](examples/{name})" in readme for name in tested - {"demo.py"})


def test_engine(compilation_cache: str) -> None:
    shown = output_of("engine.py", cache=compilation_cache)
    assert "'The capital of France is' -> " in shown
    assert "A person: {'name': " in shown
    assert "50 replies from asyncio" in shown


def test_rollouts(compilation_cache: str) -> None:
    shown = output_of("rollouts.py", cache=compilation_cache).splitlines()
    assert shown[0] == "8 rollouts of 2 prompts"
    assert float(shown[1].rsplit(" ", 1)[1]) < 0.01, shown[1]
    assert shown[2] == "weights updated: True, rollouts that go on: 1"
    assert shown[3] == "ended with weights step-1 after 200 tokens"


@pytest.mark.parametrize("options", [(), ("--same-devices",)], ids=["half-each", "same-devices"])
def test_grpo(compilation_cache: str, options: tuple[str, ...]) -> None:
    shown = output_of("grpo.py", "--steps", "60", *options, cache=compilation_cache).splitlines()
    rewards = [float(line.split("reward ")[1].split(";")[0]) for line in shown]
    assert len(rewards) == 3 and rewards[-1] > 0.9, shown


def test_openai_client(demo_server: LiveServer) -> None:
    shown = output_of("openai_client.py", "--url", f"{demo_server.url}/v1")
    answers = dict(line.split(": ", 1) for line in shown.splitlines())
    assert set(answers) == {"chat", "stream", "completion", "constrained", "call"}
    assert answers["stream"].strip()
    assert answers["chat"].startswith(answers["stream"].strip())
    assert answers["constrained"].startswith("{'name': ")
    assert answers["call"].startswith("get_weather {'city': ")


def test_async_many(demo_server: LiveServer) -> None:
    assert output_of("async_many.py", "--url", f"{demo_server.url}/v1").startswith("100 answers, ")


def test_langchain(demo_server: LiveServer) -> None:
    shown = output_of("langchain_chat.py", "--url", f"{demo_server.url}/v1")
    assert "invoke: " in shown and "stream: " in shown and "batch: [" in shown
    assert "[0 tokens]" not in shown


def test_a_batch_file_is_gone_on_with(demo_server: LiveServer, tmp_path: pathlib.Path) -> None:
    requests, replies = tmp_path / "requests.jsonl", tmp_path / "replies.jsonl"
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
    lines = [{"custom_id": f"{i}", "method": "POST", "url": "/v1/chat/completions", "body": body} for i in range(20)]
    lines[7]["body"] = {**body, "temperature": -1}
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = (str(requests), str(replies), "--url", demo_server.url, "--at-once", "4")
    assert output_of("batch_file.py", *arguments) == "20 requests answered, 0 had been before\n"
    whole = replies.read_text().splitlines()
    statuses = {line["custom_id"]: line["response"]["status_code"] for line in map(json.loads, whole)}
    assert statuses == {**{f"{i}": 200 for i in range(20)}, "7": 400}
    replies.write_text("\n".join(whole[:5]) + "\n" + whole[5][:20])  # as an interruption may leave it
    assert output_of("batch_file.py", *arguments) == "15 requests answered, 5 had been before\n"
    assert len({json.loads(line)["custom_id"] for line in replies.read_text().splitlines()}) == 20


@pytest.mark.parametrize("name", [*CLIENTS, "batch_file.py", "kv_events.py"])
def test_without_a_server_they_say_how_to_start_one(name: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "in").write_text('{"custom_id": "1", "url": "/v1/completions", "body": {"prompt": "a"}}\n')
    files = (str(tmp_path / "in"), str(tmp_path / "out")) if name == "batch_file.py" else ()
    url = f"http://127.0.0.1:{free_port()}"
    ended = run(name, *files, "--url", url)
    assert ended.returncode == 1
    assert ended.stderr == f"No server answers at {url}. Start one with: jaxserve serve demo\n"


def test_nothing_was_lost(demo_server: LiveServer) -> None:
    demo_server.assert_whole()
