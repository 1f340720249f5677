"""ImagePreprocessor: order, errors of one image, memory, cancellation and shutdown."""

import asyncio
import sys
import threading

import numpy as np
import pytest
from PIL import Image

from penstock.engine.images.decode_queue import TRIM_BYTES
from penstock.engine.images.image_file import ImageFile, ImageLimits, read_image_file
from penstock.engine.images.preprocessor import ImagePreprocessor
from penstock.engine.protocol.errors import EngineUnavailableError, InvalidRequestError, MachineError
from penstock.engine.protocol.images import ImageInput, ImagePatches, ImageResize, ImageSpec

from ...waiting import until
from .pictures import encoded, picture

_SPEC = ImageSpec(
    patch_size=4, resize=ImageResize.EXACT, size=(8, 8), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), max_patches=4
)
_PATCHES = ImagePatches(np.zeros((4, 48), np.uint8), (2, 2))


def _images(count: int) -> list[ImageInput]:
    return [ImageInput(encoded(picture("RGB", 9, 7, seed), "PNG")) for seed in range(count)]


class _Gate:
    """Replaces decoding: waits in the worker thread until it is opened."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.num_begun = 0
        self._lock = threading.Lock()

    def __call__(self, file: ImageFile) -> ImagePatches:
        with self._lock:
            self.num_begun += 1
        assert self.is_open.wait(30)
        return _PATCHES


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> _Gate:
    gate = _Gate()
    monkeypatch.setattr("penstock.engine.images.preprocessor._load_process", lambda spec: gate)
    return gate


async def test_patches_come_in_the_order_of_the_images() -> None:
    preprocessor = ImagePreprocessor(_SPEC, num_threads=3)
    images = _images(7)
    together = await preprocessor.preprocess(images)
    for image, patches in zip(images, together, strict=True):
        (alone,) = await preprocessor.preprocess([image])
        np.testing.assert_array_equal(patches.pixels, alone.pixels)
        assert patches.grid == (2, 2)
    assert len({patches.pixels.tobytes() for patches in together}) == 7
    assert await preprocessor.preprocess([]) == []
    preprocessor.close()


async def test_corrupt_image_fails_its_request_only() -> None:
    preprocessor = ImagePreprocessor(_SPEC, num_threads=2)
    images = _images(4)
    broken = [*images[:3], ImageInput(b'<svg width="1"/>')]
    failed, succeeded = await asyncio.gather(
        preprocessor.preprocess(broken), preprocessor.preprocess(images), return_exceptions=True
    )
    assert isinstance(failed, InvalidRequestError)
    assert failed.param == "input"
    assert failed.message == (
        "Input 3 is not an image in a supported format (PNG, JPEG, WebP, AVIF, GIF, BMP or TIFF); it begins with "
        "'<svg width=\"'."
    )
    assert isinstance(succeeded, list)
    assert preprocessor.stats.num_failures == 1
    assert preprocessor.stats.num_images >= 4
    assert preprocessor.stats.decoding_s > 0
    preprocessor.close()


async def test_error_names_the_place_of_the_image() -> None:
    preprocessor = ImagePreprocessor(_SPEC, num_threads=1)
    image = ImageInput(b"", "documents[1].content[0].image_url.url")
    with pytest.raises(InvalidRequestError, match=r"^documents\[1\]\.content\[0\]\.image_url\.url is empty") as caught:
        await preprocessor.preprocess([*_images(1), image])
    assert caught.value.param == "documents"
    preprocessor.close()


@pytest.mark.parametrize(("edge", "num_trims"), [(100, 0), (2000, 1)])
async def test_memory_returns_to_the_system_after_large_images(
    monkeypatch: pytest.MonkeyPatch, gate: _Gate, edge: int, num_trims: int
) -> None:
    trims = list[int]()
    monkeypatch.setattr("penstock.engine.images.decode_queue.trim_heap", lambda: trims.append(1))
    preprocessor = ImagePreprocessor(_SPEC, num_threads=2)
    images = [ImageInput(encoded(Image.new("RGB", (edge, edge)), "PNG"))] * 2
    assert (read_image_file(images[0].data, ImageLimits()).num_bytes > TRIM_BYTES) == bool(num_trims)
    large = asyncio.create_task(preprocessor.preprocess(images))
    await until(lambda: gate.num_begun == 2)  # the memory is free when both have ended
    gate.is_open.set()
    await large
    await preprocessor.preprocess(_images(1))
    await until(lambda: len(trims) == num_trims)
    preprocessor.close()


async def test_request_leaves_workers_to_others_between_images(gate: _Gate) -> None:
    preprocessor = ImagePreprocessor(_SPEC, num_threads=1)
    large = asyncio.create_task(preprocessor.preprocess(_images(50)))
    await until(lambda: gate.num_begun == 1)
    small = asyncio.create_task(preprocessor.preprocess(_images(1)))
    await asyncio.sleep(0)
    gate.is_open.set()
    await small
    assert gate.num_begun < 50
    await large
    preprocessor.close()


async def test_cancelled_request_decodes_no_further_image(gate: _Gate) -> None:
    preprocessor = ImagePreprocessor(_SPEC, num_threads=2)
    task = asyncio.create_task(preprocessor.preprocess(_images(9)))
    await until(lambda: gate.num_begun == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.is_open.set()
    assert len(await preprocessor.preprocess(_images(1))) == 1
    assert gate.num_begun == 3
    preprocessor.close()


async def test_closed_encoder_rejects_waiting_and_new_requests(gate: _Gate) -> None:
    preprocessor = ImagePreprocessor(_SPEC, num_threads=1)
    running = asyncio.create_task(preprocessor.preprocess(_images(1)))
    await until(lambda: gate.num_begun == 1)
    waiting = asyncio.create_task(preprocessor.preprocess(_images(1)))
    await asyncio.sleep(0)
    preprocessor.close()
    gate.is_open.set()
    assert await running == [_PATCHES]
    for request in (waiting, preprocessor.preprocess(_images(2))):
        with pytest.raises(EngineUnavailableError, match="shutting down"):
            await request


async def test_format_that_pillow_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("PIL.features.check", lambda name: False)
    preprocessor = ImagePreprocessor(_SPEC, num_threads=1)
    with pytest.raises(InvalidRequestError, match="Input 0 is a WEBP image, which this server's Pillow cannot read"):
        await preprocessor.preprocess([ImageInput(encoded(picture("RGB", 9, 7), "WEBP"))])
    preprocessor.close()


def test_missing_pillow_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    for name in ("decoding", "preprocessing"):
        monkeypatch.delitem(sys.modules, f"penstock.engine.images.{name}", raising=False)
    with pytest.raises(MachineError, match=r"needs Pillow .* Run pip install 'penstock\[images\]'"):
        ImagePreprocessor(_SPEC, num_threads=1)
