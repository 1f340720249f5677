"""Decodes AVIF files, each in a process whose memory and time are limited by the size in the header of the file.

The decoder of AVIF allocates frames of the size in the bitstream before it compares it with the header, and decodes
frames that are never shown.
"""

from __future__ import annotations

import io
import os
import resource
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Final

from PIL import AvifImagePlugin, Image, ImageOps, UnidentifiedImageError

from ..protocol.errors import EngineUnavailableError
from .header import ImageError

_BYTES_PER_PIXEL: Final = 40
"""Limit of the memory. Measured: 11 to 15 with 8 bits for a colour; 12 bits and alpha need 8 more."""
_SLACK: Final = 32 << 20
_START_S: Final = 0.5
_S_PER_PIXEL: Final = 1e-7
_S_PER_BYTE: Final = 2e-7
"""Limit of the processor time, for pixels and for bytes of the file. Measured: 2e-8 and 7e-8."""
_HEAD: Final = struct.Struct("<II4s")
"""Width, height and Pillow's mode of the pixels that follow."""
_BAND_ROWS: Final = 256
_FLAGS: Final = ("-P", "-m", __name__)


def decode_avif(data: bytes, width: int, height: int) -> Image.Image:
    """Returns the first frame of a file with its orientation applied.

    Args:
        data: The file.
        width: Pixels in the header.
        height: Likewise.

    Raises:
        ImageError: The file is corrupt, larger than its header, or takes too long.
        EngineUnavailableError: The process cannot be started, or was killed.
    """
    if sys.platform != "linux":
        raise ImageError("is an AVIF image, which penstock reads on Linux only; send PNG or JPEG")
    num_bytes = _SLACK + width * height * _BYTES_PER_PIXEL
    seconds = _START_S + width * height * _S_PER_PIXEL + len(data) * _S_PER_BYTE
    command = (sys.executable, *_FLAGS, *map(str, (width, height, num_bytes, seconds)))
    with os.fdopen(os.memfd_create("image"), "wb+") as file:
        file.write(data)
        file.seek(0)
        try:
            process = subprocess.Popen(  # noqa: S603 - the arguments are numbers
                command, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            raise EngineUnavailableError(f"The server cannot decode AVIF images at the moment: {error}.") from error
    with process:
        assert isinstance(process.stdout, io.BufferedReader), "it is a pipe"
        assert process.stderr is not None, "it is a pipe"
        head = process.stdout.read(_HEAD.size)
        if len(head) == _HEAD.size:
            *size, name = _HEAD.unpack(head)
            mode = name.rstrip(b"\0").decode("ascii")
            pixels = bytearray(size[0] * size[1] * Image.getmodebands(mode))
            if process.stdout.readinto(pixels) == len(pixels):
                return Image.frombuffer(mode, (size[0], size[1]), pixels, "raw", mode, 0, 1)
        reason = process.stderr.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
    if process.returncode == -signal.SIGPROF:
        raise ImageError("is an AVIF file that takes too long to decode; save it as PNG or JPEG")
    if process.returncode == -signal.SIGKILL:
        raise EngineUnavailableError("The process that decoded an AVIF image was killed. Please try again later.")
    raise ImageError(f"is a truncated or corrupt AVIF file ({reason or 'its decoder ended'})")


def main(width: int, height: int, num_bytes: int, seconds: float) -> None:
    """Reads a file from stdin, and writes _HEAD and the pixels to stdout; after an error the reason to stderr.

    Args:
        width: Pixels at most.
        height: Likewise.
        num_bytes: Memory at most, in addition to the modules.
        seconds: Processor time at most.
    """
    limit = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1
    try:
        with Image.open(io.BytesIO(sys.stdin.buffer.read()), formats=["AVIF"]) as image:
            if image.width > width or image.height > height:
                sys.exit("its headers contradict each other")
            image.load()
            upright = ImageOps.exif_transpose(image)
    except UnidentifiedImageError:  # its message shows an object
        sys.exit("its header is invalid")
    except Exception as error:  # noqa: BLE001 - Pillow raises errors of many types for corrupt files
        sys.exit(str(error) or type(error).__name__)
    out = sys.stdout.buffer
    out.write(_HEAD.pack(upright.width, upright.height, upright.mode.encode("ascii")))
    for top in range(0, upright.height, _BAND_ROWS):
        out.write(upright.crop((0, top, upright.width, min(top + _BAND_ROWS, upright.height))).tobytes())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
