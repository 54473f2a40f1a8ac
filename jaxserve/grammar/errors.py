"""The errors of this package."""

from __future__ import annotations


class GrammarError(ValueError):
    """A grammar that cannot be used. The message is a sentence for the user and belongs into a 400."""


class NotCompiledError(GrammarError):
    """The grammar may be all right: compiling it was given up. Asking again may help."""
