"""How far the logprobs that samples are drawn with are from others of the same tokens: our own of prompts, and Transformers'.

    python -m benchmarks.mismatch --model PATH [--prompts 8] [--samples 4] [--tokens 64] [--reference-dtype float32]
                                  [--no-transformers] [options of the engine, such as --dtype bfloat16 --tp-size 2]

Samples are drawn at temperature 1, so that their logprobs are those of the distribution that they were drawn from. The engine
then scores the same tokens as parts of prompts, and so does Transformers in torch on the CPU, one sequence at a time.
Both reports (`jaxserve.compare_logprobs`) are of the tokens that were drawn.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from typing import Any

import click
import numpy as np

from jaxserve import Engine, Rollouts, compare_logprobs
from jaxserve.cli.engine import start_engine
from jaxserve.cli.options import HTTP_ONLY, server_options

ENGINE_DEFAULTS = {"log_level": "warning", "max_queued_requests": None, "max_reply_numbers": None}
BEGINNINGS = (
    "The ferry leaves the harbour at half past",
    "def mean(values):\n    return",
    "Q: What is 17 plus 5?\nA:",
    "Once upon a time a clockmaker",
    "The three largest cities of the country are",
    "Dear Sir or Madam,",
    '{"name": "Ada", "age":',
    "In the next chapter we look at",
)


def draw(engine: Engine, num_prompts: int, num_samples: int, num_tokens: int) -> Rollouts:
    prompts = [f"{number}. {BEGINNINGS[number % len(BEGINNINGS)]}" for number in range(num_prompts)]
    return engine.rollout(prompts, {"temperature": 1.0, "max_new_tokens": num_tokens, "ignore_eos": True}, n=num_samples)


def sequences(rollouts: Rollouts) -> list[list[int]]:
    """Each prompt with each of its samples, without padding."""
    is_token = np.concatenate([rollouts.prompt_mask.repeat(rollouts.num_samples, axis=0), rollouts.mask], axis=1)
    return [row[tokens].tolist() for row, tokens in zip(rollouts.sequences, is_token, strict=True)]


def of_samples(rollouts: Rollouts, logprobs: Iterable[Sequence[float] | np.ndarray]) -> np.ndarray:
    """As padded as the rollouts: the last `logprobs` of each sequence are those of its sample."""
    assert rollouts.logprobs is not None
    padded = np.zeros_like(rollouts.logprobs)
    for row, (length, of_sequence) in enumerate(zip(rollouts.lengths.tolist(), logprobs, strict=True)):
        padded[row, :length] = of_sequence[len(of_sequence) - length :]
    return padded


def scored_by_engine(engine: Engine, rollouts: Rollouts) -> np.ndarray:
    """float32 [N, width]: logprobs of the samples as parts of prompts."""
    replies: Any = engine.generate(
        input_ids=sequences(rollouts), sampling_params={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0
    )
    given = (reply["meta_info"]["input_token_logprobs"] for reply in replies)
    return of_samples(rollouts, [[logprob for logprob, *_ in of_sequence[1:]] for of_sequence in given])


def scored_by_transformers(folder: str, rollouts: Rollouts, dtype: str) -> np.ndarray:
    """float32 [N, width]: the same of the model as Transformers has it, in torch, of logits in float32."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    found = []
    with torch.inference_mode():
        for sequence in sequences(rollouts):
            ids = torch.tensor(sequence)
            logprobs = model(ids[None]).logits[0, :-1].float().log_softmax(dim=-1)
            found.append(logprobs.gather(1, ids[1:, None])[:, 0].numpy())
    return of_samples(rollouts, found)


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.option("--prompts", type=click.IntRange(1), default=8, show_default=True)
@click.option("--samples", type=click.IntRange(1), default=4, show_default=True, help="Of each prompt.")
@click.option("--tokens", type=click.IntRange(1), default=64, show_default=True, help="Of each sample.")
@click.option("--reference-dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32", show_default=True)
@click.option("--transformers/--no-transformers", default=True, help="Whether Transformers scores the samples, too.")
@server_options(without=HTTP_ONLY, defaults=ENGINE_DEFAULTS)
def main(prompts: int, samples: int, tokens: int, reference_dtype: str, transformers: bool, **options: Any) -> None:
    if transformers and importlib.util.find_spec("torch") is None:
        raise click.ClickException("Transformers' logprobs need torch (pip install 'jaxserve[dev]'), or --no-transformers.")
    with start_engine(options) as engine:
        args = engine.server_args
        rollouts = draw(engine, prompts, samples, tokens)
        scored = scored_by_engine(engine, rollouts)
    head = ", fp32 lm_head" if args.enable_fp32_lm_head else ""
    click.echo(f"{args.served_model_name}: {prompts} prompts, {samples} samples of {tokens} tokens, dtype {args.dtype}{head}\n")
    click.echo(f"ours, drawn; ours, of given tokens\n{compare_logprobs(rollouts, scored)}")
    if transformers:
        reference = scored_by_transformers(args.model_path, rollouts, reference_dtype)
        click.echo(f"\nours, drawn; Transformers in {reference_dtype}\n{compare_logprobs(rollouts, reference)}")


if __name__ == "__main__":
    main()
