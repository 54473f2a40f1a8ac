"""Tokens and logprobs against Transformers: a covering set of models and options, prompts, and the oracle.

Every model family, rope kind and head layout of `checkpoints.CASES` is served once; page size, chunking, mixed chunks,
overlap, tensor parallelism and the radix cache vary with it. The oracle runs one forward pass over prompt and answer: the
answer is greedy exactly if each of its tokens is the argmax at its position.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoints import load_model
from model_families import Served
from model_families.case import NUM_CLIENTS

OUTPUT_LEN = 64
CACHED_OUTPUT_LEN = 8
NUM_TOP = 3


# Tokens whose logprobs are asked for at every place.
TOKEN_IDS = [3, 17, 5]


def asked_of_prompt(index: int, prompt: list[int]) -> dict[str, Any]:
    """Of every third request nothing but its outputs, of one all of its prompt, of one the second half."""
    start = (-1, 0, len(prompt) // 2)[index % 3]
    return {"return_logprob": True, "top_logprobs_num": NUM_TOP, "logprob_start_len": start, "token_ids_logprob": TOKEN_IDS}


def prompts_for(vocab_size: int, longest: int) -> list[list[int]]:
    """NUM_CLIENTS prompts: single tokens to several chunks, page borders, shared prefixes, twins."""
    rng = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return rng.integers(3, vocab_size, min(count, longest)).tolist()

    prompts = [tokens(n) for n in (1, 2, 5, 15, 16, 17, 31, 33, 48, 63, 64, 65, 100, 129)]
    shared = tokens(80)
    prompts += [(shared[:n] + tokens(7))[:longest] for n in (20, 40, 64, 72, 80)]
    prompts += [list(prompt) for prompt in prompts]
    return prompts[:NUM_CLIENTS]


class Oracle:
    """Transformers on the CPU in float32."""

    def __init__(self, folder: Path) -> None:
        self.model = load_model(folder)
        self.config = self.model.config.get_text_config()
        self.context_len = min(self.config.max_position_embeddings, 256)
        self.output_len = min(OUTPUT_LEN, self.context_len // 2)
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    def prompts(self) -> list[list[int]]:
        return prompts_for(self.config.vocab_size, self.context_len - self.output_len)

    def check_hit(self, served: Served, prompt_len: int, start: int, hit: int, *, seen: bool) -> None:
        """The cache has whole pages of a prompt that it has seen; what is asked about from `start` on is computed again. Behind
        the windows of a sequence, or its states, it has no place where another could go on. Where there are several, one that
        has less to do may be chosen before the one that knows most."""
        longest = prompt_len - 1 if start < 0 or start >= prompt_len - 1 else start
        page_tokens = served.page_size * served.dcp
        most = longest // page_tokens * page_tokens if served.radix else 0
        assert hit <= most
        names = ("sliding_window", "attention_chunk_size", "linear_num_key_heads", "mamba_n_heads")
        is_sparse = any(getattr(self.config, name, None) is not None for name in names)
        assert hit == most or not seen or served.attn_dp > 1 or (start >= 0 and is_sparse)

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """float32 [len(tokens), V]: of the token that follows each position."""
        key = tuple(tokens)
        if key not in self._known:
            with torch.inference_mode():
                self._known[key] = torch.log_softmax(self.model(torch.tensor([tokens])).logits[0].float(), dim=-1)
        return self._known[key]

    def check_prompt(self, prompt: list[int], start: int, found: list[Any], top: list[Any], of_ids: list[Any]) -> None:
        """What is said of the prompt's tokens behind the one at `start`."""
        assert len(found) == len(top) == len(of_ids) == max(len(prompt) - start - 1, 0)
        if not found:
            return
        expected = self.logprobs(prompt)[start:-1]
        np.testing.assert_allclose(found, expected[np.arange(len(found)), prompt[start + 1 :]], atol=1e-3)
        best, tokens = expected.topk(NUM_TOP, dim=-1).values, torch.tensor([[int(token) for _, token in row] for row in top])
        np.testing.assert_allclose([[value for value, _ in row] for row in top], best, atol=1e-3)
        np.testing.assert_allclose(expected.gather(-1, tokens), best, atol=1e-3)  # of two as likely either may come first
        assert all(len(set(row)) == NUM_TOP for row in tokens.tolist())
        np.testing.assert_allclose(of_ids, expected[:, TOKEN_IDS], atol=1e-3)

    def check_outputs(self, prompt: list[int], answer: list[int], of_ids: Any) -> None:
        """Of TOKEN_IDS behind the prompt and each output but the last."""
        expected = self.logprobs(prompt + answer)[len(prompt) - 1 : -1]
        np.testing.assert_allclose(of_ids, expected[:, TOKEN_IDS], atol=1e-3)

    def hidden_states(self, tokens: list[int]) -> np.ndarray:
        """float32 [len(tokens), E] behind the final norm."""
        with torch.inference_mode():
            states: np.ndarray = self.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0].numpy()
        return states

    def embed(self, tokens: list[int]) -> torch.Tensor:
        """float32 [len(tokens), E]: what Transformers would take in place of the tokens."""
        with torch.inference_mode():
            embedded: torch.Tensor = self.model.get_input_embeddings()(torch.tensor(tokens)).float()
        return embedded

    def check_embedded(self, prompt: torch.Tensor, answer: list[int], logprobs: Any) -> None:
        """`answer` is greedy behind embeddings [n, E], `logprobs` are its tokens'."""
        with torch.inference_mode():
            logits = self.model(inputs_embeds=torch.cat([prompt, self.embed(answer)])[None]).logits[0, len(prompt) - 1 : -1]
        expected = logits.float().log_softmax(-1).max(dim=-1)
        assert answer == expected.indices.tolist()
        np.testing.assert_allclose(logprobs, expected.values, atol=1e-3)

    def check(self, prompt: list[int], answer: list[int], logprobs: Any, top_logprobs: Any, output_len: int) -> None:
        """`answer` is greedy, `logprobs` [output_len] are its tokens', `top_logprobs` [output_len, NUM_TOP] the best."""
        assert len(answer) == output_len
        expected = self.logprobs(prompt + answer)[len(prompt) - 1 : -1]
        best = expected.argmax(dim=-1).tolist()
        assert answer == best, (
            f"prompt of {len(prompt)}: token {next(i for i in range(output_len) if answer[i] != best[i])} differs"
        )
        np.testing.assert_allclose(np.asarray(logprobs), expected.max(dim=-1).values, atol=1e-3)
        np.testing.assert_allclose(np.asarray(top_logprobs), expected.topk(NUM_TOP, dim=-1).values, atol=1e-3)
