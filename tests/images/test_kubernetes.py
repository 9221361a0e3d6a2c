"""The manifests are what Kubernetes takes, and say together: one appliance a node, drained, confined, reachable."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from appliance.config import ApplianceConfig, load
from appliance.config_rules import host_problems

FOLDER = Path(__file__).parents[2] / "images" / "kubernetes"
VERSIONS = ("1.30", kubernetes_validate.latest_version())
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
DOCUMENTS: list[dict[str, Any]] = [
    document for name in KUSTOMIZATION["resources"] for document in yaml.safe_load_all((FOLDER / name).read_text())
]


def of(kind: str) -> dict[str, Any]:
    """The first document of a kind."""
    return next(document for document in DOCUMENTS if document["kind"] == kind)


SPEC = of("StatefulSet")["spec"]
POD = SPEC["template"]["spec"]
CONTAINERS = {container["name"]: container for container in (*POD["initContainers"], *POD["containers"])}


@pytest.fixture
def config(tmp_path: Path) -> ApplianceConfig:
    """The configuration in the manifests."""
    file = tmp_path / "config.yaml"
    file.write_text(of("ConfigMap")["data"]["config.yaml"])
    return load(file)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda document: f"{document['kind']}-{document['metadata']['name']}"
)
def test_a_manifest_is_of_its_schema(document: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


def test_every_file_is_listed() -> None:
    listed = {*KUSTOMIZATION["resources"], "kustomization.yaml"}
    assert listed == {path.name for path in FOLDER.glob("*.yaml")}
    assert {document["metadata"].get("namespace", "zccp") for document in DOCUMENTS} == {"zccp"}


def test_nothing_scales_by_itself() -> None:
    assert not {document["kind"] for document in DOCUMENTS} & {"HorizontalPodAutoscaler", "VerticalPodAutoscaler"}


def test_the_appliance_has_its_gpu_and_memory_for_segments(config: ApplianceConfig) -> None:
    resources = CONTAINERS["zccp"]["resources"]
    assert (
        resources["limits"]["nvidia.com/gpu"] == resources["requests"]["nvidia.com/gpu"] == str(config.engine.devices)
    )
    (shared,) = (volume["emptyDir"] for volume in POD["volumes"] if volume["name"] == "shared-memory")
    assert shared == {"medium": "Memory", "sizeLimit": "1Gi"}
    free = {"bytes": 1 << 30}
    assert host_problems(config, keys_present=True, free_bytes=lambda _: free["bytes"]) == []


def test_probes_ask_the_appliance_itself(config: ApplianceConfig) -> None:
    container = CONTAINERS["zccp"]
    assert POD["hostNetwork"] is True
    paths = {"startupProbe": "/health/ready", "readinessProbe": "/health/ready", "livenessProbe": "/health/live"}
    for probe, path in paths.items():
        assert container[probe]["httpGet"] == {"host": config.server.host, "path": path, "port": "http"}
    assert container["ports"][0]["containerPort"] == config.server.port
    assert CONTAINERS["nginx"]["ports"][0]["containerPort"] == config.proxy.port
    patience_s = container["livenessProbe"]["periodSeconds"] * container["livenessProbe"]["failureThreshold"]
    assert patience_s >= 60


def test_a_pod_has_time_to_drain(config: ApplianceConfig) -> None:
    pause_s = int(CONTAINERS["zccp"]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert POD["terminationGracePeriodSeconds"] == pause_s + config.server.drain_s + 15
    assert CONTAINERS["nginx"]["restartPolicy"] == "Always"
    assert of("PodDisruptionBudget")["spec"]["maxUnavailable"] == 1


def test_every_container_is_confined() -> None:
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert POD["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert POD["automountServiceAccountToken"] is False
    for container in CONTAINERS.values():
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["limits"]["memory"]
        assert not container["image"].endswith(":latest")


def test_paths_of_the_configuration_are_mounted(config: ApplianceConfig) -> None:
    mounted = [mount["mountPath"] for mount in CONTAINERS["zccp"]["volumeMounts"]]
    for path in (
        config.proxy.directory,
        config.proxy.body_directory,
        config.proxy.log_directory,
        config.proxy.certificate,
        config.auth.keys_file,
        config.programs.directory,
        str(config.programs.public_key),
        config.paths.home,
        config.paths.run,
    ):
        assert any(Path(path).is_relative_to(place) for place in mounted), path
    memory = {volume["name"] for volume in POD["volumes"] if volume.get("emptyDir", {}).get("medium") == "Memory"}
    assert memory == {"run", "shared-memory"}


def test_only_tls_comes_in() -> None:
    policy = of("NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["ingress"] == [{"ports": [{"protocol": "TCP", "port": 8443}]}]
    assert policy["podSelector"]["matchLabels"].items() <= SPEC["template"]["metadata"]["labels"].items()
    assert {port["port"] for rule in policy["egress"] for port in rule["ports"]} == {53}


def test_selectors_find_the_pods() -> None:
    labels = SPEC["template"]["metadata"]["labels"].items()
    services = {
        document["metadata"]["name"]: document["spec"] for document in DOCUMENTS if document["kind"] == "Service"
    }
    assert SPEC["serviceName"] in services
    for selector in (
        SPEC["selector"]["matchLabels"],
        of("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        *(spec["selector"] for spec in services.values()),
    ):
        assert selector.items() <= labels
