"""Namespaces of the prefix cache as texts: what requests of one namespace cache, those of another never find."""

from __future__ import annotations

import json
import re

_SURROGATE = re.compile("[\ud800-\udfff]")  # which JSON may hold, and UTF-8 may not


def cache_namespace(extra_key: str | None, cache_salt: str | None, embeds_key: str | None = None) -> str | None:
    """extra_key and cache_salt as one namespace; different pairs never meet, and an empty string is not null.

    Embeddings have no ids that tell them apart, so each prompt of them (`embeds_key`) is a namespace of its own, for itself and
    its twins."""
    if embeds_key is not None:
        return json.dumps([extra_key, cache_salt, embeds_key])
    if extra_key is None and cache_salt is None:
        return None
    return json.dumps([extra_key, cache_salt])


def salt_of(namespace: str) -> str:
    """What a namespace is called where there is only a salt: cache_salt if a request gave nothing else, else its whole text.
    It can be written as UTF-8."""
    if namespace.startswith("[null, "):
        parts = json.loads(namespace)
        if len(parts) == 2 and not _SURROGATE.search(parts[1]):
            return str(parts[1])
    return namespace
