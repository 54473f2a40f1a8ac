"""Options of the server's owner, on a server in processes of its own (with the fake scheduler)."""

from __future__ import annotations

from pathlib import Path

import httpx
from server_process import serving


def test_a_server_without_a_tokenizer(folder: Path) -> None:
    with serving(folder, skip_tokenizer_init=True) as server:
        server.wait_for("/health_generate", 200)
        body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
        reply = httpx.post(f"{server.url}/generate", json=body).json()
        assert (reply["text"], len(reply["output_ids"])) == ("", 3)
        completion = httpx.post(f"{server.url}/v1/completions", json={"prompt": [5, 6], "max_tokens": 2}).json()
        assert (completion["choices"][0]["text"], completion["usage"]["completion_tokens"]) == ("", 2)
        texts = {
            "/generate": {"text": "Hello"},
            "/v1/completions": {"prompt": "Hello"},
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
            "/tokenize": {"prompt": "Hello"},
            "/detokenize": {"tokens": [5]},
        }
        for path, text in texts.items():
            refused = httpx.post(server.url + path, json=text)
            assert (refused.status_code, "--skip-tokenizer-init" in refused.text) == (400, True), (path, refused.text)
        server.stop()
