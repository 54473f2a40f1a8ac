"""Trains the demo model: a Qwen3 of three million parameters, with a tokenizer of its own.

    python scripts/train_demo_model.py               # tokenizer, training, evaluation, saving
    python scripts/train_demo_model.py --resume      # go on from the last checkpoint
    python scripts/train_demo_model.py --start-from jaxserve/demo/model --steps 1000   # teach trained weights a new corpus
    python scripts/train_demo_model.py --eval-only   # evaluate what lies in jaxserve/demo/model

Flow: `demo_corpus` samples -> chat template -> token ids with a mask of what is to be learned -> rows of packed samples
that do not see each other -> Muon for the matrices, AdamW for the rest -> bfloat16 weights in safetensors -> exact match
on held-out questions. Every eighth batch is one row as long as the context, of long conversations and pasted texts. The
data of a step depend on the seed and the step's number alone, so a resumed run gives the same batches as an uninterrupted
one. A development script: PyTorch and Transformers are its tools, never the package's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import demo_corpus as corpus
import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedTokenizerBase, Qwen2Tokenizer, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

SCRIPTS = Path(__file__).resolve().parent
MODEL_DIR = SCRIPTS.parent / "jaxserve" / "demo" / "model"

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, TURN_START, TURN_END]
# Kept in the decoded text. Those of thinking came later and have the last places of the learned tokens.
THINKING_TOKENS = ["<think>", "</think>"]
MARKUP_TOKENS = [*THINKING_TOKENS, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
VOCAB_SIZE = 2048
NOT_LEARNED = -100  # the label that the loss skips


@dataclass(frozen=True)
class Settings:
    steps: int
    seed: int = 0
    first_data_step: int = 0  # which batch of the corpus the first step takes
    row_tokens: int = 512
    rows: int = 4
    long_every: int = 8  # each so many steps the rows of a batch are joined into one
    muon_lr: float = 8e-3
    adamw_lr: float = 5e-3
    weight_decay: float = 0.05
    warmup_steps: int = 100
    cooldown_steps: int = 1000  # the last steps, over which the learning rate falls to zero
    checkpoint_every: int = 50

    @classmethod
    def for_trained(cls, steps: int, seed: int) -> Settings:
        """Gentler, and with batches that the first training did not see, from the last stage of the corpus."""
        return cls(
            steps, seed, first_data_step=1_000_000, muon_lr=3e-3, adamw_lr=2e-3, warmup_steps=40, cooldown_steps=steps * 6 // 10
        )

    @classmethod
    def for_new_facts(cls, steps: int, seed: int) -> Settings:
        """Gentler still: all but a few answers is known."""
        return dataclasses.replace(
            cls.for_trained(steps, seed), first_data_step=corpus.FACTS_STEP, muon_lr=1e-3, adamw_lr=7e-4, warmup_steps=20
        )


# ---- tokenizer -----------------------------------------------------------------------------------------------------


def plain_strings(sample: corpus.Sample) -> Iterator[str]:
    """The text of a sample as far as it matters for learning merges; JSON as the chat template writes it."""
    yield sample.text
    yield from (json.dumps(tool, ensure_ascii=False) for tool in sample.tools)
    for message in sample.messages:
        yield message["content"]
        yield message.get("reasoning_content", "")
        for call in message.get("tool_calls", []):
            yield json.dumps(call["function"], ensure_ascii=False)


def train_tokenizer(seed: int, sample_count: int = 60_000) -> Qwen2Tokenizer:
    """Byte-level BPE in Qwen's form: any text round-trips, and every digit is a token of its own."""
    samples = corpus.training_samples(random.Random(f"{seed}/tokenizer"))
    template = (SCRIPTS / "demo_chat_template.jinja").read_text()
    texts = [template.replace("\\n", "\n")] * 50
    for _ in range(sample_count):
        texts += plain_strings(next(samples))

    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(pattern=Regex(PRETOKENIZE_REGEX), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS + MARKUP_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    learned = json.loads(bpe.to_str())["model"]
    return _wrap(learned["vocab"], [tuple(pair) for pair in learned["merges"]], template)


def _wrap(vocab: dict[str, int], merges: list[tuple[str, str]], template: str) -> Qwen2Tokenizer:
    tokenizer = Qwen2Tokenizer(
        vocab=vocab | {token: len(vocab) + i for i, token in enumerate(THINKING_TOKENS)},
        merges=merges,
        unk_token=None,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens(MARKUP_TOKENS)
    tokenizer.chat_template = template
    return tokenizer


# ---- data ----------------------------------------------------------------------------------------------------------

# What a grammar spells of JSON: how it begins, and the names of the fields.
_JSON_NAME = re.compile(r'^[\[{]*"[^"\\]*":|^[\[{]+"?|"[^"\\]*":')


@dataclass(frozen=True)
class Encoded:
    ids: list[int]
    learned: list[bool]  # per token: whether the model is to predict it


class Encoder:
    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.end_of_text, self.turn_end = (tokenizer.convert_tokens_to_ids(t) for t in (END_OF_TEXT, TURN_END))
        self.answer_start: list[int] = self.ids(f"{TURN_START}assistant\n")

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def chat(self, sample: corpus.Sample, messages: list[corpus.Message], add_generation_prompt: bool) -> str:
        return self.tokenizer.apply_chat_template(
            messages,
            tools=sample.tools or None,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=sample.thinking,
            tokenize=False,
        )

    def sample(self, sample: corpus.Sample) -> Encoded:
        """A plain text is learned as a whole or after its prompt; of a conversation, the assistant's turns with their end, or
        with thinking the last of them."""
        if not sample.learn_json_names:
            return self.values_of_json(sample)
        if sample.thinking or (sample.text and not sample.learn_text_prompt):
            prompt, rest = (self.ids(text) for text in self.prompt_and_answer(sample))
            end = self.end_of_text if sample.text else self.turn_end
            return Encoded([*prompt, *rest, end], [False] * len(prompt) + [True] * (len(rest) + 1))
        if sample.text:
            ids = [*self.ids(sample.text), self.end_of_text]
            return Encoded(ids, [True] * len(ids))
        ids = self.ids(self.chat(sample, sample.messages, False))
        learned = [False] * len(ids)
        answering = False
        for i, token in enumerate(ids):
            learned[i] = answering
            if answering:
                answering = token != self.turn_end
            else:
                answering = ids[i + 1 - len(self.answer_start) : i + 1] == self.answer_start
        return Encoded(ids, learned)

    def values_of_json(self, sample: corpus.Sample) -> Encoded:
        prompt, answer = self.prompt_and_answer(sample)
        encoded = self.tokenizer(answer, add_special_tokens=False, return_offsets_mapping=True)
        given = {place for name in _JSON_NAME.finditer(answer) for place in range(*name.span())}
        learned = [begin not in given for begin, _ in encoded["offset_mapping"]]
        before = self.ids(prompt)
        return Encoded([*before, *encoded["input_ids"], self.turn_end], [False] * len(before) + learned + [True])

    def prompt_and_answer(self, sample: corpus.Sample) -> tuple[str, str]:
        """The prompt as the model reads it and the answer expected of it, both as text."""
        if sample.text:
            return sample.text[: sample.text_prompt_len], sample.text[sample.text_prompt_len :]
        prompt = self.chat(sample, sample.messages[:-1], True)
        return prompt, self.chat(sample, sample.messages, False)[len(prompt) :].removesuffix(f"{TURN_END}\n")


@dataclass(frozen=True)
class Batch:
    """Rows of packed samples; all arrays [rows, row_tokens] except the mask [rows, 1, row_tokens, row_tokens]."""

    ids: torch.Tensor
    positions: torch.Tensor  # from 0 in each sample
    labels: torch.Tensor  # the next token, or NOT_LEARNED
    mask: torch.Tensor  # True where a token may look: its own sample, up to itself


def pack(encoder: Encoder, settings: Settings, step: int) -> Batch:
    rows, row_tokens = settings.rows, settings.row_tokens
    long = step % settings.long_every == settings.long_every - 1
    if long:
        rows, row_tokens = 1, rows * row_tokens
    data_step = settings.first_data_step + step
    samples = corpus.training_samples(random.Random(f"{settings.seed}/step/{data_step}"), data_step, long)
    shape = (rows, row_tokens)
    ids = np.full(shape, encoder.end_of_text, np.int64)
    positions, labels = np.zeros(shape, np.int64), np.full(shape, NOT_LEARNED, np.int64)
    owner = np.zeros(shape, np.int32)
    row = start = 0
    while row < rows:
        encoded = encoder.sample(next(samples))
        length = len(encoded.ids)
        if length > row_tokens:
            continue
        if start + length > row_tokens:
            row, start = row + 1, 0
            if row == rows:
                break
        span = slice(start, start + length)
        ids[row, span] = encoded.ids
        positions[row, span] = np.arange(length)
        owner[row, span] = owner[row].max() + 1
        targets = np.where(encoded.learned, encoded.ids, NOT_LEARNED)
        labels[row, start : start + length - 1] = targets[1:]
        start += length
    causal = np.tri(row_tokens, dtype=bool)
    mask = (owner[:, :, None] == owner[:, None, :]) & causal
    return Batch(*(torch.from_numpy(a) for a in (ids, positions, labels, mask[:, None])))


# ---- training ------------------------------------------------------------------------------------------------------


def new_model(tokenizer: PreTrainedTokenizerBase, seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def batch_loss(decoder: Any, head: torch.nn.Linear, batch: Batch) -> torch.Tensor:
    hidden = decoder(
        input_ids=batch.ids, attention_mask=batch.mask, position_ids=batch.positions, use_cache=False
    ).last_hidden_state
    learned = batch.labels != NOT_LEARNED
    return functional.cross_entropy(head(hidden[learned]), batch.labels[learned])


class Trainer:
    """The model, its optimizers and where they are in the run."""

    def __init__(self, model: Qwen3ForCausalLM, settings: Settings) -> None:
        self.model, self.settings, self.step = model, settings, 0
        matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if not any(p is m for m in matrices)]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=settings.muon_lr, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=settings.adamw_lr, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self.base_lrs = [settings.muon_lr, settings.adamw_lr]

    def lr_factor(self) -> float:
        """Linear warm-up, a plateau, and a linear fall to zero."""
        settings = self.settings
        return min(1.0, (self.step + 1) / settings.warmup_steps, (settings.steps - self.step) / settings.cooldown_steps)

    def train_step(self, decoder: Any, batch: Batch) -> float:
        for optimizer, base_lr in zip(self.optimizers, self.base_lrs, strict=True):
            optimizer.param_groups[0]["lr"] = base_lr * self.lr_factor()
            optimizer.zero_grad(set_to_none=True)
        loss = batch_loss(decoder, self.model.lm_head, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        return loss.item()

    def save(self, path: Path) -> None:
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
        }
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").rename(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def train(trainer: Trainer, encoder: Encoder, checkpoint: Path, compile_model: bool) -> None:
    settings, model = trainer.settings, trainer.model
    decoder = torch.compile(model.model, dynamic=False) if compile_model else model.model
    model.train()
    began, tokens, recent = time.monotonic(), 0, 0.0
    while trainer.step < settings.steps:
        batch = pack(encoder, settings, trainer.step)
        loss = trainer.train_step(decoder, batch)
        tokens += batch.ids.numel()
        recent = loss if recent == 0.0 else 0.98 * recent + 0.02 * loss
        if trainer.step % 50 == 0:
            elapsed_s = time.monotonic() - began
            print(f"step {trainer.step} loss {recent:.4f} {tokens / elapsed_s:.0f} tokens/s {elapsed_s:.0f} s", flush=True)
        if trainer.step % settings.checkpoint_every == 0:
            trainer.save(checkpoint)
    trainer.save(checkpoint)


@torch.no_grad()
def mix_in(model: Qwen3ForCausalLM, folder: Path, share: float) -> None:
    """Moves the weights back towards those they started from, which gives back what the new corpus made worse."""
    before = dict(Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
    for name, weight in model.named_parameters():
        weight.lerp_(before[name], share)


def save_model(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes bfloat16 weights and the configs; the default temperature is low, since so small a model has little to vary."""
    in_bfloat16 = Qwen3ForCausalLM(model.config).to(torch.bfloat16)
    in_bfloat16.load_state_dict(model.state_dict())
    in_bfloat16.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.3,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )
    in_bfloat16.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors leaves its file to the owner alone


# ---- evaluation ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskScore:
    prompts: int
    exact: int
    loss: float  # nats per answer token, teacher-forced
    answer_tokens: int
    unsure_tokens: int  # the best token leads the second by less than one nat
    failures: list[dict[str, str]]


@torch.inference_mode()
def greedy(model: Qwen3ForCausalLM, encoder: Encoder, prompts: list[str], max_new_tokens: int) -> list[list[int]]:
    rows = [encoder.ids(prompt) for prompt in prompts]
    width = max(map(len, rows))
    ids = torch.tensor([[encoder.end_of_text] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False)
    return out[:, width:].tolist()


def answer_text(encoder: Encoder, ids: list[int]) -> str:
    ends = [i for i, token in enumerate(ids) if token in (encoder.turn_end, encoder.end_of_text)]
    return encoder.tokenizer.decode(ids[: ends[0]] if ends else ids, skip_special_tokens=False)


@torch.inference_mode()
def teacher_forced(model: Qwen3ForCausalLM, prompt: list[int], answer: list[int]) -> tuple[float, int]:
    """The summed loss of the answer's tokens, and how many of them lead by less than one nat."""
    logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    loss = functional.cross_entropy(logits, torch.tensor(answer), reduction="sum").item()
    best = logits.topk(2).values
    return loss, int((best[:, 0] - best[:, 1] < 1.0).sum())


def score_task(model: Qwen3ForCausalLM, encoder: Encoder, name: str, prompts_per_task: int, seed: int) -> TaskScore:
    samples = corpus.held_out_samples(name, prompts_per_task, seed)
    pairs = [encoder.prompt_and_answer(sample) for sample in samples]
    answers = [encoder.ids(answer) for _, answer in pairs]
    outputs = greedy(model, encoder, [prompt for prompt, _ in pairs], max(map(len, answers)) + 1)
    exact, loss, unsure, failures = 0, 0.0, 0, []
    for sample, (prompt, expected), answer, output in zip(samples, pairs, answers, outputs, strict=True):
        got = answer_text(encoder, output[: len(answer)] if sample.text else output)
        exact += got == expected
        if got != expected:
            failures.append({"prompt": prompt, "expected": expected, "got": got})
        sample_loss, sample_unsure = teacher_forced(model, encoder.ids(prompt), answer)
        loss, unsure = loss + sample_loss, unsure + sample_unsure
    tokens = sum(map(len, answers))
    return TaskScore(len(samples), exact, loss / tokens, tokens, unsure, failures)


def evaluate(folder: Path, prompts_per_task: int, seed: int, report: Path | None) -> None:
    """Scores the weights as saved: bfloat16 values, computed in float32."""
    encoder = Encoder(Qwen2Tokenizer.from_pretrained(folder))
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    scores = {name: score_task(model, encoder, name, prompts_per_task, seed) for name in corpus.MIX}
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    print("| task | prompts | exact match | loss | unsure tokens |\n|---|--:|--:|--:|--:|")
    for name, s in scores.items():
        print(f"| {name} | {s.prompts} | {s.exact / s.prompts:.1%} | {s.loss:.4f} | {s.unsure_tokens} of {s.answer_tokens} |")
    prompts, exact = sum(s.prompts for s in scores.values()), sum(s.exact for s in scores.values())
    tokens, unsure = sum(s.answer_tokens for s in scores.values()), sum(s.unsure_tokens for s in scores.values())
    loss = sum(s.loss * s.answer_tokens for s in scores.values()) / tokens
    print(f"| all | {prompts} | {exact / prompts:.1%} | {loss:.4f} | {unsure} of {tokens} |")
    if report:
        failures = {name: s.failures for name, s in scores.items()}
        report.write_text(json.dumps(failures, ensure_ascii=False, indent=1))


# ---- command -------------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=MODEL_DIR, help="where the model is written, or read by --eval-only")
    parser.add_argument("--checkpoint", type=Path, default=Path("/tmp/jaxserve-demo-model.pt"))
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint with the tokenizer in --output")
    parser.add_argument("--start-from", type=Path, help="a trained model's folder: its weights and tokenizer, a new optimizer")
    parser.add_argument("--keep", type=float, default=0.0, help="the share of --start-from's weights in what is written")
    parser.add_argument(
        "--new-facts", action="store_true", help="with --start-from: a few steps, as scripts/demo_facts.py changed"
    )
    parser.add_argument("--compile", action="store_true", help="torch.compile the model: a minute's wait, then faster")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--eval-only", action="store_true")
    parser.add_argument("--eval-prompts", type=int, default=60, help="held-out prompts per task")
    parser.add_argument("--eval-report", type=Path, help="write the failures of the evaluation there as JSON")
    return parser.parse_args()


def starting_point(args: argparse.Namespace) -> tuple[Trainer, PreTrainedTokenizerBase]:
    """A new model, one that was trained before, or where the last run stopped."""
    known = args.start_from or (args.output if args.resume else None)
    tokenizer = Qwen2Tokenizer.from_pretrained(known) if known else train_tokenizer(args.seed)
    if args.start_from:
        model = Qwen3ForCausalLM.from_pretrained(args.start_from, dtype=torch.float32)
        settings = Settings.for_new_facts if args.new_facts else Settings.for_trained
        trainer = Trainer(model, settings(args.steps, args.seed))
    else:
        trainer = Trainer(new_model(tokenizer, args.seed), Settings(args.steps, args.seed))
    if args.resume:
        trainer.load(args.checkpoint)
    return trainer, tokenizer


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    if not args.eval_only:
        trainer, tokenizer = starting_point(args)
        in_place = args.resume or (args.start_from and args.start_from.resolve() == args.output.resolve())
        if not in_place:  # saving again what was loaded adds to it how it was loaded
            tokenizer.save_pretrained(args.output)
        train(trainer, Encoder(tokenizer), args.checkpoint, args.compile)
        if args.start_from:
            mix_in(trainer.model, args.start_from, args.keep)
        save_model(trainer.model, tokenizer, args.output)
    evaluate(args.output, args.eval_prompts, args.seed, args.eval_report)


if __name__ == "__main__":
    main()
