"""deploy/: linters and schemas accept every file, and what they say of the server (options, paths, ports, times) is so."""

from __future__ import annotations

import functools
import http.server
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import kubernetes_validate
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema
from jsonschema import Draft7Validator
from packaging.requirements import Requirement

from jaxserve.cli.main import cli
from jaxserve.cli.serve import serve
from jaxserve.config import ServerArgs
from jaxserve.server.http.app import create_app

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
IMAGES = ("cpu", "cuda", "tpu")
READERS_S = 5  # replies that are still read after the drain
PORT = ServerArgs(model_path="model").port
DRAIN_S = ServerArgs(model_path="model").shutdown_timeout_s
PATHS = {*create_app(mock.Mock(), ServerArgs(model_path="model")).openapi()["paths"], "/metrics"}


def served(arguments: list[str]) -> ServerArgs | dict[str, Any]:
    """What `jaxserve serve` makes of them: an unknown option is an error."""
    # Below the group, as in life: a command keeps the spellings of --help that it is first asked with.
    group = cli.make_context("jaxserve", ["serve"])
    return serve.make_context("serve", list(arguments), parent=group).params


def text(name: str) -> str:
    return (DEPLOY / name).read_text()


# --- Dockerfiles


def instructions(image: str) -> list[tuple[str, str]]:
    joined = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text(f"Dockerfile.{image}"), flags=re.MULTILINE))
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line.strip())]


def last(image: str, word: str) -> str:
    return [rest for name, rest in instructions(image) if name == word][-1]


def as_list(rest: str) -> list[str]:
    return yaml.safe_load(rest[rest.index("[") :])


