"""Hostile and corrupt files are rejected with a message, within limited memory and time."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from penstock.engine.images.decoding import decode
from penstock.engine.images.header import ImageError
from penstock.engine.images.image_file import ImageLimits, read_image_file
from penstock.engine.protocol.config import MAX_IMAGE_PIXELS

from ...tables import table
from .hostile import attacks, jpeg_with_scans, large_but_valid
from .pictures import encoded, picture

_MEMORY: int = 400 << 20
"""Bytes that a process may take to read all hostile files, in addition to its modules."""
_SCAN: bytes = b"\xff\xda"
_VALID = [encoded(picture(mode, 20, 15), format_, **options) for format_, mode, options in table(__file__, "valid")]


def _read(data: bytes) -> None:
    decode(read_image_file(data, ImageLimits()))


_READ_ALL = """
import resource, sys, time
from pathlib import Path
from penstock.engine.images.decoding import decode
from penstock.engine.images.header import ImageError
from penstock.engine.images.image_file import ImageLimits, read_image_file

used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[2]), used + int(sys.argv[2])))
for path in Path(sys.argv[1]).iterdir():
    began_s = time.process_time()
    try:
        decode(read_image_file(path.read_bytes(), ImageLimits()))
    except ImageError as error:
        assert "memory" not in str(error).lower(), path.name
    print(f"{time.process_time() - began_s:.2f} s", path.name)
"""


@pytest.fixture(scope="module")
def hostile_files() -> dict[str, tuple[bytes, str]]:
    return attacks()


def test_hostile_files_are_rejected_with_a_reason(hostile_files: dict[str, tuple[bytes, str]]) -> None:
    for name, (data, message) in hostile_files.items():
        with pytest.raises(ImageError) as error:
            _read(data)
        assert message in str(error.value), name


def test_metadata_and_further_frames_are_ignored() -> None:
    for data in large_but_valid().values():
        _read(data)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_hostile_files_take_little_memory(tmp_path: Path, hostile_files: dict[str, tuple[bytes, str]]) -> None:
    files = {name: data for name, (data, _) in hostile_files.items()} | large_but_valid()
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    command = [sys.executable, "-P", "-c", _READ_ALL, str(tmp_path), str(_MEMORY)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) == len(files)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_changed_files_fail_with_image_errors_only(data: st.DataObject) -> None:
    file = bytearray(data.draw(st.sampled_from(_VALID)))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(file) - 1) | st.integers(0, min(len(file) - 1, 120)))
        file[start : start + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=8))
        if not file:
            break
    with contextlib.suppress(ImageError):
        _read(bytes(file))


def test_limits_of_pixels_are_checked() -> None:
    assert ImageLimits(max_pixels=MAX_IMAGE_PIXELS).max_pixels == MAX_IMAGE_PIXELS
    for pixels in (0, MAX_IMAGE_PIXELS + 1):
        with pytest.raises(ValueError, match=f"max_pixels is {pixels}; it must be from 1 to {MAX_IMAGE_PIXELS}"):
            ImageLimits(max_pixels=pixels)
    data = encoded(picture("RGB", 33, 17), "PNG")
    for limits, message in (
        (ImageLimits(max_pixels=560), "at most 560 in all"),
        (ImageLimits(max_edge=32), "at most 32"),
    ):
        with pytest.raises(ImageError, match=message):
            read_image_file(data, limits)


def test_scans_are_counted_across_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    data = jpeg_with_scans(40)
    num_pixels, limit = 800 * 800 * data.count(_SCAN), "penstock.engine.images.image_file._MAX_DECODED_PIXELS"
    for portion in (1, 2, 7, 100, 1 << 20):
        monkeypatch.setattr("penstock.engine.images.jpeg._SEARCHED_BYTES", portion)
        monkeypatch.setattr(limit, num_pixels - 1)
        with pytest.raises(ImageError, match=f"tiles have {num_pixels} pixels together"):
            _read(data)
    monkeypatch.setattr(limit, num_pixels)
    assert read_image_file(data, ImageLimits()).num_decoded_pixels == num_pixels // 8
