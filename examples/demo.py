"""`make demo`: serve the model that comes with jaxserve, ask it a few things over HTTP, stop it.

Everything here is what any client does: the server is `jaxserve serve` in its own process, the requests are plain HTTP with
Python's standard library. Exit code 0 means that every answer came and that the server ended cleanly.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import http
import http.client
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import IO, Any

START_TIMEOUT_S = 900
STOP_TIMEOUT_S = 60
REQUEST_TIMEOUT_S = 120

QUESTIONS = [
    "Hello!",
    "Who are you?",
    "What is a radix cache?",
    "Who will win the next world cup?",
]
CONVERSATION = ["Hi, I am Ada.", "What is 27 + 45?", "What is my name?"]
SUM = "What is 67 + 85?"
WEATHER_QUESTION = "What is the weather in Paris?"
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
JSON_QUESTION = "Extract name and age as JSON: Maria is 34 years old."
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
PROMPT = "The capital of France is"
NUM_PARALLEL = 16
NUM_TOKENS = 64

NEXT_STEPS = """
Go on from here:

  make serve                 # the same server, until Ctrl-C
  .venv/bin/jaxserve chat --url http://127.0.0.1:30000 --temperature 0

  curl http://127.0.0.1:30000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "What is paged attention?"}], "temperature": 0}'

  from openai import OpenAI
  client = OpenAI(base_url="http://127.0.0.1:30000/v1", api_key="none")
  client.chat.completions.create(model="default", messages=[{"role": "user", "content": "Who are you?"}])

  .venv/bin/jaxserve serve --model-path /path/to/Qwen3-0.6B    # any model of a supported family
