"""Whether a host fits to host 0: as many hosts in both minds, the same software, options and weights."""

from __future__ import annotations

from jaxserve.hosts.protocol import Hello


def difference(first: Hello, other: Hello, num_hosts: int) -> str | None:
    """A sentence, if `other` cannot run with host 0, which is `first`."""
    who = f"Host {other.rank} ({other.name})"
    if other.software != first.software:
        return f"{who} runs {other.software}, host 0 {first.software}."
    if not 0 < other.rank < num_hosts:
        return f"{who} has --node-rank {other.rank}; with --nnodes {num_hosts} the others have 1 to {num_hosts - 1}."
    for name in sorted(first.options.keys() | other.options.keys()):
        mine, theirs = first.options.get(name), other.options.get(name)
        if mine != theirs:
            return f"{who} was given --{name.replace('_', '-')} {theirs!r}, host 0 {mine!r}: all hosts need the same."
    if other.weights != first.weights:
        return f"{who} has another config.json or other weights in its --model-path than host 0."
    return None
