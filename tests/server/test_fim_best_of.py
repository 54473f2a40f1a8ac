"""`suffix` and `best_of` of completions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_service import BOS, FakeService, FakeTokenizer
from http_harness import app_client

from jaxserve.server.openai.best_of import best_sequences
from jaxserve.server.openai.collect import Sequence
from jaxserve.server.openai.fim import chosen_format
from jaxserve.server.requests import TokenLogprob


class CodeTokenizer(FakeTokenizer):
    def __init__(self, *tags: str) -> None:
        self.tags = tags

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [900] if text in self.tags else super().encode(text, add_special_tokens=add_special_tokens)


async def complete(service: FakeService, **body: Any) -> Any:
    async with app_client(service) as client:
        reply = await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 3, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize(
    ("tags", "prompt"),
    [
        (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), "<|fim_prefix|>1<|fim_suffix|>2<|fim_middle|>"),
        (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "<fim_prefix>1<fim_suffix>2<fim_middle>"),
        (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), "<｜fim▁begin｜>1<｜fim▁hole｜>2<｜fim▁end｜>"),
        (("[PREFIX]", "[SUFFIX]"), "[SUFFIX]2[PREFIX]1"),
    ],
)
async def test_a_suffix_is_written_as_the_model_reads_it(tags: tuple[str, ...], prompt: str) -> None:
    service = FakeService()
    service.tokenizer = CodeTokenizer(*tags)
    reply = await complete(service, prompt=["1", "3"], suffix="2", echo=True, max_tokens=1)
    assert service.requests[0].prompts == [prompt, prompt.replace("1", "3")]
    assert [choice["text"] for choice in reply["choices"]] == ["1a", "3a"]
    await complete(service, prompt="1", suffix="")
    assert service.requests[1].prompts == ["1"]


async def test_a_template_is_chosen_by_name_or_file(tmp_path: Path) -> None:
    own = {"name": "own", "fim_begin_token": "<b>", "fim_middle_token": "<m>", "fim_end_token": "<e>", "fim_position": "MIDDLE"}
    middle, end = tmp_path / "middle.json", tmp_path / "end.json"
    middle.write_text(json.dumps(own))
    end.write_text(json.dumps({**own, "fim_position": "END"}))
    for template, prompt in (
        ("deepseek_coder", "<｜fim▁begin｜>1<｜fim▁hole｜>2<｜fim▁end｜>"),
        ("star_coder", "<fim_prefix>1<fim_suffix>2<fim_middle>"),
        ("qwen_coder", "<|fim_prefix|>1<|fim_suffix|>2<|fim_middle|>"),
        (str(middle), "<b>1<m>2<e>"),
        (str(end), "<b>1<e>2<m>"),
    ):
        service = FakeService()
        async with app_client(service, completion_template=template) as client:
            await client.post("/v1/completions", json={"prompt": "1", "suffix": "2", "max_tokens": 1})
        assert service.requests[0].prompts == [prompt]


def test_a_template_that_is_none_is_refused_at_the_start(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"name": "x", "fim_position": "LEFT"}')
    with pytest.raises(ValueError, match="--completion-template must be qwen_coder, star_coder, deepseek_coder or a JSON file"):
        chosen_format("llama")
    with pytest.raises(ValueError, match=r"--completion-template .*wrong\.json"):
        chosen_format(str(wrong))


def sample(*logprobs: float) -> Sequence:
    return Sequence(logprobs=[TokenLogprob(0, value, []) for value in logprobs])


def test_the_best_are_the_likeliest_per_token() -> None:
    likely, long, unlikely, empty = sample(-0.1), sample(-0.2, -0.2, -0.2), sample(-0.5), sample()
    assert best_sequences([unlikely, long, likely, empty], 4, 2) == [likely, long]
    assert best_sequences([unlikely, likely, long, empty], 2, 1) == [likely, long]
    assert best_sequences([unlikely, likely], 2, 2) == [unlikely, likely]


async def test_best_of_draws_more_than_it_returns() -> None:
    service = FakeService()
    reply = await complete(service, prompt=["hi", "yo"], n=2, best_of=4, echo=True)
    assert [(choice["index"], choice["text"]) for choice in reply["choices"]] == [
        (0, "hiabc"),
        (1, "hiabc"),
        (2, "yoabc"),
        (3, "yoabc"),
    ]
    assert reply["choices"][0]["logprobs"] is None
    assert reply["usage"]["completion_tokens"] == 8 * 3
    assert reply["usage"]["prompt_tokens"] == 2 * (len("hi") + len([BOS]))
    assert service.requests[0].num_samples == 4
    assert service.requests[0].options[0].return_logprob
    with_logprobs = await complete(service, best_of=2, logprobs=0)
    assert with_logprobs["choices"][0]["logprobs"]["tokens"] == ["a", "b", "c"]
    await complete(service, best_of=1)
    assert not service.requests[-1].options[0].return_logprob
