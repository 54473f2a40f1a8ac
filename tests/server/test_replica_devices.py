from __future__ import annotations

from typing import Any

import pytest

from jaxserve.config import ServerArgs
from jaxserve.server.replica_devices import replica_environment

CUDA, TPU = "CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS"


def args(**options: Any) -> ServerArgs:
    return ServerArgs(model_path="-", **options)


def shares(name: str, environment: dict[str, str], **options: Any) -> list[str | None]:
    """Of `name`, per replica."""
    server = args(**options)
    return [replica_environment(server, rank, environment).get(name) for rank in range(server.dp_size)]


@pytest.mark.parametrize("device", ["auto", "cuda", "tpu", "cpu"])
def test_a_single_replica_sees_what_the_server_sees(device: str) -> None:
    assert replica_environment(args(device=device, tp_size=3), 0, {CUDA: "", TPU: ""}) == {}


def test_replicas_on_cpu_share_it() -> None:
    assert shares(CUDA, {CUDA: "0"}, device="cpu", dp_size=4) == [None] * 4
    assert replica_environment(args(device="auto", dp_size=4), 1, {"JAX_PLATFORMS": "cpu", CUDA: "0"}) == {}


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_gpus_are_divided_in_order(device: str) -> None:
    assert shares(CUDA, {}, device=device, dp_size=3) == ["0", "1", "2"]
    assert shares(CUDA, {}, device=device, dp_size=2, tp_size=3) == ["0,1,2", "3,4,5"]
    assert shares(CUDA, {CUDA: "3, 1,0 ,2,7"}, device=device, dp_size=2, tp_size=2) == ["3,1", "0,2"]
    assert shares(CUDA, {CUDA: "GPU-a1,GPU-b2,MIG-c3"}, device=device, dp_size=3) == ["GPU-a1", "GPU-b2", "MIG-c3"]


@pytest.mark.parametrize("listed", ["0,1,2", "0,1,2,-1,3", "0,,1,2"])
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_list_that_is_too_short_is_a_sentence(device: str, listed: str) -> None:
    with pytest.raises(ValueError, match=r"^--dp-size 2 with --tp-size 2 needs 4 devices; CUDA_VISIBLE_DEVICES names 3\.$"):
        replica_environment(args(device=device, dp_size=2, tp_size=2), 0, {CUDA: listed})


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_gpus_that_are_hidden_on_purpose(hidden: str) -> None:
    assert shares(CUDA, {CUDA: hidden}, device="auto", dp_size=2) == [None, None]
    with pytest.raises(ValueError, match="names 0"):
        replica_environment(args(device="cuda", dp_size=2), 0, {CUDA: hidden})


@pytest.mark.parametrize(("tp_size", "bounds"), [(1, "1,1,1"), (2, "1,2,1"), (4, "2,2,1")])
def test_chips_of_a_tpu_host(tp_size: int, bounds: str) -> None:
    first, second = (replica_environment(args(device="tpu", dp_size=2, tp_size=tp_size), rank, {}) for rank in range(2))
    assert CUDA not in first
    assert f"{first[TPU]},{second[TPU]}" == ",".join(map(str, range(2 * tp_size)))
    assert first["TPU_CHIPS_PER_PROCESS_BOUNDS"] == second["TPU_CHIPS_PER_PROCESS_BOUNDS"] == bounds
    assert first["TPU_PROCESS_BOUNDS"] == "1,1,1"
    assert first["TPU_PROCESS_PORT"] != second["TPU_PROCESS_PORT"]
    assert second["TPU_PROCESS_ADDRESSES"] == f"localhost:{second['TPU_PROCESS_PORT']}"


def test_chips_that_are_listed() -> None:
    assert shares(TPU, {TPU: "4,5,6,7"}, device="tpu", dp_size=2, tp_size=2) == ["4,5", "6,7"]
    old = "TPU_VISIBLE_DEVICES"
    assert (
        shares(TPU, {old: "3,2"}, device="tpu", dp_size=2) == shares(old, {old: "3,2"}, device="tpu", dp_size=2) == ["3", "2"]
    )
    with pytest.raises(ValueError, match="needs 4 chips; TPU_VISIBLE_CHIPS names 2"):
        replica_environment(args(device="tpu", dp_size=4), 0, {TPU: "0,1"})


def test_two_servers_on_one_host_meet_at_no_port() -> None:
    ports = [shares("TPU_PROCESS_PORT", {TPU: chips}, device="tpu", dp_size=2) for chips in ("0,1", "2,3")]
    assert len({*ports[0], *ports[1]}) == 4


@pytest.mark.parametrize(("tp_size", "expected"), [(1, ["0", "1"]), (2, ["0", "1"]), (3, ["0,1", "2,3"]), (4, ["0,1", "2,3"])])
def test_chips_of_two_devices(tp_size: int, expected: list[str]) -> None:
    seven = {"TPU_ACCELERATOR_TYPE": "tpu7x-8"}
    assert shares(TPU, seven, device="tpu", dp_size=2, tp_size=tp_size) == expected
    with pytest.raises(ValueError, match="--tp-size 4 needs 4 chips; TPU_VISIBLE_CHIPS names 3"):
        replica_environment(args(device="tpu", dp_size=2, tp_size=4), 0, {TPU: "0,1,2", **seven})


def test_a_number_of_chips_that_no_host_can_be_cut_into() -> None:
    with pytest.raises(ValueError, match=r"^--tp-size 3 with --dp-size 2: .* parts of 1, 2, 4\.$"):
        replica_environment(args(device="tpu", dp_size=2, tp_size=3), 0, {})
    assert replica_environment(args(device="auto", dp_size=2, tp_size=3), 1, {}) == {CUDA: "3,4,5"}
