"""deploy/helm: what helm made of the examples (tests/deploy/rendered) is valid, right, and what kustomize makes."""

from __future__ import annotations

import copy
import json
import pathlib
import re
import shutil
import tomllib
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from test_deploy import DEPLOY, DRAIN_S, PATHS, PORT, READERS_S, ROOT, last, manifest, served
from test_multihost import LEADER, LEADER_WORKER_SET, made

from jaxserve.config.args import ALIASES
from jaxserve.metrics import FAMILIES, PREFIX
from scripts.render_chart import CHART, DIGEST, EXAMPLES, RENDERED, release, rendered, sources_digest

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())
CUSTOM = {"LeaderWorkerSet", "ServiceMonitor", "InferencePool", "HTTPRoute"}
SAME = {"gpu": None, "multihost-gpu": "gpu", "multihost-tpu": "tpu"}  # of examples the kustomize overlay
IMAGES = {"gpu": "cuda", "tpu": "tpu", "none": "cpu"}


def with_defaults(values: dict[str, Any], defaults: dict[str, Any] = DEFAULTS) -> dict[str, Any]:
    """As helm lays values over the chart's."""
    merged = copy.deepcopy(defaults)
    for name, value in values.items():
        known = merged.get(name)
        merged[name] = with_defaults(value, known) if isinstance(value, dict) and isinstance(known, dict) else value
    return merged


def values_of(example: str) -> dict[str, Any]:
    return with_defaults(yaml.safe_load((CHART / "examples" / f"{example}.yaml").read_text()))


def manifests(example: str) -> dict[str, dict[str, Any]]:
    """By kind."""
    documents = [document for document in yaml.safe_load_all((RENDERED / f"{example}.yaml").read_text()) if document]
    by_kind = {document["kind"]: document for document in documents}
    assert len(by_kind) == len(documents)
    return by_kind


def workload_pods(made_of: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Templates of pods by role."""
    if "LeaderWorkerSet" not in made_of:
        return {"server": made_of["Deployment"]["spec"]["template"]}
    template = made_of["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    return {role: template[f"{role}Template"] for role in ("leader", "worker")}


def options_of(container: dict[str, Any], made_of: dict[str, dict[str, Any]], folder: pathlib.Path) -> dict[str, Any]:
    """What `jaxserve serve` makes of a container's arguments, in which its file of options is that of the ConfigMap."""
    (folder / "server.yaml").write_text(made_of["ConfigMap"]["data"]["server.yaml"])
    injected = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "0", "LWS_LEADER_ADDRESS": LEADER}
    arguments = [re.sub(r"\$\((\w+)\)", lambda match: injected[match[1]], one) for one in container["args"]]
    return served([one.replace("/etc/jaxserve/", f"{folder}/") for one in arguments])


@pytest.fixture(params=EXAMPLES)
def example(request: pytest.FixtureRequest) -> str:
    return request.param


def test_what_is_rendered_is_of_these_sources() -> None:
    assert {file.stem for file in RENDERED.glob("*.yaml")} == set(EXAMPLES)
    assert DIGEST.read_text().strip() == sources_digest(), "run, with helm on the PATH: python scripts/render_chart.py"


def test_helm_still_says_the_same() -> None:
    helm = shutil.which("helm")
    if helm is None:
        pytest.skip("helm is not installed")
    for one in EXAMPLES:
        assert rendered(helm, one) == (RENDERED / f"{one}.yaml").read_text()


def test_the_chart_is_of_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == project["version"]


def test_values_follow_the_schema(example: str) -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(values_of(example), SCHEMA)
    assert DEFAULTS["options"] == {}, "helm would add them to those of others"
    jsonschema.validate(with_defaults({"options": {"model-path": "demo"}}), SCHEMA)


def test_every_value_is_described() -> None:
    """The schema knows the values of the chart, and no others."""

    def compare(schema: dict[str, Any], values: dict[str, Any], path: str) -> None:
        if "properties" in schema and "propertyNames" not in schema:
            assert schema["properties"].keys() - {"global", "requests", "limits"} == values.keys(), path
            for name, value in values.items():
                if isinstance(value, dict):
                    compare(schema["properties"][name], value, f"{path}.{name}")

    compare(SCHEMA, DEFAULTS, "values")


