"""What jumping over forced tokens brings: tokens per second of schema-heavy requests, with jumps against without.

    python -m benchmarks.jump_forward [--rows 1 4 8] [--rounds 5]

The demo model behind two Engines that differ in --disable-jump-forward; they take turns, the best round of each counts. Half
of the requests bring a JSON schema, half the same as the arguments of a call; JSON has any white space, or none. Printed are
tokens per second, and the ratio within the run. The demo tokenizer has 2048 tokens; a real one spells names in fewer.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import jaxserve
from jaxserve.demo import demo_model_path

_RECORD = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "maxLength": 12},
        "order_number": {"type": "integer", "minimum": 0, "maximum": 9999},
        "is_paid": {"type": "boolean"},
        "shipping_address": {
            "type": "object",
            "properties": {"street": {"type": "string", "maxLength": 12}, "city": {"enum": ["London", "Paris", "Berlin"]}},
            "required": ["street", "city"],
            "additionalProperties": False,
        },
    },
    "required": ["customer_name", "order_number", "is_paid", "shipping_address"],
    "additionalProperties": False,
}
_CALL = {
    "type": "tag",
    "begin": '<tool_call>\n{"name": "place_order", "arguments": ',
    "content": {"type": "json_schema", "json_schema": _RECORD},
    "end": "}\n</tool_call>",
}
_GRAMMARS = (
    {"json_schema": json.dumps(_RECORD)},
    {"structural_tag": json.dumps({"type": "structural_tag", "format": _CALL})},
)


def tokens_per_s(engine: jaxserve.Engine, rows: int) -> tuple[float, list[str]]:
    params = [
        {"temperature": 0.8, "sampling_seed": row, "max_new_tokens": 250, **_GRAMMARS[row % 2]} for row in range(max(rows, 2))
    ]
    parts: list[list[dict[str, Any]]] = [params] if rows > 1 else [[one] for one in params]
    started_s, replies = time.perf_counter(), []
    for part in parts:
        replies += engine.generate([f"Row {row}:" for row in range(len(part))], part)
    elapsed_s = time.perf_counter() - started_s
    return sum(reply["meta_info"]["completion_tokens"] for reply in replies) / elapsed_s, [reply["text"] for reply in replies]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print("| white space | rows | with jumps, tokens/s | without | ratio |\n|---|--:|--:|--:|--:|")
    for compact in (False, True):
        with_jumps, without = (
            jaxserve.Engine(
                demo_model_path(),
                max_running_requests=max(options.rows),
                context_length=512,
                constrained_json_disable_any_whitespace=compact,
                disable_jump_forward=disable,
                warmup="full",
            )
            for disable in (False, True)
        )
        with with_jumps, without:
            for rows in options.rows:
                best = {True: 0.0, False: 0.0}
                for _ in range(options.rounds + 1):  # the first compiles the grammars
                    texts = {}
                    for is_on, engine in ((True, with_jumps), (False, without)):
                        speed, texts[is_on] = tokens_per_s(engine, rows)
                        best[is_on] = max(best[is_on], speed)
                    assert texts[True] == texts[False], "jumps change what comes out"
                speeds = f"{best[True]:.0f} | {best[False]:.0f} | {best[True] / best[False]:.2f}"
                print(f"| {'none' if compact else 'any'} | {rows} | {speeds} |", flush=True)


if __name__ == "__main__":
    main()
