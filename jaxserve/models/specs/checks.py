"""What specs check of their fields."""

from __future__ import annotations

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu", "relu2")


def check_divides(name: str, value: int, tp_size: int) -> None:
    if value % tp_size:
        raise ValueError(f"--tp-size must divide the model's {name}={value}; got {tp_size}.")


def check_activation(act: str) -> None:
    if act not in ACTIVATIONS:
        raise ValueError(f"hidden_act must be one of {', '.join(ACTIVATIONS)}; got {act!r}.")


def check_sizes(spec: object, *names: str) -> None:
    for name in names:
        value = getattr(spec, name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")