@pytest.mark.parametrize(
    "wrong",
    [
        {"replica": 2},
        {"hosts": 0},
        {"options": {}},
        {"accelerator": {"kind": "npu"}},
        *({"options": {"model-path": "demo", name: "1"}} for name in ("port", "host", "nnodes", "tp", "model", "tp_size")),
    ],
)
def test_the_schema_refuses(wrong: dict[str, Any]) -> None:
    values = {**DEFAULTS, "options": {"model-path": "demo"}, **wrong}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values, SCHEMA)


def test_what_the_chart_sets_has_no_second_name() -> None:
    refused = set(SCHEMA["properties"]["options"]["propertyNames"]["not"]["enum"])
    for alias, field in ALIASES.items():
        if field in ("model_path", "tp_size", "dp_size"):
            assert alias.replace("_", "-") in refused


@pytest.mark.parametrize("version", ["1.29", "1.34", "1.37"])
def test_kubernetes_knows_the_manifests(example: str, version: str) -> None:
    made_of = manifests(example)
    for kind, document in made_of.items():
        if kind not in CUSTOM:
            kubernetes_validate.validate(document, version, strict=True)
    if "LeaderWorkerSet" in made_of:
        jsonschema.validate(made_of["LeaderWorkerSet"]["spec"], LEADER_WORKER_SET)
    for role, template in workload_pods(made_of).items():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": role, **template["metadata"]}, "spec": template["spec"]}
        kubernetes_validate.validate(pod, version, strict=True)


def test_pods_are_what_the_server_is(example: str, tmp_path: pathlib.Path) -> None:
    values, made_of = values_of(example), manifests(example)
    image = IMAGES[values["accelerator"]["kind"]]
    for role, template in workload_pods(made_of).items():
        pod = template["spec"]
        (container,) = pod["containers"]
        options = options_of(container, made_of, tmp_path)
        assert options["model_path"] == values["options"]["model-path"]
        drain_s = options.get("shutdown_timeout_s", DRAIN_S)
        assert pod["terminationGracePeriodSeconds"] >= 5 + drain_s + READERS_S + 1
        assert container["image"].endswith(f":{image}")
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert {"/tmp", "/etc/jaxserve", last(image, "VOLUME")} <= mounts.keys()
        assert set(mounts.values()) == {volume["name"] for volume in pod["volumes"]}
        assert ("/models" in mounts) == options["model_path"].startswith("/models/")
        if values["accelerator"]["kind"] != "none":
            (devices,) = container["resources"]["limits"].values()
            assert options["tp_size"] == devices * values["hosts"]
        if role == "worker":
            assert not {"ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle"} & container.keys()
            continue
        assert container["ports"] == [{"name": "http", "containerPort": PORT}]
        for probe, path in (("startupProbe", "/health"), ("readinessProbe", "/ready"), ("livenessProbe", "/health")):
            assert container[probe]["httpGet"] == {"path": path, "port": "http"} and path in PATHS
        assert container["lifecycle"]["preStop"] == {"exec": {"command": ["sleep", "5"]}}
        startup_s = container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"]
        assert startup_s >= values["startupSeconds"] + (options["dist_timeout"] if role == "leader" else 0)


def test_pods_start_anew_when_options_or_keys_change() -> None:
    """Checksums differ where options do; without a Secret of one's own, keys have one, too."""
    by_options: dict[str, set[str]] = {}
    for one in EXAMPLES:
        made_of = manifests(one)
        for template in workload_pods(made_of).values():
            sums = template["metadata"]["annotations"]
            by_options.setdefault(made_of["ConfigMap"]["data"]["server.yaml"], set()).add(sums["checksum/options"])
            assert ("checksum/secret" in sums) == ("Secret" in made_of) == (one == "cpu-demo")
    assert all(len(sums) == 1 for sums in by_options.values())
    assert len(set.union(*by_options.values())) == len(by_options) > 4


def test_who_finds_whom(example: str) -> None:
    values, made_of = values_of(example), manifests(example)
    labels = workload_pods(made_of).popitem()[1]["metadata"]["labels"]
    serving = labels | ({"leaderworkerset.sigs.k8s.io/worker-index": "0"} if values["hosts"] > 1 else {})
    service = made_of["Service"]
    assert service["spec"]["selector"] == serving and service["metadata"]["name"] == release(example)
    if values["hosts"] > 1:  # the controller makes a headless Service of the group's name, if there is none
        assert made_of["LeaderWorkerSet"]["metadata"]["name"] != service["metadata"]["name"]
    assert ("NetworkPolicy" in made_of) == ("LeaderWorkerSet" in made_of) == (values["hosts"] > 1)
    claims = {v["persistentVolumeClaim"]["claimName"] for v in _volumes(made_of) if "persistentVolumeClaim" in v}
    assert made_of["PersistentVolumeClaim"]["metadata"]["name"] in claims
    shared = values["hosts"] > 1 or values["autoscaling"]["enabled"]
    assert made_of["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany" if shared else "ReadWriteOnce"]


