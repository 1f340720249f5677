"""The pod of the Helm chart as options of podman: the same user, root, capabilities, variables and mounts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import helm_python as helm
import yaml

CHART = Path(__file__).resolve().parents[2] / "docker" / "chart"


def pod_spec(values: dict[str, Any]) -> dict[str, Any]:
    """Render the chart and return the pod spec of its only model."""
    with helm.Chart.load(str(CHART)) as chart:
        texts = chart.render(values, name="r", namespace="default")
    files = [text for path, text in texts.items() if path.endswith(".yaml")]
    documents = [document for text in files for document in yaml.safe_load_all(text) if document]
    (pod,) = [each["spec"]["template"]["spec"] for each in documents if each["kind"] == "Deployment"]
    return dict(pod)


def podman_options(pod: dict[str, Any], node: Path) -> list[str]:
    """Return the options with which podman runs the pod's container as Kubernetes would.

    Args:
        pod: As `pod_spec` gives it.
        node: A folder where the emptyDirs are made, with the owner and the mode that a kubelet gives them.

    Raises:
        ValueError: The pod has a setting that is not translated here.
    """
    (container,) = pod["containers"]
    confined, user = container["securityContext"], pod["securityContext"]
    if confined != {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }:
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
