"""Files of tensors in requests: safetensors, and never pickles, which run whatever their sender likes."""

from __future__ import annotations

from jaxserve.scheduler.control.declaration import ControlError

_LOAD_FORMATS = (None, "auto", "safetensors")
# How pickles begin that torch and SGLang's serializer make. The header of a safetensors file begins behind its length.
_PICKLE, _HEADER, _HEADER_AT = b"\x80", b"{", 8


def check_load_format(load_format: str | None) -> None:
    if load_format not in _LOAD_FORMATS:
        raise ControlError(f'load_format must be "safetensors" or absent; got {load_format!r}.')


def check_is_no_pickle(field: str, data: bytes) -> None:
    if data.startswith(_PICKLE) and data[_HEADER_AT : _HEADER_AT + 1] != _HEADER:
        raise ControlError(
            f"{field} is a pickle, which could run any code here. It must be a safetensors file, as safetensors.torch.save or "
            "safetensors.flax.save makes it."
        )
