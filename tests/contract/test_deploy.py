"""The manifests of deploy/kubernetes: valid, with commands that exist, and with times that match the worker's."""

import copy
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from backhaul_runtime.version import version
from backhaul_server.worker.config import DRAIN_S, END_S
from support.commands import parse

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
SCHEMAS = Path(__file__).parent / "schemas"
KUBERNETES = "1.33"
KUSTOMIZE = {"Kustomization", "Component"}


def documents(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text()))


FILES = sorted(FOLDER.rglob("*.yaml"))
KUSTOMIZATIONS = [file for file in FILES if file.name == "kustomization.yaml"]
OBJECTS = [
    (f"{document['kind']} {document['metadata']['name']}", document)
    for file in FILES
    for document in documents(file)
    if isinstance(document, dict) and document["kind"] not in KUSTOMIZE
]
BY_NAME = dict(OBJECTS)


def patched(document: dict[str, Any], patch: list[dict[str, Any]]) -> dict[str, Any]:
    """Applies the operations of a JSON patch that adds and replaces. A path that leads nowhere raises an error."""
    document = copy.deepcopy(document)
    for operation in patch:
        *parents, last = [part.replace("~1", "/") for part in operation["path"].split("/")[1:]]
        value: Any = document
        for part in parents:
            value = value[int(part)] if isinstance(value, list) else value[part]
        if isinstance(value, list):
            position = len(value) if last == "-" else int(last)
            if operation["op"] == "replace":
                value[position] = operation["value"]
            else:
                value.insert(position, operation["value"])
        else:
            assert operation["op"] == "add" or last in value, operation
            value[last] = operation["value"]
    return document


def on_gpus() -> dict[str, Any]:
    (patch,) = documents(FOLDER / "overlays" / "gpu" / "workers.yaml")
    return patched(BY_NAME["StatefulSet backhaul-worker"], patch)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "document", [*(document for _, document in OBJECTS), on_gpus()], ids=[*BY_NAME, "StatefulSet on GPUs"]
)
def test_each_object_fits_its_definition(document: dict[str, Any]) -> None:
    if document["kind"] == "ServiceMonitor":
        definition = yaml.safe_load((SCHEMAS / "servicemonitors.yaml").read_text())
        (version,) = definition["spec"]["versions"]
        assert document["apiVersion"] == f"{definition['spec']['group']}/{version['name']}"
        jsonschema.validate(document, version["schema"]["openAPIV3Schema"])
    else:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_a_mistake_does_not_fit() -> None:
    document = copy.deepcopy(BY_NAME["StatefulSet backhaul-worker"])
    document["spec"]["replica"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize("file", KUSTOMIZATIONS, ids=lambda file: file.parent.name)
def test_what_kustomizations_name_exists(file: Path) -> None:
    (kustomization,) = documents(file)
    for name in kustomization["resources"]:
        assert (file.parent / name).exists(), name
    for patch in kustomization.get("patches", []):
        assert (file.parent / patch["path"]).exists()
        assert f"{patch['target']['kind']} {patch['target']['name']}" in BY_NAME


def test_every_file_is_used() -> None:
    used = {file.resolve() for file in KUSTOMIZATIONS}
    for file in KUSTOMIZATIONS:
        (kustomization,) = documents(file)
        names = [*kustomization["resources"], *(patch["path"] for patch in kustomization.get("patches", []))]
        used |= {(file.parent / name).resolve() for name in names if name.endswith(".yaml")}
    assert set(FILES) == used


def containers() -> list[dict[str, Any]]:
    templates = [document["spec"]["template"]["spec"] for _, document in OBJECTS if "template" in document["spec"]]
    return [
        container
        for template in [*templates, on_gpus()["spec"]["template"]["spec"]]
        for container in template["containers"]
    ]


@pytest.mark.parametrize("container", containers(), ids=lambda container: container["name"])
def test_commands_are_those_that_exist(container: dict[str, Any]) -> None:
    parse(container["args"])
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        command = container.get(probe, {}).get("exec", {}).get("command")
        if command is not None:
            assert command[0] == "backhaul"
            parse(command[1:])


@pytest.mark.parametrize("container", containers(), ids=lambda container: container["name"])
def test_files_in_commands_are_mounted(container: dict[str, Any]) -> None:
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    paths = [argument.partition("=")[2] for argument in container["args"] if "=/" in argument]
    assert paths
    assert [path for path in paths if not any(path == mount or path.startswith(f"{mount}/") for mount in mounts)] == []


@pytest.mark.parametrize("file", KUSTOMIZATIONS, ids=lambda file: file.parent.name)
def test_images_have_tags_of_a_version(file: Path) -> None:
    (kustomization,) = documents(file)
    assert all(image["newTag"].partition("-")[0] == version() for image in kustomization.get("images", []))


def test_a_worker_has_the_memory_that_the_pages_demand() -> None:
    """Half a gigabyte and a tenth of the budget beside it, see "Capacity" in docs/production.md, and /tmp."""
    (container,) = BY_NAME["StatefulSet backhaul-worker"]["spec"]["template"]["spec"]["containers"]
    budget_gib = int(next(text for text in container["args"] if text.startswith("--memory=")).partition("=")[2][:-3])
    limit = container["resources"]["limits"]["memory"]
    assert limit.endswith("Gi")
    assert int(limit[:-2]) >= 1.1 * budget_gib + 1


def test_probes_that_start_a_process_have_the_time_for_it() -> None:
    (worker,) = BY_NAME["StatefulSet backhaul-worker"]["spec"]["template"]["spec"]["containers"]
    probes = [worker[name] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert all(probe["timeoutSeconds"] >= 10 for probe in probes)
    assert worker["readinessProbe"]["periodSeconds"] > worker["readinessProbe"]["timeoutSeconds"]


def test_a_worker_has_the_time_that_it_takes_to_drain() -> None:
    pod = BY_NAME["StatefulSet backhaul-worker"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    command, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    assert pod["terminationGracePeriodSeconds"] >= int(seconds) + DRAIN_S + END_S


def test_selectors_select_what_there_is() -> None:
    pods = [
        document["spec"]["template"]["metadata"]["labels"] for _, document in OBJECTS if "template" in document["spec"]
    ]
    for name, document in OBJECTS:
        selector = document["spec"].get("selector") or document["spec"].get("podSelector")
        if selector is not None and document["kind"] != "ServiceMonitor":
            labels = selector.get("matchLabels", selector)
            assert any(labels.items() <= pod.items() for pod in pods), name
    service = BY_NAME["Service backhaul-dashboard"]["metadata"]["labels"]
    wanted = BY_NAME["ServiceMonitor backhaul"]["spec"]["selector"]["matchLabels"]
    common = yaml.safe_load((FOLDER / "base" / "kustomization.yaml").read_text())["labels"][0]["pairs"]
    assert wanted.items() <= (service | common).items()


def test_pods_have_no_more_rights_than_they_need() -> None:
    for _, document in OBJECTS:
        if "template" not in document["spec"]:
            continue
        pod = document["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "readOnlyRootFilesystem": True,
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }
