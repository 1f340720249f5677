"""Builds images without a Docker engine, on a base of Debian packages that replaces the Python image."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
STAND_IN = "localhost/penstock-stand-in:bookworm"
PACKAGES = ("usr-is-merged", "python3", "python3-venv", "python3-pip", "python-is-python3", "ca-certificates")
MERGED_USR = Path("/usr/share/mmdebstrap/hooks/merged-usr")
NOT_IN_SLIM_IMAGES = ("/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/man/*")
EXTERNALLY_MANAGED = "usr/lib/python3.11/EXTERNALLY-MANAGED"
"""With this file Debian's pip installs nothing. Python images have no such file."""


def run(*command: str) -> str:
    """Run a command and return its output. On failure print its stderr and raise CalledProcessError."""
    done = subprocess.run(command, check=False, text=True, capture_output=True, cwd=ROOT)
    if done.returncode != 0:
        sys.stderr.write(done.stderr)
        done.check_returncode()
    return done.stdout.strip()


def exists(image: str) -> bool:
    command = ["buildah", "inspect", "--type", "image", image]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def num_bytes(image: str) -> int:
    """The unpacked size of all layers, as in `docker images`."""
    return int(json.loads(run("podman", "image", "inspect", image))[0]["Size"])


def build_stand_in(mirror: str | None) -> None:
    """Build Debian bookworm with its Python.

    Args:
        mirror: URL of a Debian archive; None for the default one.
    """
    with tempfile.TemporaryDirectory() as folder:
        archive = f"{folder}/base.tar"
        options = [f"--dpkgopt=path-exclude={path}" for path in NOT_IN_SLIM_IMAGES]
        run(
            *("mmdebstrap", "--quiet", "--variant=minbase", f"--hook-dir={MERGED_USR}"),
            *(f"--include={','.join(PACKAGES)}", f"--customize-hook=rm $1/{EXTERNALLY_MANAGED}", *options),
            *("bookworm", archive, *([mirror] if mirror else [])),
        )
        container = run("buildah", "from", "scratch")
        try:
            run("buildah", "add", "--quiet", container, archive, "/")
            run("buildah", "config", "--env", "PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", container)
            run("buildah", "commit", "--quiet", container, STAND_IN)
        finally:
            run("buildah", "rm", container)


def build(tag: str, base: str, target: str | None, options: list[str]) -> None:
    """Build a target of the Dockerfile.

    Args:
        tag: Tag of the image.
        base: Base image.
        target: Target; None for the default one.
        options: Further options of `buildah bud`.
    """
    run(
        *("buildah", "bud", "--quiet", "--isolation", "chroot", "--network", "host", "--pull-never"),
        *("--format", "docker"),  # the OCI format has no HEALTHCHECK
        *("--layers", "--build-arg", f"PYTHON_IMAGE={base}", "--tag", tag),
        *(["--target", target] if target else []),
        *options,
        ".",
    )
