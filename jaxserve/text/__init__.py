"""Text that comes into being token by token: incremental decoding, and stop patterns that are looked for in it.

Used on both sides of the border between scheduler and detokenizer, so that both see the same text and the same match. Knows
neither requests nor messages.
"""
