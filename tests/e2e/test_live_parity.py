"""Tokens and logprobs of live servers against Transformers (tests/parity.py). Other models: scheduler/test_model_parity.py."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer, running
from model_families import CASES, LIVE, Served, is_first_of_its_architecture, marked
from model_families.case import NUM_CLIENTS
from parity import CACHED_OUTPUT_LEN, Oracle, asked_of_prompt


def ask(
    server: LiveServer, prompt: list[int] | list[list[int]], output_len: int, how: dict[str, Any], *, ignore_eos: bool = True
) -> Any:
    """The reply to a prompt, or a list of replies to a list of prompts."""
    return server.generate(
        input_ids=prompt,
        sampling_params={"temperature": 0, "max_new_tokens": output_len, "ignore_eos": ignore_eos},
        **how,
    )


def check(oracle: Oracle, prompt: list[int], output_len: int, how: dict[str, Any], reply: dict[str, Any]) -> None:
    answer, meta = reply["output_ids"], reply["meta_info"]
    logprobs, top = meta["output_token_logprobs"], meta["output_top_logprobs"]
    values = [[logprob for logprob, _, _ in best] for best in top]
    oracle.check(prompt, answer, [logprob for logprob, _, _ in logprobs], values, output_len)
    assert [token for _, token, _ in logprobs] == answer
    oracle.check_outputs(prompt, answer, [[value for value, _, _ in row] for row in meta["output_token_ids_logprobs"]])
    start = how["logprob_start_len"]
    if start < 0:
        assert meta["input_token_logprobs"] == []
        return
    assert [token for _, token, _ in meta["input_token_logprobs"]] == prompt[start:]
    first, *found = [logprob for logprob, _, _ in meta["input_token_logprobs"]]
    (no_top, *tops), (no_ids, *ids) = meta["input_top_logprobs"], meta["input_token_ids_logprobs"]
    assert first is no_top is no_ids is None
    pairs = [[(value, token) for value, token, _ in best] for best in tops]
    oracle.check_prompt(prompt, start, found, pairs, [[value for value, _, _ in row] for row in ids])


def on_the_command_line(options: dict[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in options.items():
        if value is not False:
            words.append(f"--{name.replace('_', '-')}")
        if not isinstance(value, bool):
            words.append(",".join(map(str, value)) if isinstance(value, tuple) else str(value))
    return words


@pytest.mark.parametrize("served", marked(LIVE), ids=str)
def test_live_tokens_equal_those_of_transformers(
    served: Served, checkpoint: Callable[[str], Path], tmp_path: Path, compilation_cache: str
) -> None:
    serve_and_check(served, checkpoint, tmp_path, compilation_cache)


# With this config Transformers makes no tokenizer, without which there is no server: others of our tests compare it.
REFUSED = {"internlm3-qkv-bias"}


@pytest.mark.matrix
@pytest.mark.parametrize("case", sorted(CASES.keys() - {served.case for served in LIVE} - REFUSED))
def test_every_architecture_is_served(
    case: str, checkpoint: Callable[[str], Path], tmp_path: Path, compilation_cache: str
) -> None:
    if not is_first_of_its_architecture(case, checkpoint):
        pytest.skip("another case has the same architecture")
    served = Served(case, page_size=16, chunk=32, tp=2, mixed=True, drafts=True)
    serve_and_check(served, checkpoint, tmp_path, compilation_cache)


@pytest.mark.matrix
@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("case", ["llama", "qwen3-moe", "deepseek-v3", "bamba"])
def test_replicas_answer_as_one(
    case: str, dp: int, tp: int, checkpoint: Callable[[str], Path], tmp_path: Path, compilation_cache: str
) -> None:
    states = 320 if case == "bamba" else None
    served = Served(case, page_size=16, chunk=32, dp=dp, tp=tp, mixed=True, drafts=True, states=states)
    serve_and_check(served, checkpoint, tmp_path, compilation_cache)


@pytest.mark.matrix
@pytest.mark.parametrize("hosts", [2, 4])
@pytest.mark.parametrize("case", ["llama", "qwen3-moe", "deepseek-v3", "bamba"])
def test_hosts_answer_as_one(
    case: str, hosts: int, checkpoint: Callable[[str], Path], tmp_path: Path, compilation_cache: str
) -> None:
    states = 320 if case == "bamba" else None
    served = Served(case, page_size=16, chunk=32, tp=4, hosts=hosts, mixed=True, drafts=True, states=states)
    serve_and_check(served, checkpoint, tmp_path, compilation_cache)


@pytest.mark.matrix
@pytest.mark.parametrize(("tp", "attn_dp", "hosts"), [(2, 2, 1), (4, 4, 1), (4, 2, 1), (4, 2, 2)])
@pytest.mark.parametrize("case", ["llama", "qwen3-moe", "deepseek-v3", "gemma3", "bamba"])
def test_attention_shards_answer_as_one(
    case: str, tp: int, attn_dp: int, hosts: int, checkpoint: Callable[[str], Path], tmp_path: Path, compilation_cache: str
) -> None:
    states = 320 if case == "bamba" else None
    served = Served(case, page_size=8, chunk=32, tp=tp, attn_dp=attn_dp, hosts=hosts, mixed=True, drafts=True, states=states)
    serve_and_check(served, checkpoint, tmp_path, compilation_cache)


@pytest.mark.matrix
@pytest.mark.parametrize(("pp", "tp", "attn_dp", "dp"), [(2, 1, 1, 1), (2, 2, 1, 1), (2, 2, 2, 1), (2, 1, 1, 2)])
@pytest.mark.parametrize("case", ["llama", "qwen3-moe", "deepseek-v3", "gemma3", "bamba"])
def test_pipelines_answer_as_one(
    case: str,
    pp: int,
    tp: int,
    attn_dp: int,
    dp: int,
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    compilation_cache: str,
) -> None:
    sizes = {"pp": pp, "tp": tp, "attn_dp": attn_dp, "dp": dp, "states": 320 if case == "bamba" else None}
    serve_and_check(
        Served(case, page_size=8, chunk=32, mixed=True, drafts=True, **sizes), checkpoint, tmp_path, compilation_cache
    )


@pytest.mark.matrix
@pytest.mark.parametrize("case", ["gemma3", "cohere2"])
def test_four_stages_answer_as_one(
    case: str, checkpoint: Callable[[str], Path], tmp_path: Path, compilation_cache: str
) -> None:
    serve_and_check(Served(case, page_size=16, chunk=32, pp=4, drafts=True), checkpoint, tmp_path, compilation_cache)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("case", "pp", "tp", "hosts"),
    [("llama", 2, 1, 2), ("deepseek-v3", 2, 2, 4), ("gemma3", 2, 2, 2), ("cohere2", 4, 1, 2), ("bamba", 2, 2, 2)],
)
def test_stages_on_several_hosts_answer_as_one(
    case: str, pp: int, tp: int, hosts: int, checkpoint: Callable[[str], Path], tmp_path: Path, compilation_cache: str
) -> None:
    states = 320 if case == "bamba" else None
    served = Served(case, page_size=16, chunk=32, mixed=True, drafts=True, pp=pp, tp=tp, hosts=hosts, states=states)
    serve_and_check(served, checkpoint, tmp_path, compilation_cache)


def serve_and_check(served: Served, checkpoint: Callable[[str], Path], tmp_path: Path, compilation_cache: str) -> None:
    model = checkpoint(served.case)
    oracle = Oracle(model)
    prompts = oracle.prompts()
    asked = [asked_of_prompt(index, prompt) for index, prompt in enumerate(prompts)]
    options = ["--model-path", str(model), "--compilation-cache-dir", compilation_cache]
    options += on_the_command_line(served.options(oracle.context_len))
    log, hosts = tmp_path / "server.log", served.hosts
    with running(log, *options, num_hosts=hosts) as server, concurrent.futures.ThreadPoolExecutor(NUM_CLIENTS) as pool:
        for seen, output_len in ((False, oracle.output_len), (True, CACHED_OUTPUT_LEN)):
            replies = list(pool.map(ask, repeat(server), prompts, repeat(output_len), asked))
            for prompt, how, reply in zip(prompts, asked, replies, strict=True):
                check(oracle, prompt, output_len, how, reply)
                hit, start = reply["meta_info"]["cached_tokens"], how["logprob_start_len"]
                # Of several replicas the one that has seen a prompt may have too much else to do.
                oracle.check_hit(served, len(prompt), start, hit, seen=seen and served.dp == 1)
        for prompt, how in zip(prompts[:3], asked, strict=False):
            check(oracle, prompt, CACHED_OUTPUT_LEN, how, ask(server, prompt, CACHED_OUTPUT_LEN, how))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("case", "tp", "dcp", "attn_dp", "pp", "hosts"),
    [
        ("deepseek-v3", 4, 4, 1, 1, 1),
        ("deepseek-v3", 4, 2, 1, 1, 2),
        ("kimi-k2", 4, 4, 1, 1, 4),
        ("deepseek-v2-lite", 4, 2, 2, 1, 2),
        ("kimi-k2", 2, 2, 1, 2, 1),
    ],
)
def test_devices_that_share_latents_answer_as_one(
    case: str,
    tp: int,
    dcp: int,
    attn_dp: int,
    pp: int,
    hosts: int,
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    compilation_cache: str,
) -> None:
    sizes = {"tp": tp, "dcp": dcp, "attn_dp": attn_dp, "pp": pp, "hosts": hosts}
    served = Served(case, page_size=4, chunk=32, mixed=True, drafts=True, **sizes)
    serve_and_check(served, checkpoint, tmp_path, compilation_cache)
