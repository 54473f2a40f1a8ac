"""Tokenizer: loading, errors, chat templates, and the decoder that the workers are handed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from text_tokenizers import byte_level, sentencepiece_like, write_folder
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import processors

from jaxserve.config import ServerArgs
from jaxserve.demo import demo_model_path
from jaxserve.mailboxes import Mailboxes
from jaxserve.messages import DETOKENIZER, WorkerAddress
from jaxserve.server.decoder_handover import hand_over, wait_for_decoder
from jaxserve.server.tokenizer import PythonDecoder, RustDecoder, Tokenizer
from jaxserve.server.worker_process import WorkerContext
from jaxserve.text.incremental import advance, open_windows

MESSAGES = [{"role": "user", "content": "Hi"}]


def test_encode_and_decode_agree_with_transformers() -> None:
    tokenizer = Tokenizer.load(demo_model_path())
    texts = ["Hello world", "", "naïve 🚀"]
    assert tokenizer.encode_batch(texts) == [tokenizer.hf.encode(text) for text in texts]
    ids = tokenizer.hf.encode("<|im_start|>user\nHi")
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == tokenizer.hf.decode(ids, skip_special_tokens=skip)


def test_special_tokens_are_added_to_prompts_and_not_to_rendered_chats(tmp_path: Path) -> None:
    rust = RustTokenizer.from_str(sentencepiece_like().to_str())
    rust.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    folder = write_folder(rust, tmp_path, bos_token="<s>", chat_template=template)
    tokenizer = Tokenizer.load(str(folder))
    assert tokenizer.encode("Hello")[0] == 1
    assert 1 not in tokenizer.encode("Hello", add_special_tokens=False)
    assert tokenizer.encode(tokenizer.render_chat(MESSAGES), add_special_tokens=False).count(1) == 1


def test_a_saved_truncation_is_not_applied(tmp_path: Path) -> None:
    rust = RustTokenizer.from_str(byte_level().to_str())
    rust.enable_truncation(3)
    rust.enable_padding(length=5)
    tokenizer = Tokenizer.load(str(write_folder(rust, tmp_path)))
    assert len(tokenizer.encode("the quick brown fox")) > 3
    assert len(tokenizer.encode("")) == 0


def worker(folder: Path, model_path: str) -> WorkerContext:
    """One that finds there what was handed over."""
    return WorkerContext(WorkerAddress(DETOKENIZER), ServerArgs(model_path=model_path), Mailboxes(folder))


@pytest.mark.parametrize("make", [byte_level, sentencepiece_like])
def test_the_decoder_handed_over_decodes_the_same(make: object, tmp_path: Path) -> None:
    folder = write_folder(make(), tmp_path / "model")  # type: ignore[operator]
    tokenizer = Tokenizer.load(str(folder))
    hand_over(tokenizer, tmp_path)
    decoder = wait_for_decoder(worker(tmp_path, "nowhere"))
    assert isinstance(decoder, RustDecoder)
    batch = [[i, i + 1, i + 2] for i in range(len(tokenizer) - 2)]
    for skip in (True, False):
        assert decoder.decode_batch(batch, skip_special_tokens=skip) == tokenizer.decode_batch(batch, skip_special_tokens=skip)


@pytest.mark.parametrize("make", [byte_level, sentencepiece_like])
def test_behind_its_tail_a_text_goes_on(make: Callable[[], Any], tmp_path: Path) -> None:
    """As outputs do behind a prompt, whose end a prompt of embeddings has not."""
    tokenizer = Tokenizer.load(str(write_folder(make(), tmp_path)))
    tail = tokenizer.text_tail
    assert tail
    (window,) = open_windows([tail], tokenizer.decode_batch)
    before, whole = tokenizer.encode_batch(["a", "a hello world"], add_special_tokens=False)
    assert whole[: len(before)] == before
    assert advance([window], [whole[len(before) :]], [True], tokenizer.decode_batch) == [" hello world"]


def test_a_tokenizer_that_tidies_up_stays_with_transformers(tmp_path: Path) -> None:
    from tokenizers import decoders
    from tokenizers.models import WordPiece

    rust = RustTokenizer(WordPiece({"hello": 0, "world": 1, ".": 2, "##s": 3, "[UNK]": 4}, unk_token="[UNK]"))
    rust.decoder = decoders.WordPiece(cleanup=False)
    folder = write_folder(rust, tmp_path / "model", clean_up_tokenization_spaces=True)
    tokenizer = Tokenizer.load(str(folder))
    assert tokenizer.rust_json is None
    assert tokenizer.decode([0, 1, 3, 2]) == "hello worlds."
    hand_over(tokenizer, tmp_path)
    decoder = wait_for_decoder(worker(tmp_path, str(folder)))
    assert isinstance(decoder, PythonDecoder)
    assert decoder.decode_batch([[0, 1, 3, 2]]) == ["hello worlds."]


def test_a_template_file_replaces_the_tokenizers_own(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    tokenizer = Tokenizer.load(demo_model_path(), chat_template=str(file))
    assert tokenizer.render_chat(MESSAGES) == "[Hi]"


def test_a_template_may_take_functions_without_their_wrapping(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{% for t in tools or [] %}{{ t.name or raise_exception('no name') }}{% endfor %}")
    tokenizer = Tokenizer.load(demo_model_path(), chat_template=str(file))
    tool = {"type": "function", "function": {"name": "add"}}
    assert tokenizer.render_chat(MESSAGES, [tool, tool]) == "addadd"
    assert tokenizer.render_chat(MESSAGES) == ""
    with pytest.raises(ValueError, match="cannot render these messages: no name"):
        tokenizer.render_chat(MESSAGES, [{"type": "function", "function": {}}])


def test_a_template_may_want_ids_of_nine_letters_and_digits(tmp_path: Path) -> None:
    """As Mistral's do."""
    file = tmp_path / "t.jinja"
    file.write_text(
        "{% macro nine(id) %}{{ id if id|length == 9 else raise_exception('ids have length 9') }}{% endmacro %}"
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ nine(c.id) }}{% endfor %}"
        "{% if m.role == 'tool' %}={{ nine(m.tool_call_id) }}{% endif %}{% endfor %}{{ tools[0].name or raise_exception('x') }}"
    )
    tokenizer = Tokenizer.load(demo_model_path(), chat_template=str(file))
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    for given in ("call_0123456789abcdef", "abcDEF123", "toolu_é"):
        history = [{"role": "assistant", "content": "", "tool_calls": [{**call, "id": given}]}]
        history.append({"role": "tool", "content": "1", "tool_call_id": given})
        called, answered = tokenizer.render_chat(history, [call]).removesuffix("add").split("=")
        assert called == answered
        assert (called == given) == (given == "abcDEF123")
        assert history[1]["tool_call_id"] == given


