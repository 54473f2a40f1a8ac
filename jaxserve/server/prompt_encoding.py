"""A text to token ids, if it can be a prompt: what is far too long is noticed after reading no more of it than could fit.

Tokenizing takes a hundred times a text's memory and a second for some megabytes, so a text much longer than the usual prompt is
first counted in pieces, cut at white space. A cut may add a few tokens; a text is refused only if it has clearly too many, and
what is not refused is encoded whole. Knows neither requests nor threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Encode = Callable[[str], list[int]]

_PIECE_CHARS = 16384
# A text with no more characters than this for each token that fits is encoded at once; few are.
_USUAL_TOKEN_CHARS = 4
# Tokens that a cut can add at most, for all we know; with them a sixteenth of the count is in doubt.
_CUT_TOKENS = 16


class TooManyTokensError(Exception):
    """The text cannot be a prompt; it has at least so many tokens."""

    def __init__(self, at_least: int) -> None:
        super().__init__(f"at least {at_least} tokens")
        self.at_least = at_least


def encode_within(encode: Encode, text: str, most_tokens: int, longest_token_chars: int, *, cut: bool) -> list[int]:
    """The ids of a text that may have `most_tokens`, or somewhat more of them. A text with far more raises TooManyTokensError,
    or with `cut` is shortened, not quite to `most_tokens`."""
    text = _within_characters(text, most_tokens, longest_token_chars, cut=cut)
    if len(text) <= _usual_chars(most_tokens):
        return encode(text)
    num_tokens = start = 0
    while start < len(text):
        end = _piece_end(text, start)
        num_tokens += max(0, len(encode(text[start:end])) - _CUT_TOKENS)
        certain = num_tokens - num_tokens // 16
        if certain > most_tokens:
            if not cut:
                raise TooManyTokensError(certain)
            return encode(text[:end])
        start = end
    return encode(text)


def chars_at_once(most_tokens: int, longest_token_chars: int) -> int:
    """A text of no more characters than this is encoded as it is."""
    return min(_usual_chars(most_tokens), most_tokens * longest_token_chars)


def _usual_chars(most_tokens: int) -> int:
    return most_tokens * _USUAL_TOKEN_CHARS + _PIECE_CHARS


def _within_characters(text: str, most_tokens: int, longest_token_chars: int, *, cut: bool) -> str:
    most_chars = most_tokens * longest_token_chars
    if len(text) > most_chars and not cut:
        raise TooManyTokensError(-(-len(text) // longest_token_chars))
    return text[:most_chars]


def _piece_end(text: str, start: int) -> int:
    """The last white space of the next piece, or its end if it has none in its second half."""
    end = start + _PIECE_CHARS
    if end >= len(text):
        return len(text)
    middle = start + _PIECE_CHARS // 2
    space = max(text.rfind(" ", middle, end), text.rfind("\n", middle, end))
    return space if space > middle else end


def lengths_within(lengths: Sequence[int], most: int) -> list[int]:
    """How much is kept of a text, or of the two of a pair, that may have `most` tokens together: transformers' longest_first,
    which shortens the longer one of a pair until both are of a length."""
    if len(lengths) == 1 or sum(lengths) <= most:
        return [min(length, most) for length in lengths]
    shorter, longer = sorted(lengths)
    if 2 * shorter < most:
        longer = most - shorter
    else:
        shorter, longer = most // 2, most - most // 2
    return [shorter, longer] if lengths[0] <= lengths[1] else [longer, shorter]
