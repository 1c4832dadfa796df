"""What compose/ ships is valid by the real schemas, and says what the programs understand."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from draft_service.config import DraftSettings
from draftwire.settings import ServiceSettings
from target_service.config import TargetSettings

COMPOSE = Path(__file__).resolve().parents[2] / "compose"
ROOT = COMPOSE.parent
PROGRAMS: dict[str, type[ServiceSettings]] = {"target_service": TargetSettings, "draft_service": DraftSettings}
# Read by the client and by the health check, which are no services.
OF_OTHERS = {"DRAFTWIRE_TLS_SERVER_NAME"}
LEAVE_S = 5 + 2
"""After the drain: how long a stuck computation is waited for, and what the end takes."""


def interpolated(model: Any, env: Mapping[str, str] | None = None) -> Any:
    """${NAME:-default} in every text, as compose does it. KeyError for a variable that has neither."""

    def value(found: re.Match[str]) -> str:
        name, colon, default = found[1].partition(":-")
        given = (env or {}).get(name, "")
        if not given and not colon:
            raise KeyError(name)
        return given or default

    if isinstance(model, dict):
        return {key: interpolated(part, env) for key, part in model.items()}
    if isinstance(model, list):
        return [interpolated(part, env) for part in model]
    return re.sub(r"\$\{([^}]+)\}", value, model) if isinstance(model, str) else model


def merged(one: Any, two: Any) -> Any:
    """Mappings by key, lists one after the other: how a second compose file is laid over the first."""
    if isinstance(one, dict) and isinstance(two, dict):
        return {
            key: merged(one[key], two[key]) if key in one and key in two else {**one, **two}[key]
            for key in {**one, **two}
        }
    return [*one, *two] if isinstance(one, list) and isinstance(two, list) else two


def compose(*files: str) -> dict[str, Any]:
    """The model of compose files, merged."""
    model: dict[str, Any] = {}
    for file in files or ("compose.yaml",):
        model = merged(model, interpolated(yaml.safe_load((COMPOSE / file).read_text(encoding="utf-8"))))
    return model


def patched(one: Any, two: Any) -> Any:
    """A strategic merge: lists of things with a name (or mount path) are merged by it."""
    if isinstance(one, dict) and isinstance(two, dict):
        return {
            key: patched(one[key], two[key]) if key in one and key in two else {**one, **two}[key]
            for key in {**one, **two}
        }
    if isinstance(one, list) and isinstance(two, list) and all(isinstance(item, dict) for item in [*one, *two]):
        key = "mountPath" if any("mountPath" in item for item in two) else "name"
        found = {item[key]: item for item in one}
        for item in two:
            found[item[key]] = patched(found[item[key]], item) if item[key] in found else item
        return list(found.values())
    return two


def documents(*files: str) -> list[dict[str, Any]]:
    return [
        document
        for file in files
        for document in yaml.safe_load_all((COMPOSE / "kubernetes" / file).read_text(encoding="utf-8"))
    ]


PLAIN = documents("target.yaml", "draft.yaml")
PATCHES = {patch["metadata"]["name"]: patch for patch in documents("tls-patch.yaml")}
SECURE = [
    patched(document, PATCHES[document["metadata"]["name"]])
    for document in PLAIN
    if document["kind"] == "Deployment" and document["metadata"]["name"] in PATCHES
]


def name_of(document: dict[str, Any]) -> str:
    return f"{document['kind']}-{document['metadata']['name']}"


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    return {document["metadata"]["name"]: document for document in PLAIN if document["kind"] == kind}


def seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+)s", text)
    assert found, text
    return float(found[1])


class TestSchemas:
    @pytest.mark.parametrize("files", [("compose.yaml",), ("compose.yaml", "tls.yaml")], ids="+".join)
    def test_compose_files_fit_the_compose_specification(self, files: tuple[str, ...]) -> None:
        package = importlib.util.find_spec("check_jsonschema")
        assert package is not None
        assert package.submodule_search_locations
        schemas = Path(package.submodule_search_locations[0]) / "builtin_schemas" / "vendor"
        schema = json.loads((schemas / "compose-spec.json").read_text(encoding="utf-8"))
        check = jsonschema.validators.validator_for(schema)(schema)
        assert [error.message for error in check.iter_errors(compose(*files))] == []
        broken = compose(*files)
        broken["services"]["draft"]["stop_grace_perod"] = "5s"
        assert list(check.iter_errors(broken)), "a slip would be found"

    @pytest.mark.parametrize("document", [*PLAIN, *SECURE], ids=name_of)
    def test_manifests_fit_kubernetes(self, document: dict[str, Any]) -> None:
        kubernetes_validate.validate(document, "1.37", strict=True)
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(
                {**document, "spec": {**document.get("spec", {}), "slip": 1}, "slip": 1}, "1.37", True
            )

    def test_there_is_one_of_each_kind(self) -> None:
        assert len(SECURE) == len(PATCHES) == 2
        kinds = {name_of(document) for document in PLAIN}
        assert kinds >= {
            f"{kind}-{name}"
            for kind in ("Deployment", "Service", "PodDisruptionBudget")
            for name in ("target", "draft")
        }
        assert kinds >= {"HorizontalPodAutoscaler-draft", "NetworkPolicy-draft"}


def told() -> Iterator[Any]:
    """(name, command, environment) of all that runs a service, plain and secured."""
    for label, model in (("compose", compose()), ("compose-tls", compose("compose.yaml", "tls.yaml"))):
        for name in ("target", "draft"):
            service = model["services"][name]
            yield pytest.param(service["command"], service["environment"], id=f"{label}-{name}")
    for label, found in (("kubernetes", PLAIN), ("kubernetes-tls", SECURE)):
        for document in found:
            if document["kind"] == "Deployment":
                (container,) = document["spec"]["template"]["spec"]["containers"]
                env = {entry["name"]: entry["value"] for entry in container["env"]}
                yield pytest.param(container["command"], env, id=f"{label}-{container['name']}")


@pytest.mark.parametrize(("command", "env"), list(told()))
def test_services_understand_what_they_are_told(
    command: list[str], env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every variable is a setting of the program that the command runs, with a value that it takes."""
    python, dash, program, *flags = command
    assert (python, dash, flags) == ("python", "-m", [])
    known = {f"DRAFTWIRE_{name.upper()}" for name in PROGRAMS[program].model_fields} | OF_OTHERS
    assert {name for name in env if name.startswith("DRAFTWIRE_")} <= known
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    settings = PROGRAMS[program](_cli_parse_args=False)  # type: ignore[call-arg]
    assert settings.host == "0.0.0.0"
    assert settings.log_format == "json"