@pytest.mark.parametrize("image", IMAGES)
def test_hadolint_accepts_the_dockerfile(image: str) -> None:
    hadolint = shutil.which("hadolint", path=str(pathlib.Path(sys.executable).parent)) or "hadolint"
    said = subprocess.run([hadolint, str(DEPLOY / f"Dockerfile.{image}")], capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stdout


@pytest.mark.parametrize("image", IMAGES)
def test_the_image_is_pinned_and_without_root(image: str) -> None:
    words = [word for word, _ in instructions(image)]
    assert re.fullmatch(r"python:3\.\d+-slim-\w+", last(image, "FROM"))
    assert last(image, "USER") == "1000"
    assert words.index("USER") > max(place for place, word in enumerate(words) if word == "RUN")
    assert last(image, "VOLUME") == "/cache"
    assert "XDG_CACHE_HOME=/cache" in last(image, "ENV")
    assert last(image, "EXPOSE") == str(PORT)
    served([*as_list(last(image, "ENTRYPOINT"))[2:], *as_list(last(image, "CMD"))])


@pytest.mark.parametrize("image", IMAGES)
def test_what_is_copied_is_there_and_not_ignored(image: str) -> None:
    sources = {source for word, rest in instructions(image) if word == "COPY" for source in rest.split()[:-1]}
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert sources == kept
    assert all((ROOT / source).exists() for source in sources)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {project["readme"], *project["license-files"]} <= sources  # setuptools reads them


@pytest.mark.parametrize("image", IMAGES)
def test_the_layer_of_dependencies_is_that_of_pyproject(image: str, tmp_path: pathlib.Path) -> None:
    """The very command of the layer."""
    (command,) = [rest for word, rest in instructions(image) if word == "RUN" and "tomllib" in rest]
    program = shlex.split(command.split(" > ")[0])
    program = [sys.executable, "-c", program[2].replace("/src/", f"{ROOT}/")]
    printed = subprocess.run(program, capture_output=True, text=True, check=True).stdout.splitlines()
    named = {Requirement(line).name for line in printed}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"].get(image, [])
    assert bool(extra) == (image != "cpu")
    assert named == {Requirement(line).name for line in [*project["dependencies"], *extra]}


class Health(http.server.BaseHTTPRequestHandler):
    def __init__(self, status: int, *args: Any) -> None:
        self._status = status
        super().__init__(*args)

    def do_GET(self) -> None:
        self.send_response(self._status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(params=[200, 503])
def health(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """A server whose /health has this status, and its port."""
    with http.server.HTTPServer(("127.0.0.1", 0), functools.partial(Health, request.param)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield request.param, server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("image", IMAGES)
def test_the_health_check_is_health(image: str, health: tuple[int, int]) -> None:
    status, port = health
    _, program, code = as_list(last(image, "HEALTHCHECK"))
    assert f":{PORT}/health" in code
    command = [sys.executable, program, code.replace(f":{PORT}/", f":{port}/")]
    assert (subprocess.run(command, capture_output=True, check=False).returncode == 0) == (status == 200)


# --- systemd


def unit() -> dict[str, str]:
    return dict(line.split("=", 1) for line in text("jaxserve.service").splitlines() if re.match(r"[A-Z]\w+=", line))


def test_the_unit_gives_the_drain_its_time() -> None:
    settings = unit()
    assert int(settings["TimeoutStopSec"]) >= DRAIN_S + READERS_S + 1
    assert settings["Type"] == "exec"  # nobody sends READY=1
    assert settings["KillMode"] == "mixed"
    assert "XDG_CACHE_HOME=%C" in settings["Environment"].split()
    assert settings["CacheDirectory"] == "jaxserve"  # what jaxserve calls its folder there
    for hardening in ("DynamicUser", "NoNewPrivileges", "PrivateTmp"):
        assert settings[hardening] == "yes"
    assert settings["ProtectSystem"] == "strict"


def test_the_unit_serves_what_its_file_says(tmp_path: pathlib.Path) -> None:
    program, command, *arguments = unit()["ExecStart"].split()
    assert (pathlib.PurePath(program).name, command) == ("jaxserve", "serve")
    options = served([str(DEPLOY / "server.yaml") if a == "/etc/jaxserve/server.yaml" else a for a in arguments])
    assert options["port"] == PORT


@pytest.mark.parametrize("with_accelerator", [False, True])
def test_systemd_accepts_the_unit(with_accelerator: bool, tmp_path: pathlib.Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd is not installed")
    program = unit()["ExecStart"].split()[0]
    here = tmp_path / "jaxserve.service"
    here.write_text(text("jaxserve.service").replace(program, sys.executable))
    if with_accelerator:
        (tmp_path / "jaxserve.service.d").mkdir()
        shutil.copy(DEPLOY / "accelerator.conf", tmp_path / "jaxserve.service.d")
    verified = subprocess.run([analyze, "verify", "--man=no", str(here)], capture_output=True, text=True, check=False)
    assert (verified.returncode, verified.stderr) == (0, "")
    rated = subprocess.run(
        [analyze, "security", "--offline=true", "--threshold=25", str(here)], capture_output=True, text=True, check=False
    )
    if not with_accelerator:
        assert rated.returncode == 0, rated.stdout.splitlines()[-1]


# --- compose


def compose(name: str) -> dict[str, Any]:
    return yaml.safe_load(text(name))


@pytest.mark.parametrize("name", ["compose.yaml", "compose.cuda.yaml"])
def test_the_compose_file_follows_its_schema(name: str) -> None:
    faults = list(Draft7Validator(get_builtin_schema("vendor.compose-spec")).iter_errors(compose(name)))
    assert not faults, faults[0].message
    for service in compose(name)["services"].values():
        if "build" in service:
            assert (DEPLOY / service["build"]["context"]).resolve() == ROOT
            assert (ROOT / service["build"]["dockerfile"]).is_file()


def test_the_services_of_compose_find_each_other_and_nobody_else() -> None:
    stack = compose("compose.yaml")
    for service in stack["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert re.fullmatch(r"[\w/.-]+:[\w.-]+", service["image"])
        for source, *_ in (volume.split(":") for volume in service["volumes"]):
            assert source in stack["volumes"] or (DEPLOY / source).exists(), source
    server = stack["services"]["jaxserve"]
    assert int(server["stop_grace_period"].removesuffix("s")) >= DRAIN_S + READERS_S + 1
    served([re.sub(r"\$\{\w+:-(\w+)\}", r"\1", argument) for argument in server["command"]])
    scraped = compose("prometheus/compose.yml")
    (job,) = scraped["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"jaxserve:{PORT}"]}]
    assert job["metrics_path"] in PATHS
    assert "--config.file=/etc/prometheus/compose.yml" in stack["services"]["prometheus"]["command"]
    job["static_configs"] = compose("prometheus/prometheus.yml")["scrape_configs"][0]["static_configs"]
    assert scraped == compose("prometheus/prometheus.yml")  # but for the server's name
    (source,) = compose("grafana/provisioning/datasources/prometheus.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = compose("grafana/provisioning/dashboards/jaxserve.yml")["providers"]
    assert any(f":{provider['options']['path']}/" in volume for volume in stack["services"]["grafana"]["volumes"])


def test_prometheus_accepts_its_configuration() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("prometheus is not installed")
    for name in ("prometheus.yml", "compose.yml"):
        command = [promtool, "check", "config", str(DEPLOY / "prometheus" / name)]
        checked = subprocess.run(command, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stderr


# --- Kubernetes


def manifest(name: str) -> dict[str, Any]:
    return yaml.safe_load(text(f"kubernetes/{name}.yaml"))


@pytest.mark.parametrize("version", ["1.29", "1.34"])
@pytest.mark.parametrize("name", ["deployment", "service", "cache"])
def test_kubernetes_knows_the_manifest(name: str, version: str) -> None:
    kubernetes_validate.validate(manifest(name), version, strict=True)


def test_every_manifest_is_named_by_the_kustomization() -> None:
    here = {file.name for file in (DEPLOY / "kubernetes").glob("*.yaml")} - {"kustomization.yaml"}
    assert set(re.findall(r"\w+\.yaml", text("kubernetes/kustomization.yaml").split("resources:")[1])) == here


def test_the_pod_is_what_the_server_is() -> None:
    pod = manifest("deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    options = served(container["args"])
    assert options["model_path"].startswith(next(v["mountPath"] for v in container["volumeMounts"] if v["name"] == "models"))
    (port,) = container["ports"]
    assert port["containerPort"] == PORT
    for probe, path in (("startupProbe", "/health"), ("readinessProbe", "/ready"), ("livenessProbe", "/health")):
        assert container[probe]["httpGet"] == {"path": path, "port": port["name"]}
        assert path in PATHS
    wait_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= wait_s + DRAIN_S + READERS_S + 1
    assert pod["securityContext"]["runAsUser"] == int(last("cuda", "USER"))
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {"/tmp", last("cuda", "VOLUME")} <= mounts  # what a read-only root leaves to write
    claims = {v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v}
    assert manifest("cache")["metadata"]["name"] in claims


def test_service_and_monitor_select_the_pod() -> None:
    pod = manifest("deployment")["spec"]["template"]
    service = manifest("service")
    assert service["spec"]["selector"] == pod["metadata"]["labels"]
    (port,) = service["spec"]["ports"]
    monitor = manifest("servicemonitor")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] == port["name"]
    assert endpoint["path"] in PATHS
