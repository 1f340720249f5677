"""Builds the images of the Dockerfile and runs them, without a Docker engine; prints size and seconds to ready.

`make test-image` calls it, as root. Each image is started as compose does, answers the requests of README.md, and is
stopped. Then it is started once more as a pod of the Helm chart.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from chart import pod_spec, podman_options
from container import CONFINEMENT, OPTIONS, USER, Container, Fault, podman, requests_of_the_readme
from images import STAND_IN, build, build_stand_in, exists, num_bytes, remove, run

HERE = Path(__file__).resolve().parent
NEEDED = ("mmdebstrap", "buildah", "podman", "runc", "curl")
NUM_STARTS = 3


@dataclass(frozen=True)
class Image:
    """A target of the Dockerfile, and what it has to keep.

    Attributes:
        target: Of the Dockerfile; None: the default one.
        max_bytes: Of the image with its base; None: not looked at.
        max_ready_s: Seconds to ready of the fastest start; other work on the machine only adds to it.
    """

    target: str | None
    max_bytes: float | None = None
    max_ready_s: float | None = None


IMAGES = {
    "slim": Image("slim", max_bytes=450e6, max_ready_s=2.0),
    "cpu": Image(None, max_bytes=1.2e9),
    "cuda": Image("cuda"),  # without a GPU it serves on the CPU
}


def main() -> int:
    """Return the exit status: 0 where every image keeps its limits."""
    arguments = parsed()
    refuse_where_it_cannot_run(arguments.base)
    base = arguments.base or STAND_IN
    if arguments.fresh:
        for image in (*map(tag, IMAGES), *([STAND_IN] if base == STAND_IN else [])):
            remove(image)
    if base == STAND_IN and not exists(STAND_IN):
        timed(f"{STAND_IN} from Debian's packages", build_stand_in, arguments.mirror)
    print(f"{base}: {num_bytes(base) / 1e6:.0f} MB")
    faults = []
    options = shlex.split(arguments.build_options)
    for index, name in enumerate(arguments.images):
        is_cached = index > 0 or not arguments.fresh
        timed(f"{tag(name)} built", build, tag(name), base, IMAGES[name].target, options, cached=is_cached)
        try:
            faults += check(name)
            check_as_a_pod(name)
            if name == "cpu":
                check_models_on_torch()
        except Fault as fault:
            faults.append(f"{name}: {fault}")
    print(*faults, sep="\n")
    return 1 if faults else 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make test-image", description=__doc__)
    parser.add_argument("images", nargs="*", metavar="IMAGE", help=f"of {', '.join(IMAGES)}; default: slim cpu")
    parser.add_argument("--base", help="image to start from, which is here; default: one made of Debian's packages")
    parser.add_argument("--mirror", help="URL of the Debian archive for that one; default: Debian's own")
    parser.add_argument("--build-options", default="", help="more of `buildah bud`, such as volumes with a pip.conf")
    parser.add_argument("--fresh", action="store_true", help="take nothing from earlier runs")
    arguments = parser.parse_args()
    arguments.images = arguments.images or ["slim", "cpu"]
    if unknown := [name for name in arguments.images if name not in IMAGES]:
        parser.error(f"there is no image {unknown[0]}")
    return arguments


def refuse_where_it_cannot_run(base: str | None) -> None:
    missing = [name for name in NEEDED if shutil.which(name) is None and not (base and name == "mmdebstrap")]
    if missing:
        sys.exit(f"make test-image: {', '.join(missing)} is not here: apt-get install {' '.join(missing)}")
    if os.geteuid() != 0:
        sys.exit("make test-image: building with chroot isolation, and looking into a container, need root")


def tag(name: str) -> str:
    return f"localhost/penstock-test:{name}"


def timed(what: str, work, *arguments: object, **options: object) -> None:
    began_s = time.monotonic()
    work(*arguments, **options)
    print(f"{what} in {time.monotonic() - began_s:.0f} s", flush=True)


def check(name: str) -> list[str]:
    """Run an image and print its figures; return the limits that it does not keep."""
    image, size = IMAGES[name], num_bytes(tag(name))
    faults = []
    if image.max_bytes is not None and size > image.max_bytes:
        faults.append(f"{name}: {size / 1e6:.0f} MB are more than {image.max_bytes / 1e6:.0f}")
    requests = requests_of_the_readme()
    ready_s, processor_s = [], []
    for _ in range(NUM_STARTS):
        with Container(tag(name)) as container:
            ready_s.append(container.wait_until_ready())
            processor_s.append(container.processor_s())
            container.check_confinement()
            container.check_health()
            for request in requests:
                container.ask(request)
            stopped_s = container.stop()
    shown = ", ".join(f"{seconds:.2f}" for seconds in ready_s)
    print(
        f"{name}: {size / 1e6:.0f} MB; ready {shown} s after its start, for which its processes took at least "
        f"{min(processor_s):.2f} s of processors (load of this machine: {os.getloadavg()[0]:.1f})\n"
        f"{name}: as user {USER}, with a read-only root, without network; {len(requests)} requests of README.md "
        f"answered; stopped in {stopped_s:.1f} s with exit code 0",
        flush=True,
    )
    if image.max_ready_s is not None and min(ready_s) > image.max_ready_s:
        faults.append(f"{name}: ready {min(ready_s):.2f} s after its start, which is more than {image.max_ready_s}")
    return faults


def check_as_a_pod(name: str) -> None:
    """Run an image with the user, root, capabilities, variables and mounts of the chart, and fill its caches."""
    repository, _, tagged = tag(name).rpartition(":")
    values = {"image": {"repository": repository, "tag": tagged}, "models": [{"name": "model"}]}
    volume = f"{HERE / 'write_caches.py'}:/write_caches.py:ro"
    with (
        tempfile.TemporaryDirectory() as node,
        Container(
            tag(name), "serve", volumes=[volume], confinement=podman_options(pod_spec(values), Path(node))
        ) as container,
    ):
        container.wait_until_ready()
        container.check_confinement()
        container.check_health()
        for request in requests_of_the_readme():
            container.ask(request)
        written = container.exec("python", "/write_caches.py")
        if written.returncode != 0:
            raise Fault(f"as a pod of the chart it cannot write its caches:\n{written.stdout}{written.stderr}")
        container.stop()
    print(
        f"{name}: as a pod of the chart ready, answered and stopped",
        *written.stdout.splitlines(),
        sep="\n    ",
        flush=True,
    )


def check_models_on_torch() -> None:
    """Serve models that torch runs in the image that has it; the slim one, where it is here, refuses them."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        volumes = [f"{folder}:/models", f"{HERE / 'make_models.py'}:/make_models.py:ro"]
        mounts = [f"--volume={volume}" for volume in volumes]
        run(
            *podman(
                "run",
                "--rm",
                *OPTIONS,
                *CONFINEMENT,
                *mounts,
                "--entrypoint",
                "python",
                tag("cpu"),
                "/make_models.py",
                "/models",
            )
        )
        for name in sorted(path.name for path in Path(folder).iterdir()):
            with Container(tag("cpu"), "serve", f"/models/{name}", volumes=volumes[:1]) as container:
                ready_s = container.wait_until_ready()
                path, key = ("classify", "probs") if name.endswith("Classification") else ("v1/embeddings", "embedding")
                body = json.dumps({"input": ["A dam."]})
                answer = container.ask(
                    f"curl http://localhost:8000/{path} -H 'Content-Type: application/json' -d '{body}'"
                )
                if not json.loads(answer)["data"][0][key]:
                    raise Fault(f"{name} answers nothing")
                container.stop()
            print(f"cpu: {name} on torch ready {ready_s:.2f} s after its start, answered", flush=True)
            if exists(tag("slim")):
                with Container(tag("slim"), "serve", f"/models/{name}", volumes=volumes[:1]) as container:
                    code, log = container.wait_until_ended(), container.logs()
                if code != 3 or "needs torch, which is not installed" not in log or "Traceback" in log:
                    raise Fault(f"slim does not refuse {name} in one line and with 3 but with {code}:\n{log}")
                print(f"slim: {name} refused in one line, exit code 3", flush=True)


if __name__ == "__main__":
    sys.exit(main())
