"""One round of reinforcement learning with the engine: `python examples/rollouts.py [--model MODEL]`.

Samples with their logprobs, memory lent to the trainer, new weights in the middle of a rollout. The trainer is left out: the
"new" weights are the model's own.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from jaxserve import Engine

SAMPLING = {"temperature": 1.0, "max_new_tokens": 24, "sampling_seed": 7}


def sample(engine: Engine) -> list[dict[str, Any]]:
    """Four samples of each prompt, which is computed once."""
    prompts = ["The capital of France is", "A cat is"]
    rollouts = engine.generate(prompts, {**SAMPLING, "n": 4}, return_logprob=True)
    print(f"{len(rollouts)} rollouts of {len(prompts)} prompts")
    return rollouts


def logprobs_of(engine: Engine, token_ids: list[int]) -> list[float]:
    """The policy's logprob of each given token but the first, without generating any."""
    scored = engine.generate(
        input_ids=token_ids, sampling_params={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0
    )
    return [logprob for logprob, _, _ in scored["meta_info"]["input_token_logprobs"][1:]]


def lend_memory(engine: Engine) -> None:
    """While nothing runs, the devices are the trainer's."""
    engine.release_memory_occupation()
    engine.resume_memory_occupation()


async def update_amid(engine: Engine, model: str) -> None:
    """New weights while a rollout runs: it goes on with them from the tokens it has."""
    long = {**SAMPLING, "max_new_tokens": 200, "ignore_eos": True}
    stream = await engine.async_generate("Once upon a time", long, stream=True)
    async for part in stream:
        if part["meta_info"]["completion_tokens"] >= 8 and part["meta_info"]["weight_version"] == "default":
            engine.pause_generation("retract")
            updated = engine.update_weights_from_disk(model_path=model, weight_version="step-1")
            engine.continue_generation()
            print(f"weights updated: {updated.success}, rollouts that go on: {updated.num_paused_requests}")
            break
    last = [part async for part in stream][-1]["meta_info"]
    print(f"ended with weights {last['weight_version']} after {last['completion_tokens']} tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="A folder, a name on the Hugging Face Hub, or demo.")
    options = parser.parse_args()
    with Engine(model_path=options.model, random_seed=1) as engine:
        first = sample(engine)[0]
        drawn = [logprob for logprob, _, _ in first["meta_info"]["output_token_logprobs"]]
        prompt = engine.tokenizer.encode("The capital of France is")
        again = logprobs_of(engine, [*prompt, *first["output_ids"]])[-len(drawn) :]
        difference = max(abs(a - b) for a, b in zip(drawn, again, strict=True))
        print(f"logprobs drawn and computed again differ by at most {difference:.3f}")
        lend_memory(engine)
        asyncio.run(update_amid(engine, engine.get_model_info()["model_path"]))


if __name__ == "__main__":
    main()
