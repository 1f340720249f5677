"""Hostile images beside ordinary requests: they cost no more memory and no longer stalls than ordinary images.

`pytest tests/faults/test_hostile_images.py -m slow -s` prints longest wait, processor time and memory for each kind.
"""

import asyncio
import base64
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from ..random_models import save_two_tower_model
from ..servers import MIB, Launch, Server
from .load import MAX_WORK_S, Seen, watching

pytest.importorskip("PIL.Image")
from ..engine.images.hostile import attacks, large_but_valid
from ..engine.images.pictures import encoded, picture

pytestmark = pytest.mark.slow
NUM_CLIENTS = 8
SLACK = 32 * MIB
"""Memory of the bodies and of the interpreter."""


@pytest.fixture(scope="module")
def image_server(launch: Launch, default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Server:
    folder = tmp_path_factory.mktemp("clip")
    save_two_tower_model(folder, "CLIP", default_model)
    return launch(model=folder)


def uri(file: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(file).decode()


async def send_all(server: Server, images: Sequence[str]) -> list[tuple[int, str]]:
    """Send each image in a request of its own, from several clients. Returns status and body in order."""
    results: list[tuple[int, str]] = [(0, "")] * len(images)
    remaining = iter(enumerate(images))

    async def client() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=240) as http:
            for index, image in remaining:
                response = await http.post("/v1/embeddings", json={"input": [{"image": image}]})
                results[index] = (response.status_code, response.text)

    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_CLIENTS):
            group.create_task(client())
    return results


async def watch(server: Server, what: str, images: Sequence[str]) -> tuple[Seen, list[tuple[int, str]]]:
    """Send images beside the embeddings of a text, and measure the server."""
    with watching(server, f"{what}, embeddings", "a dam"), watching(server, f"{what}, health") as seen:
        return seen, await send_all(server, images)


async def test_hostile_images_cost_no_more_than_ordinary_ones(image_server: Server) -> None:
    photo = picture("RGB", 400, 300).resize((4_000, 3_000))
    ordinary = [uri(encoded(photo, kind)) for kind in ("JPEG", "WEBP")] * 4
    await send_all(image_server, ordinary[:2])  # imports Pillow's plugins
    usual, results = await watch(image_server, "photos of 12 megapixels", ordinary)
    assert {status for status, _ in results} == {200}

    rejected, valid = attacks(), large_but_valid()
    files = [*((data, message) for data, message in rejected.values()), *((data, "") for data in valid.values())]
    hostile, results = await watch(image_server, "hostile images", [uri(data) for data, _ in files])
    for (data, message), (status, text) in zip(files, results, strict=True):
        if not data:
            message = "is an image without data"
        assert status == (400 if message else 200), (message, text[:300])
        assert message.replace("\\", "") in text.replace("\\", "")
    assert hostile.busiest_s < max(MAX_WORK_S, usual.busiest_s)
    assert hostile.grown < usual.grown + SLACK
    assert (await send_all(image_server, ordinary[:1]))[0][0] == 200