def _volumes(made_of: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [volume for template in workload_pods(made_of).values() for volume in template["spec"]["volumes"]]


def test_what_may_stand_beside_the_server() -> None:
    made_of = manifests("gpu-replicas")
    labels = made_of["Deployment"]["spec"]["template"]["metadata"]["labels"]
    monitor = made_of["ServiceMonitor"]["spec"]
    assert monitor["selector"]["matchLabels"].items() <= made_of["Service"]["metadata"]["labels"].items()
    assert [(one["port"], one["path"]) for one in monitor["endpoints"]] == [("http", "/metrics")]
    assert made_of["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    pool = made_of["InferencePool"]["spec"]
    assert pool["selector"]["matchLabels"] == labels and pool["targetPorts"] == [{"number": PORT}]
    (rule,) = made_of["HTTPRoute"]["spec"]["rules"]
    assert [(one["kind"], one["name"]) for one in rule["backendRefs"]] == [
        ("InferencePool", made_of["InferencePool"]["metadata"]["name"])
    ]
    scaler = made_of["HorizontalPodAutoscaler"]["spec"]
    assert scaler["scaleTargetRef"] == {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "name": made_of["Deployment"]["metadata"]["name"],
    }
    assert "replicas" not in made_of["Deployment"]["spec"]  # the autoscaler's


def test_the_autoscaler_counts_what_the_adapter_brings() -> None:
    (rule,) = yaml.safe_load((DEPLOY / "prometheus" / "adapter.yml").read_text())["rules"]["custom"]
    (series,) = re.findall(rf"{PREFIX}(\w+)", rule["seriesQuery"])
    assert FAMILIES[series].kind == "gauge" and not FAMILIES[series].labels and FAMILIES[series].source == "main"
    (metric,) = manifests("gpu-replicas")["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"] == DEFAULTS["autoscaling"]["metric"]


# --- the same with kustomize


def test_kustomize_makes_the_same(tmp_path: pathlib.Path) -> None:
    for one, overlay in SAME.items():
        if overlay is None:
            names = ("deployment", "service", "cache")
            by_kustomize = {document["kind"]: document for document in map(manifest, names)}
        else:
            by_kustomize = made(overlay)
        by_helm = manifests(one)
        assert by_kustomize.keys() == by_helm.keys() - {"ConfigMap"}
        for kind, document in by_kustomize.items():
            assert _plain(by_helm[kind], by_helm, tmp_path) == _plain(document, by_helm, tmp_path), f"{one}: {kind}"


def _plain(document: dict[str, Any], made_of: dict[str, dict[str, Any]], folder: pathlib.Path) -> dict[str, Any]:
    """Without what only helm needs, and with options as the server reads them in place of arguments."""
    document = json.loads(json.dumps(document))
    for name in ("app.kubernetes.io/managed-by", "helm.sh/chart"):
        document["metadata"].get("labels", {}).pop(name, None)
    if document["kind"] == "NetworkPolicy":
        document["metadata"].pop("labels", None)
    _drop(document["metadata"], "annotations", "helm.sh/resource-policy")
    if document["kind"] == "Service":
        assert document["spec"].pop("type", "ClusterIP") == "ClusterIP"
    for template in workload_pods({document["kind"]: document}).values() if "template" in str(document["spec"]).lower() else ():
        _drop(template["metadata"], "annotations", "checksum/options")
        spec = template["spec"]
        spec["volumes"] = sorted((v for v in spec["volumes"] if v["name"] != "options"), key=lambda v: v["name"])
        for container in (*spec["containers"], *spec.get("initContainers", [])):
            assert container.pop("imagePullPolicy", "IfNotPresent") == "IfNotPresent"
            if "args" in container:
                container["args"] = options_of(container, made_of, folder)
            mounts = [mount for mount in container.get("volumeMounts", []) if mount["name"] != "options"]
            container["volumeMounts"] = sorted(mounts, key=lambda mount: mount["name"])
    return document


def _drop(metadata: dict[str, Any], name: str, key: str) -> None:
    metadata.get(name, {}).pop(key, None)
    if not metadata.get(name, True):
        del metadata[name]