class TestCompose:
    @pytest.mark.parametrize("name", ["target", "draft", "models"])
    def test_our_containers_are_locked(self, name: str) -> None:
        service = compose()["services"][name]
        assert service["read_only"] is True
        assert service["user"] == "10001:10001"
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        (mount,) = service["tmpfs"]
        assert mount.startswith("/tmp:exec"), "mlx loads what it has compiled there"

    def test_drafters_scale_by_their_name_and_nobody_else_reaches_them(self) -> None:
        model = compose()
        draft, target = model["services"]["draft"], model["services"]["target"]
        assert not {"container_name", "ports"} & set(draft)
        assert target["environment"]["DRAFTWIRE_DRAFTER"] == f"dns:///draft:{draft['environment']['DRAFTWIRE_PORT']}"
        assert draft["networks"] == ["inside"]
        assert model["networks"]["inside"]["internal"] is True
        assert all(
            port.startswith("127.0.0.1:") for service in model["services"].values() for port in service.get("ports", ())
        )

    @pytest.mark.parametrize("name", ["target", "draft"])
    def test_a_container_has_the_time_to_drain_and_a_check_of_its_own_program(self, name: str) -> None:
        service = compose()["services"][name]
        drain_s = float(service["environment"]["DRAFTWIRE_DRAIN_S"])
        assert seconds(service["stop_grace_period"]) >= drain_s + LEAVE_S
        assert service["healthcheck"]["test"] == ["CMD", *service["command"], "healthcheck"]
        assert service["depends_on"] == {"models": {"condition": "service_completed_successfully"}}

    def test_metrics_are_a_profile(self) -> None:
        services = compose()["services"]
        assert {name for name, service in services.items() if "profiles" in service} == {"prometheus", "grafana"}

    @pytest.mark.parametrize("files", [("compose.yaml",), ("compose.yaml", "tls.yaml")], ids="+".join)
    def test_volumes_and_secrets_that_are_named_are_declared(self, files: tuple[str, ...]) -> None:
        model = compose(*files)
        for service in model["services"].values():
            for mount in service.get("volumes", ()):
                source = mount.split(":")[0]
                if source.startswith("."):
                    assert (COMPOSE / source).exists(), source
                else:
                    assert source in model["volumes"]
            for secret in service.get("secrets", ()):
                assert secret in model["secrets"]
                assert f"/run/secrets/{secret}" in service["environment"].values()


