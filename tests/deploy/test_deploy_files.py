"""Deployment files (Compose, Kubernetes, Prometheus, Grafana), validated by their tools' rules.

docker-compose and promtool come from Debian (`make tools`); a test whose tool is absent skips. The manifests are held
against Kubernetes's schemas, which a package has, and against KubeRay's, which lie in `kuberay/`.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import ray
import yaml

from actors.coordination.reporting.metrics import _GAUGES, _POOL_GAUGES
from deploy.service.on_ray import ray_metrics

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "k8s").glob("*.yaml"))
# Under Prometheus's names.
OF_RUNS = {f"ray_d1_{name}" for name in (*_GAUGES, *_POOL_GAUGES)}
OF_SERVICE = {
    *(f"ray_d1_{name}_total" for name in ray_metrics._COUNTERS),
    *(f"ray_d1_{name}_bucket" for name in ray_metrics._HISTOGRAMS),
    *(f"ray_d1_{name}" for name in (*ray_metrics._GAUGES, *ray_metrics._ENGINE_GAUGES)),
}
_KUBERNETES = "1.31"
_PLAIN = {"Namespace", "NetworkPolicy", "PersistentVolumeClaim", "Service", "StatefulSet"}
BOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))


def _run(*words: str) -> str:
    if shutil.which(words[0]) is None:
        pytest.skip(f"needs {words[0]} (`make tools` installs docker-compose and promtool on Debian, as root)")
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _documents(path: Path) -> Iterator[dict[str, Any]]:
    yield from yaml.safe_load_all(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def clusters() -> dict[str, dict[str, Any]]:
    """The Ray clusters of the manifests, by the kind of resource that contains them."""
    (job,), (service,) = _documents(DEPLOY / "k8s/train.yaml"), _documents(DEPLOY / "k8s/serve.yaml")
    return {"RayJob": job["spec"]["rayClusterSpec"], "RayService": service["spec"]["rayClusterConfig"]}


# Compose.


def test_docker_compose_accepts_the_file() -> None:
    resolved = yaml.safe_load(_run("docker-compose", "--file", "docker-compose.yml", "config"))["services"]
    always = {name for name, service in resolved.items() if not service.get("profiles")}
    assert always == {"head", "worker", "redis", "prometheus", "grafana"}
    with_gpus = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]["gpu-worker"]
    assert with_gpus["profiles"] == ["gpu"]
    (devices,) = with_gpus["deploy"]["resources"]["reservations"]["devices"]
    assert devices == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}


def test_containers_wait_for_healthy_dependencies_and_have_few_privileges(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert service["healthcheck"]["test"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["restart"] == "unless-stopped", name
        assert all(needed["condition"] == "service_healthy" for needed in service.get("depends_on", {}).values()), name


def test_secrets_are_files_and_not_environment_variables(compose: dict[str, Any]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name, secret in compose["secrets"].items():
        assert secret == {"file": f".secrets/{name}"}
        assert name in makefile
    for service in compose["services"].values():
        for key, value in service.get("environment", {}).items():
            assert not re.search("password|token|secret", key, re.IGNORECASE) or str(value).startswith(
                ("/run/secrets/", "token")
            ), key
    assert ".secrets" in (ROOT / ".gitignore").read_text(encoding="utf-8")
    assert ".secrets" in (ROOT / ".dockerignore").read_text(encoding="utf-8")


def test_nodes_agree_on_ports_and_have_enough_shared_memory(compose: dict[str, Any]) -> None:
    names = ("head", "worker", "gpu-worker")
    head, worker, gpu_worker = (" ".join(compose["services"][name]["command"]) for name in names)
    assert "--port=6380" in head
    assert "--address=head:6380" in worker
    assert "--address=head:6380" in gpu_worker
    assert "6379" in compose["services"]["head"]["environment"]["RAY_REDIS_ADDRESS"]
    for name, command in zip(names, (head, worker, gpu_worker), strict=True):
        assert "--metrics-export-port=8080" in command
        (store_bytes,) = re.findall(r"--object-store-memory=(\d+)", command)
        shared_bytes = int(compose["services"][name]["shm_size"].removesuffix("gb")) * 2**30
        assert int(store_bytes) < shared_bytes, name
    assert yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"][0]["dns_sd_configs"] == [
        {"names": ["head", "worker", "gpu-worker"], "type": "A", "port": 8080, "refresh_interval": "15s"}
    ]


def test_mounted_files_exist(compose: dict[str, Any]) -> None:
    mounted = [volume.split(":")[0] for service in compose["services"].values() for volume in service["volumes"]]
    assert [path for path in mounted if path.startswith("./") and not (ROOT / path).exists()] == []


# Prometheus and Grafana.


def test_promtool_accepts_configuration_and_rules() -> None:
    assert "SUCCESS" in _run("promtool", "check", "config", "deploy/prometheus.yml")


def _exported() -> set[str]:
    """Return the metrics of d1, and those in Ray's own dashboards and in Serve's sources."""
    names = OF_RUNS | OF_SERVICE | {"up"}
    package = Path(ray.__file__).parent
    for path in (package / "dashboard/modules/metrics/dashboards").glob("*panels.py"):
        names |= set(re.findall(r"ray_[a-z0-9_]+", path.read_text(encoding="utf-8")))
    return names


def _expressions(board: dict[str, Any]) -> Iterator[str]:
    for panel in board["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    yield from (variable["definition"] for variable in board["templating"]["list"])


def _metrics(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:ray_[a-z0-9_]+|up)\b", expression))


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_dashboards_use_only_exported_metrics(path: Path) -> None:
    board = json.loads(path.read_text(encoding="utf-8"))
    for expression in _expressions(board):
        assert _metrics(expression), expression
        assert _metrics(expression) - _exported() == set(), expression
    sources = _documents(DEPLOY / "grafana/provisioning/datasources/prometheus.yaml")
    uids = {source["uid"] for document in sources for source in document["datasources"]}
    assert {panel["datasource"]["uid"] for panel in board["panels"]} <= uids
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


@pytest.mark.parametrize(("name", "numbers"), [("runs", OF_RUNS), ("service", OF_SERVICE)])
def test_every_metric_is_on_a_dashboard(name: str, numbers: set[str]) -> None:
    board = json.loads((DEPLOY / f"grafana/dashboards/{name}.json").read_text(encoding="utf-8"))
    assert numbers - set().union(*map(_metrics, _expressions(board))) == set()


def test_rules_use_only_exported_metrics() -> None:
    (rules,) = _documents(DEPLOY / "prometheus_rules.yml")
    for rule in rules["groups"][0]["rules"]:
        assert _metrics(rule["expr"]), rule["alert"]
        assert _metrics(rule["expr"]) - _exported() == set(), rule["alert"]


def test_prometheus_parses_every_expression_of_the_dashboards(tmp_path: Path) -> None:
    # As recording rules, since Debian's promtool cannot check a single expression. Grafana's variables are substituted.
    expressions = [
        re.sub(r"\$\w+", "x", target["expr"])
        for path in BOARDS
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]
        for target in panel["targets"]
    ]
    rules = [{"record": f"r{index}", "expr": expression} for index, expression in enumerate(expressions)]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "boards", "rules": rules}]}))
    assert f"{len(rules)} rules found" in _run("promtool", "check", "rules", str(tmp_path / "rules.yml"))


# Kubernetes.


def test_kustomize_builds_every_manifest() -> None:
    kustomization = next(_documents(DEPLOY / "k8s/kustomization.yaml"))
    assert sorted(kustomization["resources"]) == [path.name for path in MANIFESTS if path.name != "kustomization.yaml"]
    built = list(yaml.safe_load_all(_run("kubectl", "kustomize", "deploy/k8s")))
    assert {document["metadata"].get("namespace", "d1") for document in built} == {"d1"}


@pytest.mark.parametrize("kind", ["RayJob", "RayService"])
def test_clusters_require_a_token_and_pods_have_few_privileges(kind: str, clusters: dict[str, dict[str, Any]]) -> None:
    cluster = clusters[kind]
    assert cluster["authOptions"] == {"mode": "token", "secretName": "d1-ray-token"}
    assert cluster["rayVersion"] == version("ray")
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        (container,) = pod["containers"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
        (mount,) = container["volumeMounts"]
        assert mount == {"name": "runs", "mountPath": "/srv/d1/runs"}
        assert pod["volumes"] == [{"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}}]


def test_the_service_survives_a_head_restart_and_training_is_retried(clusters: dict[str, dict[str, Any]]) -> None:
    options = clusters["RayService"]["gcsFaultToleranceOptions"]
    assert options["redisAddress"] == "redis:6379"
    assert options["redisPassword"]["valueFrom"]["secretKeyRef"] == {"name": "d1-redis", "key": "password"}
    (service,) = _documents(DEPLOY / "k8s/serve.yaml")
    assert service["spec"]["excludeHeadPodFromServeSvc"]
    (job,) = _documents(DEPLOY / "k8s/train.yaml")
    assert job["spec"]["submissionMode"] == "SidecarMode"
    assert "--resume-or-start" in job["spec"]["entrypoint"]


def test_serve_uses_grpc_on_every_node(compose: dict[str, Any], clusters: dict[str, dict[str, Any]]) -> None:
    nodes = [compose["services"][name]["environment"] for name in ("head", "worker", "gpu-worker")]
    cluster = clusters["RayService"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        nodes.append({one["name"]: one.get("value") for one in container["env"]})
    assert [str(node["RAY_SERVE_USE_GRPC_BY_DEFAULT"]) for node in nodes] == ["1"] * 5


def test_gpu_pods_are_started_only_on_request(clusters: dict[str, dict[str, Any]]) -> None:
    cpu, gpu = clusters["RayJob"]["workerGroupSpecs"]
    assert (cpu["groupName"], gpu["groupName"], gpu["replicas"]) == ("cpu", "gpu", 0)
    ours, theirs = (group["template"]["spec"] for group in (gpu, cpu))
    assert ours["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert "nvidia.com/gpu" not in theirs["containers"][0]["resources"]["limits"]
    # Apart from that, and from the toleration of the GPU nodes' taint, they are alike.
    del ours["tolerations"]
    for spec in (ours, theirs):
        del spec["containers"][0]["resources"]
    assert ours == theirs


def _secrets(value: Any, key: str = "") -> Iterator[str]:
    """Yield the names of the secrets to which a manifest refers."""
    if isinstance(value, dict):
        if key == "secretKeyRef":
            yield value["name"]
        for name, inner in value.items():
            yield from _secrets(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _secrets(inner)
    elif key == "secretName":
        yield value


def test_no_manifest_holds_a_secret() -> None:
    documents = [document for path in MANIFESTS for document in _documents(path)]
    assert [document for document in documents if document["kind"] == "Secret"] == []
    names = {"d1-ray-token", "d1-redis", "d1-api"}
    assert {name for document in documents for name in _secrets(document)} == names
    guide = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    assert [name for name in names if f"create secret generic {name}" not in guide] == []


def test_every_pod_is_covered_by_a_default_deny_policy() -> None:
    policies = list(_documents(DEPLOY / "k8s/network.yaml"))
    (deny,) = [policy for policy in policies if policy["metadata"]["name"] == "deny-ingress"]
    assert deny["spec"] == {"podSelector": {}, "policyTypes": ["Ingress"]}
    for policy in policies:
        for rule in policy["spec"].get("ingress", []):
            # A rule without `from` admits everyone.
            assert rule["from"], policy["metadata"]["name"]
            # An empty namespace selector matches all namespaces, and whoever creates pods there chooses their labels.
            assert {} not in [source.get("namespaceSelector") for source in rule["from"]], policy["metadata"]["name"]


def test_the_images_code_is_not_writable_by_its_user() -> None:
    lines = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").splitlines()
    user = next(index for index, line in enumerate(lines) if line.startswith("USER "))
    owned = [line for line in lines[:user] if "chown" in line or "-o d1" in line]
    assert [line.split("d1 ")[-1].strip() for line in owned] == ["runs"]


def test_kubernetes_and_kuberay_accept_the_manifests() -> None:
    documents = [document for path in MANIFESTS for document in _documents(path)]
    assert {document["kind"] for document in documents} == {*_PLAIN, "Kustomization", "RayJob", "RayService"}
    for document in documents:
        _validate(document)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("StatefulSet", "spec.replicas", "one"),
        ("StatefulSet", "spec.template.spec.containers.0.readynessProbe", {}),
        ("PersistentVolumeClaim", "spec.storageX", "1Gi"),
        ("Service", "spec.ports.0.port", "six"),
        ("RayService", "spec.serveConfigV3", ""),
        ("RayService", "spec.rayClusterConfig.workerGroupSpecs.0.replicas", "two"),
        ("RayJob", "spec.rayClusterSpec.headGroupSpec.template.spec.containers.0.imagePullPolicy", 3),
        ("RayJob", "spec.rayClusterSpec.headGroupSpec.template.spec.nodeSelektor", {}),
    ],
)
def test_a_mistake_in_a_manifest_is_detected(kind: str, path: str, value: object) -> None:
    found = (document for file in MANIFESTS for document in _documents(file) if document["kind"] == kind)
    document: Any = next(found)
    *parents, last = path.split(".")
    place = document
    for name in parents:
        place = place[int(name) if name.isdigit() else name]
    place[last] = value
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        _validate(document)


def _validate(document: dict[str, Any]) -> None:
    """Raise if the API server, with KubeRay's definitions, would refuse it."""
    if document["kind"] in _PLAIN:
        kubernetes_validate.validate(document, _KUBERNETES, strict=True)
    elif document["kind"] in ("RayJob", "RayService"):
        schema = json.loads((Path(__file__).parent / "kuberay" / f"{document['kind']}.json").read_text())
        jsonschema.Draft7Validator(_strict(schema)).validate(document)
        cluster = document["spec"].get("rayClusterSpec") or document["spec"]["rayClusterConfig"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            pods = {"apiVersion": "v1", "kind": "PodTemplate", "template": group["template"]}
            kubernetes_validate.validate(pods, _KUBERNETES, strict=True)


def _strict(schema: Any) -> Any:
    """Return the schema under the API server's strict field validation, which refuses unknown fields."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {name: _strict(each) for name, each in schema.items()}
    if strict.pop("x-kubernetes-int-or-string", False):
        strict["type"] = ["integer", "string"]
    if isinstance(strict.get("properties"), dict) and len(strict["properties"]) and strict.get("type") == "object":
        is_open = strict.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in strict
        strict |= {} if is_open else {"additionalProperties": False}
    return strict


# Ray Serve.


@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning")  # Ray Serve's schema
def test_ray_serve_accepts_its_files() -> None:
    from ray.serve.schema import ServeDeploySchema

    from deploy.service.on_ray.builder import Arguments

    (service,) = _documents(DEPLOY / "k8s/serve.yaml")
    texts = ((DEPLOY / "serve.yaml").read_text(encoding="utf-8"), service["spec"]["serveConfigV2"])
    configs = [ServeDeploySchema.model_validate(yaml.safe_load(text)) for text in texts]
    assert [config.proxy_location for config in configs] == ["HeadOnly", "EveryNode"]
    (local,), (published,) = (config.applications for config in configs)
    given = [Arguments(**application.args) for application in (local, published)]
    assert [arguments.host for arguments in given] == ["127.0.0.1", "0.0.0.0"]
    # The application checks the keys that the proxies' address needs.
    listens_on = [(config.http_options.host, config.http_options.port) for config in configs]
    assert listens_on == [(arguments.host, arguments.port) for arguments in given]
    assert published.model_copy(update={"args": local.args}) == local
