"""deploy/kubernetes/multihost: what kustomize makes of the overlays are groups of pods, each the hosts of one server."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from test_deploy import DEPLOY, DRAIN_S, PATHS, PORT, READERS_S, last, served

from jaxserve.config import ServerArgs

FOLDER = DEPLOY / "kubernetes" / "multihost"
OVERLAYS = {"gpu": ("cuda", "nvidia.com/gpu"), "tpu": ("tpu", "google.com/tpu")}
LEADER = "group-0.group.space"
# Of leaderworkerset.x-k8s.io/v1 (kubernetes-sigs/lws v0.9.0), without the templates' insides: a Pod's.
TEMPLATE = {
    "type": "object",
    "required": ["spec"],
    "additionalProperties": False,
    "properties": {"metadata": {"type": "object"}, "spec": {"type": "object"}},
}
LEADER_WORKER_SET = {
    "type": "object",
    "required": ["leaderWorkerTemplate"],
    "additionalProperties": False,
    "properties": {
        "replicas": {"type": "integer"},
        "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
        "rolloutStrategy": {"type": "object"},
        "networkConfig": {"type": "object"},
        "leaderWorkerTemplate": {
            "type": "object",
            "required": ["workerTemplate"],
            "additionalProperties": False,
            "properties": {
                "size": {"type": "integer"},
                "restartPolicy": {"enum": ["Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
                "leaderTemplate": TEMPLATE,
                "workerTemplate": TEMPLATE,
            },
        },
    },
}


def read(path: str) -> Any:
    return yaml.safe_load((FOLDER / path).read_text())


def patched(document: dict[str, Any], operations: list[dict[str, Any]]) -> dict[str, Any]:
    """As by RFC 6902: what is replaced is there, and what is added to exists."""
    document = json.loads(json.dumps(document))  # of what YAML's anchors share, each place has its own
    for operation in operations:
        *parents, name = [part.replace("~1", "/") for part in operation["path"].split("/")[1:]]
        place: Any = document
        for parent in parents:
            place = place[int(parent) if isinstance(place, list) else parent]
        if isinstance(place, list):
            assert (operation["op"], name) == ("add", "-")
            place.append(operation["value"])
        else:
            assert operation["op"] == ("replace" if name in place else "add"), operation
            place[name] = operation["value"]
    return document


def made(overlay: str) -> dict[str, dict[str, Any]]:
    """Manifests by kind, as kustomize makes them: our overlays have images and one patch of LeaderWorkerSets."""
    kustomization = read(f"{overlay}/kustomization.yaml")
    assert kustomization.keys() == {"apiVersion", "kind", "resources", "images", "patches"}
    assert kustomization["resources"] == ["../base"]
    (patch,) = kustomization["patches"]
    assert patch == {"path": "hosts.yaml", "target": {"kind": "LeaderWorkerSet"}}
    (image,) = kustomization["images"]
    manifests = {m["kind"]: m for m in (read(f"base/{name}") for name in read("base/kustomization.yaml")["resources"])}
    group = patched(manifests["LeaderWorkerSet"], read(f"{overlay}/{patch['path']}"))
    for pod in pods(group).values():
        for container in (*pod["containers"], *pod.get("initContainers", [])):
            assert container["image"] == image["name"]
            container["image"] = f"{image['newName']}:{image['newTag']}"
    return {**manifests, "LeaderWorkerSet": group}


def pods(group: dict[str, Any]) -> dict[str, dict[str, Any]]:
    template = group["spec"]["leaderWorkerTemplate"]
    return {role: template[f"{role}Template"]["spec"] for role in ("leader", "worker")}


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def group(overlay: str) -> dict[str, Any]:
    return made(overlay)["LeaderWorkerSet"]


def test_the_base_names_its_manifests() -> None:
    here = {file.name for file in (FOLDER / "base").glob("*.yaml")} - {"kustomization.yaml"}
    assert set(read("base/kustomization.yaml")["resources"]) == here


@pytest.mark.parametrize("version", ["1.29", "1.34"])
def test_kubernetes_knows_the_manifests(overlay: str, version: str) -> None:
    manifests = made(overlay)
    group = manifests.pop("LeaderWorkerSet")
    assert group["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    jsonschema.validate(group["spec"], LEADER_WORKER_SET)
    for role, spec in pods(group).items():
        metadata = {"name": role, **group["spec"]["leaderWorkerTemplate"][f"{role}Template"]["metadata"]}
        manifests[role] = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    for manifest in manifests.values():
        kubernetes_validate.validate(manifest, version, strict=True)


def args_of(container: dict[str, Any], size: int, rank: int) -> ServerArgs:
    """Of a host, with what the controller puts into its environment."""
    injected = {"LWS_GROUP_SIZE": size, "LWS_WORKER_INDEX": rank, "LWS_LEADER_ADDRESS": LEADER}
    arguments = [re.sub(r"\$\((\w+)\)", lambda match: str(injected[match[1]]), argument) for argument in container["args"]]
    return ServerArgs(**{name: value for name, value in served(arguments).items() if name != "model"})


def test_the_hosts_of_a_group_are_one_server(overlay: str, group: dict[str, Any]) -> None:
    image, resource = OVERLAYS[overlay]
    size = group["spec"]["leaderWorkerTemplate"]["size"]
    for rank, role in ((0, "leader"), (1, "worker"), (size - 1, "worker")):
        (container,) = pods(group)[role]["containers"]
        assert container["image"].endswith(f":{image}")
        args = args_of(container, size, rank)
        assert (args.nnodes, args.node_rank) == (size, rank)
        assert args.dist_init_addr.startswith(f"{LEADER}:")
        assert args.num_local_devices == container["resources"]["limits"][resource]
        secret = next(variable for variable in container["env"] if variable["name"] == "JAXSERVE_DIST_SECRET")
        assert "secretKeyRef" in secret["valueFrom"]


def test_hosts_end_and_start_together(group: dict[str, Any]) -> None:
    template = group["spec"]["leaderWorkerTemplate"]
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert group["spec"]["startupPolicy"] == "LeaderCreated"  # a leader is ready only with its workers
    (leader,) = pods(group)["leader"]["containers"]
    wait_s = int(leader["lifecycle"]["preStop"]["exec"]["command"][1])
    assert all(pod["terminationGracePeriodSeconds"] >= wait_s + DRAIN_S + READERS_S + 1 for pod in pods(group).values())


def test_only_the_leader_is_asked(overlay: str, group: dict[str, Any]) -> None:
    leader, worker = (pod["containers"][0] for pod in pods(group).values())
    probes = {"startupProbe": "/health", "readinessProbe": "/ready", "livenessProbe": "/health"}
    assert not {*probes, "ports", "lifecycle"} & worker.keys()
    (port,) = leader["ports"]
    assert port["containerPort"] == PORT
    for probe, path in probes.items():
        assert leader[probe]["httpGet"] == {"path": path, "port": port["name"]}
        assert path in PATHS
    dist_timeout_s = args_of(leader, 2, 0).dist_timeout
    startup_s = leader["startupProbe"]["periodSeconds"] * leader["startupProbe"]["failureThreshold"]
    assert startup_s >= dist_timeout_s + 1800  # as long as one host has for loading and compiling
    labels = group["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["metadata"]["labels"]
    manifests = made(overlay)
    assert manifests["Service"]["spec"]["selector"] == {**labels, "leaderworkerset.sigs.k8s.io/worker-index": "0"}
    # The controller makes a headless Service of the group's name, by which hosts find each other, if there is none yet.
    assert manifests["Service"]["metadata"]["name"] != group["metadata"]["name"]
    policy = manifests["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == labels
    assert policy["ingress"][1] == {"ports": [{"protocol": "TCP", "port": port["name"]}]}


def test_what_is_mounted_is_what_the_server_needs(overlay: str, group: dict[str, Any]) -> None:
    image, _ = OVERLAYS[overlay]
    for pod in pods(group).values():
        (container,) = pod["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert {"/tmp", last(image, "VOLUME")} <= mounts.keys()
        assert set(mounts.values()) == {volume["name"] for volume in pod["volumes"]}
        claims = {v["name"]: v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v}
        assert claims[mounts["/cache"]] == made(overlay)["PersistentVolumeClaim"]["metadata"]["name"]
    assert made(overlay)["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]  # hosts are on several nodes