"""


class DemoFailedError(Exception):
    """The text says what went wrong."""


def main() -> int:
    with tempfile.TemporaryFile() as log:
        try:
            with serving(log) as port:
                run(port)
        except DemoFailedError as error:
            log.seek(0)
            print(f"\nThe demo failed: {error}\n\nThe end of the server's log:", file=sys.stderr)
            print(log.read().decode(errors="replace")[-4000:], file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("\nStopped.", file=sys.stderr)
            return 130
    print(NEXT_STEPS)
    return 0


def run(port: int) -> None:
    heading("Chat, streamed")
    for question in QUESTIONS:
        print(f"\n> {question}")
        chat(port, [{"role": "user", "content": question}])

    heading("A conversation: what was read once is in the radix cache")
    messages: list[dict[str, str]] = []
    for line in CONVERSATION:
        print(f"\n> {line}")
        messages.append({"role": "user", "content": line})
        messages.append({"role": "assistant", "content": chat(port, messages)})

    heading("Thinking, where it is asked for")
    print(f"\n> {SUM}")
    chat(port, [{"role": "user", "content": SUM}], chat_template_kwargs={"enable_thinking": True})

    heading("A tool")
    show_tool(port)

    heading("JSON under a schema")
    print(f"\n> {JSON_QUESTION}")
    asked = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    answer = chat(port, [{"role": "user", "content": JSON_QUESTION}], response_format=asked)
    print(f"parsed: {json.loads(answer)}")

    heading("Plain text with log probabilities")
    show_logprobs(port)

    heading(f"One request alone, then {NUM_PARALLEL} at once")
    show_batching(port)


def heading(text: str) -> None:
    print(f"\n--- {text} " + "-" * (70 - len(text)))


def chat(port: int, messages: list[dict[str, str]], **fields: Any) -> str:
    """Asks, prints the thinking and the answer as they come, and returns the answer."""
    body = {"messages": messages, "temperature": 0, "max_tokens": 64, "stream": True, **fields}
    body["stream_options"] = {"include_usage": True}
    started_s = time.perf_counter()
    first_s, answer, thinks = 0.0, "", False
    usage: dict[str, Any] = {}
    for event in stream(port, "/v1/chat/completions", body):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            thought, piece = (choice["delta"].get(key) or "" for key in ("reasoning_content", "content"))
            if not first_s and (thought or piece):
                first_s = time.perf_counter() - started_s
            if thinks and piece:
                print("\n= ", end="")
            thinks = bool(thought)
            answer += piece
            print(thought or piece, end="", flush=True)
    total_s = time.perf_counter() - started_s
    if not answer:
        raise DemoFailedError("an answer was empty.")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    reused = f"; {cached} of {usage['prompt_tokens']} prompt tokens came from the cache" if cached else ""
    timing = f"{usage['completion_tokens']} tokens in {1000 * total_s:.0f} ms, the first after {1000 * first_s:.0f} ms"
    print(f"\n  [{timing}{reused}]")
    return answer


def show_tool(port: int) -> None:
    """The model asks for the weather, is told, and answers."""
    print(f"\n> {WEATHER_QUESTION}")
    messages: list[dict[str, Any]] = [{"role": "user", "content": WEATHER_QUESTION}]
    body = {"messages": messages, "tools": [WEATHER_TOOL], "temperature": 0, "max_tokens": 64}
    for _ in range(2):
        message = post(port, "/v1/chat/completions", body)["choices"][0]["message"]
        messages.append(message)
        for call in message["tool_calls"] or []:
            result = json.dumps({"temperature": 18, "condition": "sunny"})
            print(f"calls {call['function']['name']}({call['function']['arguments']}) and is told {result}")
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    print(message["content"])


def show_logprobs(port: int) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 6}
    body = {
        "text": PROMPT,
        "sampling_params": sampling,
        "return_logprob": True,
        "top_logprobs_num": 2,
        "return_text_in_logprobs": True,
    }
    reply = post(port, "/generate", body)
    print(f"\n{PROMPT}\033[1m{reply['text']}\033[0m" if sys.stdout.isatty() else f"\n{PROMPT}{reply['text']}")
    meta = reply["meta_info"]
    for (logprob, _, text), top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        others = ", ".join(f"{other!r} {value:.2f}" for value, _, other in top[1:])
        print(f"  {text!r:<12} {logprob:6.2f}   next best: {others}")


def show_batching(port: int) -> None:
    """The same request by one client and by many: the tokens per second of all of them together."""
    print()
    status = ready_status(port)
    if status != "ready":  # what is being compiled takes its share of the processor
        print(f"(The server says: {status}.)")
    for num_clients in (1, NUM_PARALLEL):
        sampling = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
        body = {"text": "1, 2, 3,", "sampling_params": sampling}
        started_s = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(num_clients) as pool:
            replies = list(pool.map(lambda _, body=body: post(port, "/generate", body), range(num_clients)))
        total_s = time.perf_counter() - started_s
        num_tokens = sum(reply["meta_info"]["completion_tokens"] for reply in replies)
        print(f"{num_clients:3} at once: {num_tokens:4} tokens in {total_s:.2f} s, {num_tokens / total_s:.0f} tokens/s")
        if num_tokens != num_clients * NUM_TOKENS:
            raise DemoFailedError(f"{num_clients} requests of {NUM_TOKENS} tokens gave {num_tokens}.")


@contextlib.contextmanager
def serving(log: IO[bytes]) -> Iterator[int]:
    """The port of a ready server; stopped, and checked for a clean end, when the block is left."""
    port = free_port()
    command = [sys.executable, "-m", "jaxserve", "serve", "demo", "--port", str(port)]
    command.append("--enable-cache-report")
    print(f"Starting: jaxserve {' '.join(command[3:])}")
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_ready(process, port)
        yield port
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise DemoFailedError(f"the server did not end within {STOP_TIMEOUT_S} s of SIGTERM.") from None
        if code != 0:
            raise DemoFailedError(f"the server ended with exit code {code}.")
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
        if process.poll() is None:
            process.kill()
            process.wait()


def wait_ready(process: subprocess.Popen[bytes], port: int) -> None:
    """Shows the seconds go by until /ready says 200."""
    started_s = time.monotonic()
    while True:
        waited_s = time.monotonic() - started_s
        if process.poll() is not None:
            raise DemoFailedError(f"the server ended at its start with exit code {process.returncode}.")
        if waited_s > START_TIMEOUT_S:
            raise DemoFailedError(f"the server was not ready within {START_TIMEOUT_S} s.")
        if ready_status(port):
            break
        if sys.stdout.isatty():
            print(f"\rLoading and compiling ... {waited_s:.0f} s", end="", flush=True)
        time.sleep(0.1)
    clear = "\r\033[K" if sys.stdout.isatty() else ""
    print(f"{clear}Ready after {time.monotonic() - started_s:.1f} s.")


def ready_status(port: int) -> str:
    """What /ready says with 200; empty while the server is not ready or does not listen yet."""
    with contextlib.suppress(OSError, http.client.HTTPException), connection(port) as http_connection:
        http_connection.request("GET", "/ready")
        reply = http_connection.getresponse()
        if reply.status == http.HTTPStatus.OK:
            return reply.read().decode().strip()
    return ""


def post(port: int, path: str, body: dict[str, Any]) -> Any:
    with connection(port) as http_connection:
        return json.loads(send(http_connection, path, body).read())


def stream(port: int, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a streamed reply: lines that begin with `data: `, the last of them [DONE]."""
    with connection(port) as http_connection:
        for line in send(http_connection, path, body):
            if line.startswith(b"data: [DONE]"):
                return
            if line.startswith(b"data: "):
                event = json.loads(line[len(b"data: ") :])
                if "error" in event:
                    raise DemoFailedError(event["error"]["message"])
                yield event
    raise DemoFailedError("a stream ended before it was done.")


def send(http_connection: http.client.HTTPConnection, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
    try:
        http_connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        reply = http_connection.getresponse()
    except (OSError, http.client.HTTPException) as error:
        raise DemoFailedError(f"{path} did not answer: {error}") from error
    if reply.status != http.HTTPStatus.OK:
        raise DemoFailedError(f"{path} answered {reply.status}: {reply.read().decode(errors='replace')}")
    return reply


def connection(port: int) -> contextlib.closing[http.client.HTTPConnection]:
    return contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_TIMEOUT_S))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