def test_errors_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tokenizer folder 'nowhere' does not exist"):
        Tokenizer.load("nowhere")
    with pytest.raises(ValueError, match="holds no tokenizer files"):
        Tokenizer.load(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(ValueError, match="cannot be loaded"):
        Tokenizer.load(str(tmp_path))
    plain = Tokenizer.load(str(write_folder(byte_level(), tmp_path / "plain")))
    with pytest.raises(ValueError, match="has no chat template"):
        plain.render_chat(MESSAGES)


def test_torch_can_be_hidden_from_transformers() -> None:
    code = (
        "import sys; from jaxserve.server.tokenizer import Tokenizer\n"
        f"t = Tokenizer.load({demo_model_path()!r}, hide_torch=True)\n"
        "t.render_chat([{'role': 'user', 'content': 'x'}])\n"
        "assert 'torch' not in sys.modules and 'jax' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "transformers' advice about torch is noise here"


@pytest.mark.parametrize("text", ["\u00e9\u4f60\U0001f600 plain", " two  spaces"])
def test_the_bytes_of_tokens_add_up_to_the_text(text: str, tmp_path: Path) -> None:
    """Of a vocabulary whose tokens may be parts of characters."""
    tokenizer = Tokenizer.load(str(write_folder(byte_level(), tmp_path)))
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text, add_special_tokens=False))).decode() == text


def test_bytes_of_a_vocabulary_of_characters(tmp_path: Path) -> None:
    """Which has tokens for single bytes."""
    tokenizer = Tokenizer.load(str(write_folder(sentencepiece_like(), tmp_path)))
    ids = tokenizer.encode("\U0001f600", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode().strip() == "\U0001f600"


def named_templates(folder: Path, **templates: str) -> str:
    rust = RustTokenizer.from_str(sentencepiece_like().to_str())
    named = [{"name": name, "template": template} for name, template in templates.items()]
    return str(write_folder(rust, folder, chat_template=named))


def test_templates_by_name(tmp_path: Path) -> None:
    folder = named_templates(tmp_path, rag="R", default="D", tool_use="T")
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert Tokenizer.load(folder).render_chat(MESSAGES) == "D"
    assert Tokenizer.load(folder).render_chat(MESSAGES, tools) == "T"
    assert Tokenizer.load(folder, chat_template="rag").render_chat(MESSAGES, tools) == "R"
    assert Tokenizer.load(folder, chat_template_name="rag").render_chat(MESSAGES) == "R"
    (tmp_path / "rag").write_text("a file")
    assert Tokenizer.load(folder, chat_template=str(tmp_path / "rag")).render_chat(MESSAGES) == "a file"
    with pytest.raises(ValueError, match=r"--hf-chat-template-name 'x': the tokenizer has the templates .*rag"):
        Tokenizer.load(folder, chat_template_name="x")
    with pytest.raises(ValueError, match="cannot be read: there is no such file, and the tokenizer has the templates"):
        Tokenizer.load(folder, chat_template="x")
    with pytest.raises(ValueError, match="the tokenizer has no templates with names"):
        Tokenizer.load(demo_model_path(), chat_template_name="rag")


def test_without_a_default_template_the_first_is_used(tmp_path: Path) -> None:
    assert Tokenizer.load(named_templates(tmp_path, rag="R", other="O")).render_chat(MESSAGES) == "R"
