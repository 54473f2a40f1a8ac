"""llama.cpp's side, in an interpreter of its own: it writes the weights as GGUF in float32, then answers cases with seconds.

    VENV/bin/python benchmarks/cpu_step/llama.py MODEL_FOLDER THREADS     # needs llama-cpp-python, gguf and safetensors

A line on its standard input is a case, one on its output the seconds. Rows are as long as ours; keys and values are float32.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
from typing import Any

import gguf
import llama_cpp as lc
import numpy as np
from cases import BATCHES, DECODE_STEPS, LONGEST, PROMPT_LEN, batch_of, contexts
from safetensors.numpy import load_file

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    ends = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in ends:
        return ends[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def write_gguf(folder: pathlib.Path) -> pathlib.Path:
    path, config = folder / "model-f32.gguf", json.loads((folder / "config.json").read_text())
    if path.exists():
        return path
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("none")
    for name, tensor in load_file(folder / "model.safetensors").items():
        writer.add_tensor(gguf_name(name), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class Llama:
    def __init__(self, path: pathlib.Path, threads: int) -> None:
        self._rows = max(BATCHES)
        params = lc.llama_context_default_params()
        params.n_ctx = self._rows * (PROMPT_LEN + 256)
        params.n_batch, params.n_seq_max, params.kv_unified = PROMPT_LEN, self._rows, False
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = lc.GGML_TYPE_F32
        model = lc.llama_model_load_from_file(str(path).encode(), lc.llama_model_default_params())
        assert model, f"{path} cannot be loaded"
        self._vocab = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(model))
        self._context = lc.llama_init_from_model(model, params)
        self._memory = lc.llama_get_memory(self._context)
        self._batch = lc.llama_batch_init(PROMPT_LEN, 0, 1)

    def seconds(self, case: str) -> float:
        batch = batch_of(case)
        return self._prefill() if batch is None else self._decode(batch)

    def _prefill(self) -> float:
        lc.llama_memory_clear(self._memory, False)
        started_s = time.perf_counter()
        self._decode_tokens([(10 + i, i, 0, i == PROMPT_LEN - 1) for i in range(PROMPT_LEN)])
        return time.perf_counter() - started_s

    def _decode(self, batch: int) -> float:
        lengths = self._fill(batch)
        tokens = self._step([10] * batch, lengths, 0)
        started_s = time.perf_counter()
        for step in range(1, DECODE_STEPS):
            tokens = self._step(tokens, lengths, step)
        return (time.perf_counter() - started_s) / (DECODE_STEPS - 1)

    def _fill(self, batch: int) -> list[int]:
        """One prompt, copied to all rows and cut to their lengths."""
        lc.llama_memory_clear(self._memory, False)
        self._decode_tokens([(10 + i, i, 0, i == LONGEST - 1) for i in range(LONGEST)])
        lengths = contexts(batch)
        for row in range(1, batch):
            lc.llama_memory_seq_cp(self._memory, 0, row, -1, -1)
        for row, length in enumerate(lengths):
            lc.llama_memory_seq_rm(self._memory, row, length, -1)
        return lengths

    def _step(self, tokens: list[int], lengths: list[int], step: int) -> list[int]:
        logits = self._decode_tokens([(token, lengths[row] + step, row, True) for row, token in enumerate(tokens)])
        return [int(token) for token in logits.argmax(-1)]

    def _decode_tokens(self, tokens: list[tuple[int, int, int, bool]]) -> Any:
        """(token, position, row, whether logits are wanted) -> the wanted logits."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (token, position, row, wanted) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = row, wanted
        error = lc.llama_decode(self._context, batch)
        assert error == 0, f"llama_decode said {error}"
        count = sum(wanted for *_, wanted in tokens)
        return np.ctypeslib.as_array(lc.llama_get_logits(self._context), (count, self._vocab))


def main() -> None:
    folder, threads = sys.argv[1:]
    llama = Llama(write_gguf(pathlib.Path(folder)), int(threads))
    print("ready", flush=True)
    for line in sys.stdin:
        print(llama.seconds(line.strip()), flush=True)


if __name__ == "__main__":
    main()
