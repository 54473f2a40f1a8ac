"""Namespaces of the prefix cache as texts: what requests of one namespace cache, those of another never find."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

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


def adapter_namespace(namespace: str | None, lora_name: str | None, version: int | None = None) -> str | None:
    """The part of a namespace whose prompts run with that LoRA adapter: no cached token of another's is of any use to them.
    `version` tells apart what was loaded under one name. It is an object as JSON, which no namespace without an adapter is."""
    if lora_name is None:
        return namespace
    parts = {"namespace": namespace, "lora_name": lora_name}
    return json.dumps(parts if version is None else parts | {"version": version})


class AdapterVersion(NamedTuple):
    name: str
    version: int


def adapter_of(namespace: str) -> AdapterVersion | None:
    """The adapter that a namespace is of, if it is of one."""
    if not namespace.startswith('{"namespace": '):
        return None
    parts = json.loads(namespace)
    return AdapterVersion(parts["lora_name"], parts["version"])


def salt_of(namespace: str) -> str:
    """What a namespace is called where there is only a salt: cache_salt if a request gave nothing else, else its whole text.
    It can be written as UTF-8."""
    if namespace.startswith("[null, "):
        parts = json.loads(namespace)
        if len(parts) == 2 and not _SURROGATE.search(parts[1]):
            return str(parts[1])
    return namespace
