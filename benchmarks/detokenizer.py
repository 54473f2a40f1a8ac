"""What decoding costs: microseconds of CPU per token, by rows in a message.

    python -m benchmarks.detokenizer [--rows 1 32 256] [--tokenizer FOLDER]

Each row gets one token per message, as from a decode step; the first messages, which open the rows, are not counted. Medians.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from jaxserve.demo import demo_model_path
from jaxserve.messages import SKIP_SPECIAL_TOKENS, BatchTokenIDOut
from jaxserve.server.detokenizer import Detokenizer
from jaxserve.server.tokenizer import Tokenizer

_TEXT = "The quick brown fox – naïve, 日本語 and 🚀 – jumps over the lazy dog; what does it want there? " * 40
_OPENING = 20


def message(rids: list[str], token_ids: np.ndarray) -> BatchTokenIDOut:
    n = len(rids)
    ones = np.ones(n, np.int32)
    return BatchTokenIDOut(
        rids=rids,
        token_ids=token_ids,
        token_counts=ones,
        decode_flags=np.full(n, SKIP_SPECIAL_TOKENS, np.uint8),
        prompt_tokens=ones,
        completion_tokens=ones,
        cached_tokens=ones,
    )


def measure(tokenizer: Tokenizer, num_rows: int, num_messages: int) -> float:
    """Median microseconds per token."""
    ids = np.array(tokenizer.encode(_TEXT, add_special_tokens=False), np.int32)
    rids = [f"request-{i:08d}" for i in range(num_rows)]
    starts = np.arange(num_rows) * 17
    detokenizer = Detokenizer(tokenizer.decoder)
    costs_s = []
    for step in range(num_messages + _OPENING):
        one = message(rids, ids[(starts + step) % len(ids)])
        began_s = time.process_time()
        detokenizer.process(one)
        costs_s.append(time.process_time() - began_s)
    return float(np.median(costs_s[_OPENING:])) / num_rows * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256], help="rows in a message")
    parser.add_argument("--tokenizer", default=demo_model_path(), help="folder of the tokenizer; default: the demo model's")
    args = parser.parse_args()
    tokenizer = Tokenizer.load(args.tokenizer, hide_torch=True)
    for num_rows in args.rows:
        cost_us = measure(tokenizer, num_rows, 40_000 // num_rows)
        print(f"{num_rows:>4} rows: {cost_us:6.2f} us per token")


if __name__ == "__main__":
    main()
