"""Logit processors: what a request may do to the logits before its tokens are sampled.

By name, for everybody: `names` says which there are and what parameters they take, `rules` what tokens they rule out. They are
masks that follow from the tokens so far, and go the way of grammars.

As code of the user's own, where the operator allows it: `base` is the class to derive from, `host` gives the logits to a
process of its own (`worker`) and takes them back.
"""

from jaxserve.logit_processors.base import CustomLogitProcessor
from jaxserve.logit_processors.host import ProcessorError, ProcessorHost
from jaxserve.logit_processors.rules import TokenRules

__all__ = ["CustomLogitProcessor", "ProcessorError", "ProcessorHost", "TokenRules"]
