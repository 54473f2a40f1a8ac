"""Rerankers by chat: real templates, rendered by a real tokenizer, and a pipeline whose model generates."""

from __future__ import annotations

from pathlib import Path

import fake_scheduler
import pytest
from bert_tokenizers import bert_folder, word_id

from jaxserve import Engine
from jaxserve.demo import demo_model_path
from jaxserve.server.requests import RequestError
from jaxserve.server.reranking import asks_in_words
from jaxserve.server.tokenizer import Tokenizer

_HEAD = """<|im_start|>system
Judge whether the Document meets the requirements. Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
"""
# As SGLang has it: the texts by their places, the instruction by its name.
BY_PLACES = (
    _HEAD
    + """<Instruct>: {{ instruct | default("Find answers.") }}
<Query>: {{ messages[0]["content"] }}
<Document>: {{ messages[1]["content"] }}<|im_end|>
"""
)
# As vLLM and sentence-transformers have it: all by their roles.
BY_ROLES = (
    _HEAD
    + """<Instruct>: {{ messages | selectattr("role", "eq", "system") | map(attribute="content") | first \
| default("Find answers.") }}
<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}
<Document>: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}<|im_end|>
"""
)
TEMPLATES = pytest.mark.parametrize("template", [BY_PLACES, BY_ROLES], ids=["places", "roles"])


def engine(folder: Path, template: str) -> Engine:
    path = folder / "template.jinja"
    path.write_text(template)
    tokenizer = str(bert_folder(folder / "bert"))
    commands = fake_scheduler.commands()
    return Engine(demo_model_path(), worker_commands=commands, tokenizer_path=tokenizer, chat_template=str(path))


@TEMPLATES
def test_a_model_is_asked_in_the_words_of_its_template(template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        asks_in_words(template)
        and asks_in_words(template.replace('"yes"', r"\"yes\""))
        and not asks_in_words("{{ messages }}")
        and not asks_in_words(None)
    )
    rendered: list[str] = []
    real = Tokenizer.render_chat

    def render(self: Tokenizer, *args: object, **kwargs: object) -> str:
        rendered.append(real(self, *args, **kwargs))  # type: ignore[arg-type]
        return rendered[-1]

    monkeypatch.setattr(Tokenizer, "render_chat", render)
    with engine(tmp_path, template) as reranker:
        best = reranker.rerank("what is the capital", ["a dog", "paris"], instruct="Jump.")
        (plain,) = reranker.rerank("what is the capital", ["paris"])
        ids = reranker.tokenizer.encode(rendered[2], add_special_tokens=False)
        scored = reranker.score(ids, [[]], [word_id("yes"), word_id("no")], apply_softmax=True)
    end = "<Query>: what is the capital\n<Document>: paris<|im_end|>"
    assert f"{_HEAD}<Instruct>: Jump.\n{end}" in rendered[1] and f"{_HEAD}<Instruct>: Find answers.\n{end}" in rendered[2]
    assert sorted(result["index"] for result in best) == [0, 1]
    assert plain["relevance_score"] == pytest.approx(scored.scores[0][0])  # yes, of yes and no
    values = [result["relevance_score"] for result in best]
    assert values == sorted(values, reverse=True) and all(0 < value < 1 for value in values)


def test_a_template_of_conversations_is_refused(tmp_path: Path) -> None:
    with engine(tmp_path, "{{ messages[0].content }}") as chats, pytest.raises(RequestError, match="not a reranker's"):
        chats.rerank("what is the capital", ["paris"])
