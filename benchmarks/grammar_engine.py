"""What constrained decoding costs an engine: tokens per second with all rows constrained, against all rows free.

    python -m benchmarks.grammar_engine [--rows 1 8 32] [--tokens 200] [--rounds 3]

The demo model behind an Engine. Kinds of requests take turns, each asks for as many tokens; the best round of each counts.
Their grammars cannot end before that. Prints tokens per second, and the ratio to free requests of the same run.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import jaxserve
from jaxserve.demo import demo_model_path

_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}, "likes_tea": {"type": "boolean"}},
    "required": ["name", "age", "likes_tea"],
    "additionalProperties": False,
}


def kinds(num_tokens: int) -> dict[str, dict[str, Any]]:
    people = {"type": "array", "items": _PERSON, "minItems": num_tokens}
    schema = {"json_schema": json.dumps(people)}
    return {
        "free": {},
        "regex": {"regex": f"[a-z ]{{{num_tokens},}}"},
        "json": schema,
        "thinking": {**schema, "require_reasoning": True},  # the demo model never ends it
    }


def tokens_per_s(engine: jaxserve.Engine, rows: int, num_tokens: int, kind: dict[str, Any]) -> float:
    grammar = {name: value for name, value in kind.items() if name != "require_reasoning"}
    params = [
        {"temperature": 0.8, "sampling_seed": row, "max_new_tokens": num_tokens, "ignore_eos": True, **grammar}
        for row in range(rows)
    ]
    prompts = [f"Row {row}:" for row in range(rows)]
    started_s = time.perf_counter()
    replies: Any = engine.generate(prompts, params, require_reasoning=kind.get("require_reasoning", False))
    elapsed_s = time.perf_counter() - started_s
    counts = {reply["meta_info"]["completion_tokens"] for reply in replies}
    assert counts == {num_tokens}, f"a request ended early: {sorted(counts)} of {num_tokens} tokens"
    return rows * num_tokens / elapsed_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    engine = jaxserve.Engine(
        demo_model_path(),
        max_running_requests=max(options.rows),
        decode_row_buckets=tuple(sorted(set(options.rows))),
        context_length=options.tokens + 56,
        reasoning_parser="qwen3",
        warmup="full",
    )
    asked = kinds(options.tokens)
    print("| rows | requests | tokens/s | of free |\n|--:|---|--:|--:|")
    with engine:
        for kind in asked.values():  # compiles the grammars
            tokens_per_s(engine, 1, options.tokens, kind)
        for rows in options.rows:
            best = dict.fromkeys(asked, 0.0)
            for _ in range(options.rounds):
                for name, kind in asked.items():
                    best[name] = max(best[name], tokens_per_s(engine, rows, options.tokens, kind))
            for name, speed in best.items():
                print(f"| {rows} | {name} | {speed:.0f} | {speed / best['free']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
