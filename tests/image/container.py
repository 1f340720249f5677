"""A container without root, writable files and network, and requests to it."""

import json
import os
import re
import subprocess
import time
from datetime import datetime
from typing import Any

from images import ROOT, run

USER = 10001
GRACE_S = 45
POLL_S = 0.02
OPTIONS = (
    *("--pull=never", "--network=none", "--no-healthcheck"),
    *("--ulimit=nofile=8192:8192", "--ulimit=nproc=1024:1024"),
)
"""podman leaves health checks to systemd, so the tests run them. podman's default limits may exceed this machine's."""
CONFINEMENT = ("--read-only", "--tmpfs=/tmp", "--cap-drop=all", "--security-opt=no-new-privileges")
"""The confinement of docker/compose.yaml."""


class Fault(Exception):
    """An image fails a check."""


def podman(*arguments: str) -> list[str]:
    return ["podman", "--runtime", "runc", *arguments]


class Container:
    """Runs an image until `stop`, or until the block ends.

    Args:
        image: Name.
        command: Arguments of `penstock`; none for those of the image.
    """

    def __init__(self, image: str, *command: str) -> None:
        self.image = image
        self.id = run(*podman("run", "--detach", *OPTIONS, *CONFINEMENT, image, *command))

    def __enter__(self) -> "Container":
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(podman("rm", "--force", self.id), capture_output=True, check=False)

    def inspect(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(run(*podman("inspect", self.id)))[0]
        return found

    def exec(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(podman("exec", self.id, *command), capture_output=True, text=True, check=False)

    def shell(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command of this machine in the network namespace of the container."""
        inside = ("nsenter", "--target", str(self.inspect()["State"]["Pid"]), "--net", "sh", "-c", command)
        # No proxy for the localhost of the container.
        environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        return subprocess.run(inside, capture_output=True, text=True, check=False, env=environment)

    def logs(self) -> str:
        done = subprocess.run(podman("logs", self.id), capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    def wait_until_ready(self, timeout_s: float = 120) -> float:
        """Return the seconds from the container's start to the first 200 of /health/ready."""
        state = self.inspect()["State"]
        # Python parses no nanoseconds.
        started = datetime.fromisoformat(re.sub(r"(\.\d{6})\d*", r"\1", state["StartedAt"]))
        wait = (
            f"until curl --silent --fail --max-time 5 http://localhost:8000/health/ready; do sleep {POLL_S}; "
            f"kill -0 {state['Pid']} || exit 1; done"
        )
        try:
            inside = ["nsenter", "--target", str(state["Pid"]), "--net", "timeout", str(timeout_s), "sh", "-c", wait]
            subprocess.run(inside, check=True, capture_output=True)
        except subprocess.CalledProcessError as error:
            raise Fault(f"not ready after {timeout_s} s, or ended:\n{self.logs()}") from error
        return datetime.now(started.tzinfo).timestamp() - started.timestamp()

    def check_confinement(self) -> None:
        """Raise Fault if the server is root, can write to its root or has a network."""
        if (user := self.exec("id", "-u").stdout.strip()) != str(USER):
            raise Fault(f"it runs as user {user}")
        if self.exec("touch", "/home/penstock/file").returncode == 0:
            raise Fault("its root can be written to")
        if (devices := self.exec("ls", "/sys/class/net").stdout.split()) != ["lo"]:
            raise Fault(f"it has a network: {devices}")

    def check_health(self) -> None:
        """Run the image's own health check."""
        kind, *command = json.loads(run("podman", "image", "inspect", self.image))[0]["Healthcheck"]["Test"]
        done = self.exec(*command) if kind == "CMD" else self.exec("sh", "-c", *command)
        if done.returncode != 0:
            raise Fault(f"its health check fails: {done.stderr}")

    def request(self, command: str) -> str:
        """Run a curl command of a document and return the body. Raise Fault unless the status is 200."""
        status = ' --silent --show-error --write-out "\\n%{http_code}"'
        done = self.shell(command + status)
        body, _, code = done.stdout.rpartition("\n")
        if code != "200":
            raise Fault(f"{command}\nis answered with {code}: {body} {done.stderr}\n{self.logs()}")
        return body

    def stop(self) -> float:
        """Stop the container by SIGTERM. Returns seconds."""
        began_s = time.monotonic()
        run(*podman("stop", "--time", str(GRACE_S), self.id))
        took_s, code = time.monotonic() - began_s, self.inspect()["State"]["ExitCode"]
        if code != 0 or took_s >= GRACE_S:
            raise Fault(f"it ended after {took_s:.1f} s with exit code {code}:\n{self.logs()}")
        return took_s


def documented_requests() -> list[str]:
    """The curl commands of docs/routes.md."""
    text = (ROOT / "docs" / "routes.md").read_text("utf-8")
    return re.findall(r"^    (curl (?:.*\\\n)*.*)$", text, re.MULTILINE)
