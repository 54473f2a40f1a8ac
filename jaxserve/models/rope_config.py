"""RopeConfig: how a model turns positions into rotations, read from either spelling of config.json.

Older files have `rope_theta` and `rope_scaling`, files of Transformers 5 have one `rope_parameters` object. Plain data: the
arithmetic is in `jaxserve.models.rope`, and nothing here imports JAX.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
DEFAULT_THETA = 10000.0
_KINDS_WITH_ORIGINAL_LEN = ("llama3", "yarn", "longrope")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Frequencies are theta ** (-2i / head_dim), changed by `kind`. Fields a kind does not use keep their defaults."""

    theta: float = DEFAULT_THETA
    kind: str = "default"
    factor: float = 1.0  # every kind but default: how much longer the context gets
    max_len_is_scaled: bool = False  # linear, dynamic: max_position_embeddings is the context length after the extension
    original_max_len: int | None = None  # llama3, yarn, longrope: context length before the extension
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    attention_factor: float | None = None  # yarn, longrope: factor on cos and sin; None: computed from `factor`
    truncate: bool = True  # yarn: whole-numbered correction range
    short_factor: tuple[float, ...] = ()  # longrope: what each frequency is divided by where `is_short`
    long_factor: tuple[float, ...] = ()  # the same elsewhere
    short_mscale: float | None = None  # longrope: `attention_factor` where `is_short`
    long_mscale: float | None = None  # the same elsewhere
    is_short: bool = False  # longrope: no sequence is longer than original_max_len
    rotary_dim: int | None = None  # dimensions of a head that are rotated, the first ones; None: all, 0: none (NoPE)
    is_interleaved: bool = False  # in checkpoints dimension 2i pairs with 2i + 1, instead of i with i + rotary_dim / 2

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ValueError(f"rope type {self.kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}.")
        if self.theta <= 0:
            raise ValueError(f"rope_theta must be above 0, got {self.theta}.")
        if self.factor < 1:
            raise ValueError(f"the factor of rope type {self.kind!r} must be at least 1, got {self.factor}.")
        if self.rotary_dim is not None and (self.rotary_dim < 0 or self.rotary_dim % 2):
            raise ValueError(f"the rotated dimensions of a head must be an even number, got {self.rotary_dim}.")

    def for_context(self, context_len: int) -> RopeConfig:
        """For sequences of at most `context_len` tokens."""
        if self.kind != "longrope" or self.original_max_len is None:
            return self
        return dataclasses.replace(self, is_short=context_len <= self.original_max_len)

    def check_head(self, head_dim: int) -> None:
        """ValueError unless heads of that size can be rotated so."""
        rotated = self.rotated(head_dim)
        if rotated > head_dim:
            raise ValueError(f"the rotated dimensions of a head must be at most head_dim={head_dim}, got {rotated}.")
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            if self.kind == "longrope" and len(factors) != rotated // 2:
                raise ValueError(
                    f"{name} must have a number for each pair of the {rotated} rotated dimensions of a head, "
                    f"{rotated // 2}; got {len(factors)}."
                )

    def rotated(self, head_dim: int) -> int:
        """How many dimensions of a head are rotated."""
        return head_dim if self.rotary_dim is None else self.rotary_dim

    def head_order(self, head_dim: int) -> tuple[range, ...]:
        """Dimensions of a head of q or k in checkpoints, in the order in which pairs stand head_dim / 2 apart.

        Heads are loaded in that order (q·k stays what it is), so that attention knows one way to rotate. Dimensions that are
        not rotated pair with each other.
        """
        rotated = self.rotated(head_dim)
        middle = (rotated + head_dim) // 2  # of those that are not
        if self.is_interleaved:
            pairs = range(0, rotated, 2), range(1, rotated, 2)
        else:
            pairs = range(rotated // 2), range(rotated // 2, rotated)
        return _joined((pairs[0], range(rotated, middle), pairs[1], range(middle, head_dim)))

    def extended_len(self, max_position_embeddings: int) -> int:
        """The context length with this scaling. llama3's max_position_embeddings is the scaled length, yarn's may be either."""
        if self.kind in ("linear", "dynamic") and not self.max_len_is_scaled:
            return int(max_position_embeddings * self.factor)
        if self.kind == "yarn" and self.original_max_len is not None:
            return max(max_position_embeddings, int(self.original_max_len * self.factor))
        return max_position_embeddings


_OLDER_LONGROPE = ("su", "yarn")  # how files of Phi-3 called it at first
NO_ROPE = RopeConfig(rotary_dim=0)


def _joined(parts: Iterable[range]) -> tuple[range, ...]:
    """The same numbers in as few ranges as can be."""
    joined: list[range] = []
    for part in parts:
        if joined and joined[-1].stop == part.start and joined[-1].step == part.step == 1:
            joined[-1] = range(joined[-1].start, part.stop)
        elif part:
            joined.append(part)
    return tuple(joined)


def read_rope(raw: Mapping[str, Any]) -> RopeConfig:
    """The rope of a config.json object, of heads that are rotated whole. ValueError says what the decoder cannot compute."""
    params = {**(raw.get("rope_parameters") or {}), **(raw.get("rope_scaling") or {})}
    if any(isinstance(value, Mapping) for value in params.values()):
        raise ValueError(f"rope_parameters that differ by layer type ({', '.join(params)}) are not supported.")
    partial = _partial_rotary_factor(params, raw)
    if partial not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor must be 1 for this model family, got {partial}.")
    theta = params.get("rope_theta") or raw.get("rope_theta") or DEFAULT_THETA
    kind = params.get("rope_type") or params.get("type") or "default"
    if kind in _OLDER_LONGROPE and "short_factor" in params:
        kind = "longrope"
    if kind == "default":
        return RopeConfig(theta=float(theta))
    return RopeConfig(theta=float(theta), kind=kind, **_scaling_fields(kind, params, raw))


def read_partial_rope(raw: Mapping[str, Any], head_dim: int, default: float = 1.0) -> RopeConfig:
    """The same for a family that may rotate only the first part of a head; `default` where config.json names none."""
    params = {**(raw.get("rope_parameters") or {}), **(raw.get("rope_scaling") or {})}
    partial = _partial_rotary_factor(params, raw)
    partial = default if partial is None else partial
    if not isinstance(partial, int | float) or not 0 < partial <= 1:
        raise ValueError(f"partial_rotary_factor must be above 0 and at most 1, got {partial!r}.")
    whole = {name: {**(raw.get(name) or {}), "partial_rotary_factor": None} for name in ("rope_parameters", "rope_scaling")}
    rope = read_rope({**raw, **whole, "partial_rotary_factor": None})
    rotary_dim = int(head_dim * partial)
    return rope if rotary_dim == head_dim else dataclasses.replace(rope, rotary_dim=rotary_dim)


def _partial_rotary_factor(params: Mapping[str, Any], raw: Mapping[str, Any]) -> Any:
    return params.get("partial_rotary_factor", raw.get("partial_rotary_factor"))


def _scaling_fields(kind: str, params: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    max_len = raw.get("max_position_embeddings")
    named_len = raw.get("original_max_position_embeddings") or params.get("original_max_position_embeddings")
    original_len = (named_len or max_len) if kind in _KINDS_WITH_ORIGINAL_LEN else None
    factor = params.get("factor")
    if factor is None and kind in ("yarn", "longrope") and original_len and max_len:
        factor = max(max_len / original_len, 1.0)
    if factor is None:
        raise ValueError(f"rope type {kind!r} needs a factor; config.json gives none.")
    fields: dict[str, Any] = {
        "factor": float(factor),
        "original_max_len": original_len,
    }
    for name in ("low_freq_factor", "high_freq_factor"):
        if kind == "llama3" and params.get(name) is None:
            raise ValueError(f"rope type 'llama3' needs {name}; config.json gives none.")
    if kind == "longrope":
        if not isinstance(original_len, int) or original_len < 2:
            raise ValueError(f"original_max_position_embeddings must be a whole number of at least 2, got {original_len!r}.")
        fields.update({name: _long_factors(name, params.get(name)) for name in ("short_factor", "long_factor")})
    optional = (
        "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor",
        "truncate", "short_mscale", "long_mscale",
    )  # fmt: skip
    fields.update({name: params[name] for name in optional if params.get(name) is not None})
    return fields


def _long_factors(name: str, factors: Any) -> tuple[float, ...]:
    if not isinstance(factors, list) or not all(isinstance(value, int | float) and value > 0 for value in factors):
        raise ValueError(f"rope type 'longrope' needs {name}, a list of numbers above 0; got {factors!r}.")
    return tuple(map(float, factors))


def merge_overrides(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the user's keys on top, so that either spelling of rope overrides either spelling in the file.

    New scaling replaces the file's scaling but keeps its thetas, and a bare `rope_theta` replaces only the theta.
    """
    merged = {**raw, **overrides}
    if not {"rope_theta", "rope_scaling", "rope_parameters"} & overrides.keys():
        return merged
    in_file = {**(raw.get("rope_parameters") or {}), **(raw.get("rope_scaling") or {})}
    in_file.setdefault("rope_theta", raw.get("rope_theta"))
    replaces_scaling = "rope_scaling" in overrides or "rope_parameters" in overrides
    params = _thetas(in_file) if replaces_scaling else in_file
    params.update(overrides.get("rope_parameters") or {})
    params.update(overrides.get("rope_scaling") or {})
    if overrides.get("rope_theta") is not None:
        params["rope_theta"] = overrides["rope_theta"]
    return {**merged, "rope_theta": None, "rope_scaling": None, "rope_parameters": params}


def _thetas(params: Mapping[str, Any]) -> dict[str, Any]:
    """Nothing but rope_theta, also of objects per type of layer."""
    return {
        name: _thetas(value) if isinstance(value, Mapping) else value
        for name, value in params.items()
        if name == "rope_theta" or isinstance(value, Mapping)
    }
