"""Targets: names, what is behind them, and what is said of unknown ones and missing compilers."""

from __future__ import annotations

import importlib.util

import pytest

from jaxserve.aot import targets
from jaxserve.aot.chips import CHIPS, TPU7X, V5P, V6E
from jaxserve.aot.targets import Target, gpu_devices, known_targets, links_per_chip, parse_target
from jaxserve.kernels.pallas.tpu import tuning as tpu_tuning


def test_every_known_name_is_parsed() -> None:
    for target in known_targets():
        assert parse_target(target.name) == target
    assert parse_target(" V6E:2x4 ") == Target(V6E, (2, 4))
    assert parse_target("h200") == parse_target("h200:1")
    assert parse_target("h200:8").num_devices == 8


@pytest.mark.parametrize("text", ["v9", "v6e", "v6e:3x3", "v6e:2x2x1", "tpu7x:2x2", "h200:3", "", ":", "v6e:"])
def test_an_unknown_name_lists_the_known(text: str) -> None:
    with pytest.raises(ValueError, match="is not known") as caught:
        parse_target(text)
    for name in ("v5e:2x4", "v5p:2x2x1", "v6e:8x8", "tpu7x:2x2x1", "h200:8"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "chips", "devices", "hosts"),
    [
        ("v5e:1x1", 1, 1, 1),
        ("v6e:2x4", 8, 8, 1),
        ("v6e:4x4", 16, 16, 4),
        ("v5p:2x2x1", 4, 4, 1),
        ("v5p:2x2x2", 8, 8, 2),
        ("tpu7x:1x1x1", 1, 2, 1),
        ("tpu7x:2x2x2", 8, 16, 2),
        ("h200:8", 8, 8, 1),
        ("h200:2x8", 16, 16, 2),
    ],
)
def test_sizes(name: str, chips: int, devices: int, hosts: int) -> None:
    target = parse_target(name)
    assert (target.num_chips, target.num_devices, target.num_hosts) == (chips, devices, hosts)


@pytest.mark.parametrize(
    ("name", "num_devices", "links"),
    [
        ("v6e:1x1", 1, 0),
        ("v6e:2x2", 4, 2),
        ("v6e:2x4", 8, 2),  # its corners have two neighbours
        ("v6e:2x4", 4, 2),
        ("v6e:2x4", 2, 1),
        ("v6e:16x16", 256, 4),  # a torus
        ("v5p:2x2x2", 8, 3),
        ("v5p:4x4x4", 64, 6),
        ("tpu7x:2x2x1", 2, 0),  # both on one chip
        ("tpu7x:2x2x1", 8, 2),
        ("h200:8", 8, 1),
    ],
)
def test_links_of_a_corner(name: str, num_devices: int, links: int) -> None:
    assert links_per_chip(parse_target(name), num_devices) == links


def test_a_missing_compiler_is_a_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    targets._tpu_devices.cache_clear()
    gpu_devices.cache_clear()
    with pytest.raises(RuntimeError, match=r"pip install 'jax\[tpu\]'"):
        parse_target("v6e:2x2").devices()
    with pytest.raises(RuntimeError, match=r"pip install 'jax\[cuda13\]'"):
        parse_target("h200").devices()
    with pytest.raises(ValueError, match="GPU must be one of h200"):
        gpu_devices("h100")


def test_chips_agree_with_what_the_kernels_know() -> None:
    for chip in CHIPS.values():
        if chip.platform != "tpu":
            continue
        known = tpu_tuning.CHIPS[chip.kind]
        cores = 2 if chip is V5P else 1  # the kernels use one of a v5p's two
        assert chip.scratchpad_bytes == known.vmem_bytes
        assert chip.hbm_bytes_per_s == pytest.approx(cores * known.hbm_bytes_per_s, rel=0.01)
        assert chip.bf16_flops_per_s == pytest.approx(cores * known.bf16_flops_per_s, rel=0.01)


def test_peaks_by_type() -> None:
    assert TPU7X.flops_per_s("float8_e4m3fn") == 2 * TPU7X.flops_per_s("bfloat16")
    assert V6E.flops_per_s("int8") == 2 * V6E.flops_per_s("float16")
    assert V6E.flops_per_s("float32") == V6E.flops_per_s("bfloat16") / 6
