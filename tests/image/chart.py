"""Translates the pod of the Helm chart to options of podman."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import helm_python as helm
import yaml

CHART = Path(__file__).resolve().parents[2] / "docker" / "chart"


def pod_spec(values: dict[str, Any]) -> dict[str, Any]:
    """Render the chart with one model and return its pod spec."""
    with helm.Chart.load(str(CHART)) as chart:
        texts = chart.render(values, name="r", namespace="default")
    files = [text for path, text in texts.items() if path.endswith(".yaml")]
    documents = [document for text in files for document in yaml.safe_load_all(text) if document]
    (pod,) = [each["spec"]["template"]["spec"] for each in documents if each["kind"] == "Deployment"]
    return dict(pod)


def podman_options(pod: dict[str, Any], node: Path) -> list[str]:
    """Return the user, root, capabilities, variables and mounts of a pod as options of podman.

    Args:
        pod: Result of `pod_spec`.
        node: Folder for emptyDirs. They get the owner and mode that a kubelet sets.

    Raises:
        ValueError: A setting has no translation.
    """
    (container,) = pod["containers"]
    confined, user = container["securityContext"], pod["securityContext"]
    root = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True}
    if confined != {**root, "capabilities": {"drop": ["ALL"]}}:
        raise ValueError(f"securityContext of the container: {confined} has no translation to podman")
    options = ["--read-only", "--read-only-tmpfs=false", "--cap-drop=all", "--security-opt=no-new-privileges"]
    options.append(f"--user={user['runAsUser']}:{user['runAsGroup']}")
    options += [f"--env={each['name']}={each['value']}" for each in container["env"]]
    kinds = {volume["name"]: volume for volume in pod["volumes"]}
    for mount in container["volumeMounts"]:
        if "emptyDir" not in kinds[mount["name"]]:
            raise ValueError(f"volume {mount['name']}: only an emptyDir has a translation to podman")
        folder = node / mount["name"]
        folder.mkdir(exist_ok=True)
        os.chown(folder, 0, user["fsGroup"])
        folder.chmod(0o2777)
        options.append(f"--volume={folder}:{mount['mountPath']}:rw")
    return options