class TestKubernetes:
    @pytest.mark.parametrize("name", ["target", "draft"])
    def test_pods_are_locked(self, name: str) -> None:
        pod = of_kind("Deployment")[name]["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        for container in [*pod["containers"], *pod.get("initContainers", ())]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}

    @pytest.mark.parametrize("name", ["target", "draft"])
    def test_a_pod_has_the_time_to_drain_and_probes_of_its_own_program(self, name: str) -> None:
        pod = of_kind("Deployment")[name]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        env = {entry["name"]: entry["value"] for entry in container["env"]}
        before_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert pod["terminationGracePeriodSeconds"] >= before_s + float(env["DRAFTWIRE_DRAIN_S"]) + LEAVE_S
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["exec"]["command"] == [*container["command"], "healthcheck"]
        alive_s = container["livenessProbe"]["periodSeconds"] * container["livenessProbe"]["failureThreshold"]
        assert alive_s > PROGRAMS[f"{name}_service"].model_fields["watchdog_s"].default, "the watchdog speaks first"

    def test_the_drafters_name_has_an_address_for_each_pod(self) -> None:
        service = of_kind("Service")["draft"]["spec"]
        assert service["clusterIP"] == "None"
        pod = of_kind("Deployment")["draft"]["spec"]["template"]
        assert service["selector"].items() <= pod["metadata"]["labels"].items()
        (target,) = of_kind("Deployment")["target"]["spec"]["template"]["spec"]["containers"]
        drafter = next(entry["value"] for entry in target["env"] if entry["name"] == "DRAFTWIRE_DRAFTER")
        assert drafter == f"dns:///draft:{service['ports'][0]['port']}"

    def test_drafters_are_scaled_by_their_queue_and_by_nothing_else(self) -> None:
        scaler = of_kind("HorizontalPodAutoscaler")["draft"]["spec"]
        assert scaler["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "draft"}
        assert [metric["pods"]["metric"]["name"] for metric in scaler["metrics"]] == ["draftwire_compute_queue_depth"]
        assert "replicas" not in of_kind("Deployment")["draft"]["spec"]


class TestDockerfile:
    TEXT = (COMPOSE / "Dockerfile").read_text(encoding="utf-8")

    def test_it_takes_every_package_and_what_installs_them(self) -> None:
        project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        packages = re.search(r"^include = \[(.*)\]$", project, re.MULTILINE)
        assert packages
        for name in re.findall(r'"(\w+)\*"', packages[1]):
            assert f"COPY {name} {name}\n" in self.TEXT
        kept = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        copied = {
            word
            for line in re.findall(r"^COPY (.+) \S+$", self.TEXT, re.MULTILINE)
            for word in line.split()
            if "--" not in word
        }
        for name in copied - {"/opt/draftwire"}:
            assert (ROOT / name).exists(), name
            assert f"!{name}" in kept
        extras = re.search(r'"\.\[(.*)\]"', self.TEXT)
        assert extras
        for extra in extras[1].replace("${BACKEND}", "cpu,cuda").split(","):
            assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra

    def test_it_runs_as_somebody_and_can_compile_kernels(self) -> None:
        last = self.TEXT.rpartition("\nFROM ")[2]
        assert "USER 10001:10001" in last
        assert "g++" in last
        assert "TMPDIR=/tmp" in last
        assert self.TEXT.count("\nFROM ") == 2
