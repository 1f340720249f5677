"""Builds the images of the Dockerfile and runs them without a Docker engine. Prints size and seconds to ready.

`make test-image` runs it as root. Each image starts with the options of compose, answers the requests of docs/routes.md
and stops.
"""

import argparse
import os
import shlex
import shutil
import sys
import time
from dataclasses import dataclass

from container import Container, Fault, documented_requests
from images import STAND_IN, build, build_stand_in, exists, num_bytes

NEEDED = ("mmdebstrap", "buildah", "podman", "runc", "curl")
NUM_STARTS = 3


@dataclass(frozen=True)
class Image:
    """A target of the Dockerfile and its limits.

    Attributes:
        target: Target; None for the default one.
        max_bytes: Size of the image with its base; None for no limit.
        max_ready_s: Seconds to ready of the fastest start; None for no limit.
    """

    target: str | None
    max_bytes: float | None = None
    max_ready_s: float | None = None


IMAGES = {
    "slim": Image("slim", max_bytes=450e6, max_ready_s=2.0),
    "cpu": Image(None, max_bytes=1.2e9),
    "cuda": Image("cuda"),
}


def main() -> int:
    arguments = parsed()
    require_programs(arguments.base)
    base = arguments.base or STAND_IN
    if base == STAND_IN and not exists(STAND_IN):
        timed(f"{STAND_IN} from Debian's packages", build_stand_in, arguments.mirror)
    print(f"{base}: {num_bytes(base) / 1e6:.0f} MB")
    faults = []
    options = shlex.split(arguments.build_options)
    for name in arguments.images:
        timed(f"{tag(name)} built", build, tag(name), base, IMAGES[name].target, options)
        try:
            faults += check(name)
            if name == "cpu":
                check_torch()
        except Fault as fault:
            faults.append(f"{name}: {fault}")
    print(*faults, sep="\n")
    return 1 if faults else 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make test-image", description=__doc__)
    parser.add_argument("images", nargs="*", metavar="IMAGE", help=f"of {', '.join(IMAGES)}; default: slim cpu")
    parser.add_argument("--base", help="local base image; default: one of Debian packages")
    parser.add_argument("--mirror", help="URL of a Debian archive for the base image")
    parser.add_argument(
        "--build-options", default="", help="further options of `buildah bud`, such as volumes with a pip.conf"
    )
    arguments = parser.parse_args()
    arguments.images = arguments.images or ["slim", "cpu"]
    if unknown := [name for name in arguments.images if name not in IMAGES]:
        parser.error(f"there is no image {unknown[0]}")
    return arguments


def require_programs(base: str | None) -> None:
    missing = [name for name in NEEDED if shutil.which(name) is None and not (base and name == "mmdebstrap")]
    if missing:
        sys.exit(f"make test-image: {', '.join(missing)} is missing: apt-get install {' '.join(missing)}")
    if os.geteuid() != 0:
        sys.exit("make test-image: building with chroot isolation and inspecting containers need root")


def tag(name: str) -> str:
    return f"localhost/penstock-test:{name}"


def timed(what: str, work, *arguments: object) -> None:
    began_s = time.monotonic()
    work(*arguments)
    print(f"{what} in {time.monotonic() - began_s:.0f} s", flush=True)


def check(name: str) -> list[str]:
    """Run an image and print its measurements. Returns the exceeded limits."""
    image, size = IMAGES[name], num_bytes(tag(name))
    faults = []
    if image.max_bytes is not None and size > image.max_bytes:
        faults.append(f"{name}: {size / 1e6:.0f} MB are more than {image.max_bytes / 1e6:.0f}")
    requests = documented_requests()
    ready_s = []
    for _ in range(NUM_STARTS):
        with Container(tag(name)) as container:
            ready_s.append(container.wait_until_ready())
            container.check_confinement()
            container.check_health()
            for command in requests:
                container.request(command)
            stopped_s = container.stop()
    shown = ", ".join(f"{seconds:.2f}" for seconds in ready_s)
    print(
        f"{name}: {size / 1e6:.0f} MB; ready after {shown} s; "
        f"{len(requests)} requests of docs/routes.md answered; stopped in {stopped_s:.1f} s",
        flush=True,
    )
    if image.max_ready_s is not None and min(ready_s) > image.max_ready_s:
        faults.append(f"{name}: ready after {min(ready_s):.2f} s, more than {image.max_ready_s}")
    return faults


def check_torch() -> None:
    """The cpu image can import torch and transformers."""
    with Container(tag("cpu"), "serve") as container:
        imported = container.exec("python", "-c", "import torch, transformers")
    if imported.returncode != 0:
        raise Fault(f"it cannot import torch and transformers:\n{imported.stderr}")


if __name__ == "__main__":
    sys.exit(main())
