"""Addresses as options give them."""

from __future__ import annotations

import re

_ADDRESS = re.compile(r"(?:\[(?P<ipv6>[0-9a-fA-F:.]+)\]|(?P<host>[^\s:\[\]/]+)):(?P<port>[0-9]{1,5})")
_LARGEST_PORT = 65535


def split_address(option: str, address: str) -> tuple[str, int]:
    """Host and port of host:port, or [::1]:port. ValueError with a sentence about the option."""
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found["port"]) <= _LARGEST_PORT - 2:
        raise ValueError(f"{option} must be host:port, with a port in [1, {_LARGEST_PORT - 2}]; got {address!r}.")
    return found["ipv6"] or found["host"], int(found["port"])
