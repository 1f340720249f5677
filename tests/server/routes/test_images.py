"""Images in the bodies of each dialect, with the clients of OpenAI and Cohere and the bodies of others."""

import asyncio
import base64
import json
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image

from penstock.engine.protocol.images import ImageInput, ImageResize, ImageSpec
from penstock.server.calls import images
from penstock.server.http.image_fetcher import AllowedHost, FetchError, ImageFetcher

from ...engine.images.pictures import colored, data_uri
from ..bodies import table
from ..fake_engine import NUM_IMAGE_TOKENS, FakeEngine

pytestmark = pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning")


RED, BLUE = colored("red"), colored("blue", "JPEG", (2, 5))
BASE64 = base64.b64encode(RED).decode()
URI, BLUE_URI = f"data:image/png;base64,{BASE64}", f"data:image/jpeg;base64,{base64.b64encode(BLUE).decode()}"
URL = "https://img.example.org/red.png"


@pytest.fixture
def engine(make_engine) -> FakeEngine:
    return make_engine(image=make_engine().info)


def part(url: str) -> dict:
    return {"type": "image_url", "image_url": {"url": url}}


def chat(*parts: dict | str) -> list[dict]:
    content = [{"type": "text", "text": each} if isinstance(each, str) else each for each in parts]
    return [{"role": "user", "content": content}]


def images_in(name: str) -> list[list[Any]]:
    """Returns a table of cases. Replaces $RED and $BLUE by data URIs, $BASE64 and $LINES by the base64 of RED."""
    text = json.dumps(table(__file__, f"images_{name}"))
    text = text.replace("$RED", URI).replace("$BLUE", BLUE_URI).replace("$BASE64", BASE64)
    return json.loads(text.replace("$LINES", json.dumps(base64.encodebytes(RED).decode())[1:-1]))


MULTIMODAL = "/v1/multimodalembeddings"
ALONE = images_in("alone")


@pytest.mark.parametrize(("path", "body"), [row[1:] for row in ALONE], ids=[row[0] for row in ALONE])
async def test_image_reaches_the_engine(client, engine, path: str, body: dict) -> None:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert engine.calls[-1][1][0] == [ImageInput(RED)]


PLACES = images_in("places")


@pytest.mark.parametrize(("path", "body", "place"), PLACES)
async def test_error_of_the_engine_names_the_place_of_the_image(client, engine, path, body, place) -> None:
    await client.post(path, json=body)
    inputs = engine.calls[-1][1][1 if path in ("/rerank", "/score") else 0]
    engine.failure = next(each for each in inputs if isinstance(each, ImageInput)).error(0, "is empty")
    response = await client.post(path, json=body)
    assert response.status_code == 400
    error = response.json().get("error", response.json())
    assert error["message"].startswith(place)
    assert error.get("param", "images") == place.partition("[")[0]


@pytest.mark.parametrize("media", ["image/png;charset=x", f"image/{'x' * 236}", "image/svg+xml", "", "IMAGE/PNG"])
@pytest.mark.parametrize("is_base64", [True, False])
async def test_data_uri_is_decoded(client, engine, media: str, is_base64: bool) -> None:
    data = quote(BASE64) if is_base64 else quote(RED)
    uri = f"DATA:{media}{';base64' * is_base64},{data}"
    response = await client.post("/v1/embeddings", json={"input": [{"image": uri}]})
    assert response.status_code == 200, response.text
    assert engine.calls[-1][1][0] == [ImageInput(RED)]


@pytest.mark.parametrize(("decode", "text"), [(images._decode_base64, "AQ" * 40), (images._decode_escapes, "%41" * 40)])
async def test_other_requests_run_between_parts_of_an_image(monkeypatch, decode, text: str) -> None:
    monkeypatch.setattr(images, "_SLICE_CHARS", 8)
    decoding, num_turns = asyncio.create_task(decode(text, 0)), 0
    while not decoding.done():
        await asyncio.sleep(0)
        num_turns += 1
    assert num_turns >= len(text) // 8
    assert len(await decoding) == {"A": 60, "%": 40}[text[0]]


@pytest.mark.parametrize("text", ["AAAAAA==AAAA", "AAAAAA==        \nAAAA", "AAAAAA==        AA=="])
async def test_base64_after_padding_is_rejected_in_every_part(monkeypatch, text: str) -> None:
    monkeypatch.setattr(images, "_SLICE_CHARS", 8)
    with pytest.raises(ValueError, match="= before its end"):
        await images._decode_base64(text, 0)


async def test_texts_and_images_keep_their_order(client, engine) -> None:
    body = {"input": ["a", {"image": URI}, [{"type": "text", "text": "b"}], [1, 2], {"image": BLUE_URI}]}
    response = (await client.post("/v1/embeddings", json=body)).json()
    assert engine.calls[-1][1][0] == ["a", ImageInput(RED), "b", [1, 2], ImageInput(BLUE)]
    assert response["usage"]["prompt_tokens"] == 3 + NUM_IMAGE_TOKENS + 3 + 2 + NUM_IMAGE_TOKENS
    chats = [chat("hello"), chat(part(URI)), chat("world")]
    await client.post("/pooling", json={"messages": chats, "task": "embed"})
    first, second, third = engine.calls[-1][1][0]
    assert ("hello" in first, second, "world" in third) == (True, ImageInput(RED), True)


async def test_openai_client_sends_images(client, engine) -> None:
    openai = pytest.importorskip("openai")
    api = openai.AsyncOpenAI(base_url="http://test/v1", api_key="x", http_client=client)
    body = {"messages": chat(part(URI)), "encoding_format": "float"}
    answer = await api.post("/embeddings", cast_to=openai.types.CreateEmbeddingResponse, body=body)
    assert engine.calls[-1][1][0] == [ImageInput(RED)]
    assert (len(answer.data[0].embedding), answer.usage.total_tokens) == (8, NUM_IMAGE_TOKENS)
    answer = await api.embeddings.create(model="alias", input=[{"image": URI}, {"text": "a"}])
    assert engine.calls[-1][1][0] == [ImageInput(RED), "a"]


async def test_cohere_client_sends_images(client, engine) -> None:
    cohere = pytest.importorskip("cohere")
    api = cohere.AsyncClientV2(api_key="any", base_url="http://test", httpx_client=client)
    answer = await api.embed(
        model="alias", images=[URI, BLUE_URI], input_type="image", embedding_types=["float", "ubinary"]
    )
    assert engine.calls[-1][1][0] == [ImageInput(RED), ImageInput(BLUE)]
    units = answer.meta.billed_units
    assert (units.images, units.image_tokens, units.input_tokens) == (2, 2 * NUM_IMAGE_TOKENS, 0)
    assert [(image.width, image.height, image.format) for image in answer.images] == [(4, 3, "png"), (2, 5, "jpeg")]
    assert (len(answer.embeddings.float_), len(answer.embeddings.ubinary), answer.texts) == (2, 2, [])
    inputs = [{"content": [{"type": "text", "text": "one two"}]}, {"content": [part(URI)]}]
    answer = await api.embed(model="alias", inputs=inputs, input_type="search_document")
    assert engine.calls[-1][1][0] == ["one two", ImageInput(RED)]
    assert (answer.meta.billed_units.input_tokens, answer.texts) == (4, ["one two"])


async def test_patches_of_images_are_returned_with_token_ids(client) -> None:
    body = {"input": ["a", {"image": URI}], "outputs": ["multi_vector"], "return_token_ids": True}
    text, image = (await client.post("/v1/encode", json=body)).json()["data"]
    assert image["patches"] == {"rows": 1, "columns": 2, "vectors": [0, 1]}
    assert "patches" not in text
    image = (await client.post("/v1/encode", json=body | {"return_token_ids": False})).json()["data"][1]
    assert "patches" not in image


async def test_voyage_usage_counts_pixels(client, engine) -> None:
    contents = [
        [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
        [{"type": "image_base64", "image_base64": BLUE_URI}],
    ]
    body = {"inputs": [{"content": content} for content in contents], "model": "alias", "input_type": None}
    body |= {"truncation": True, "output_dtype": None, "output_dimension": None, "encoding_format": "base64"}
    answer = (await client.post(MULTIMODAL, json=body)).json()
    assert engine.calls[-1][1][0] == ["one\ntwo", ImageInput(BLUE)]
    tokens = {"text_tokens": 4, "total_tokens": 4 + NUM_IMAGE_TOKENS}
    assert answer["usage"] == {**tokens, "image_pixels": 10, "video_pixels": 0}
    rows = [np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in answer["data"]]
    assert [row.shape for row in rows] == [(8,), (8,)]


DOCUMENTS = ["a", {"image": URI}, {"content": [part(BLUE_URI)]}]


async def test_rerank_takes_image_documents(client, engine, monkeypatch) -> None:
    body = {"query": "a", "documents": DOCUMENTS, "max_tokens_per_doc": 3}
    answer = (await client.post("/v1/rerank", json=body)).json()
    assert engine.calls[-1][1][1] == ["a", ImageInput(RED), ImageInput(BLUE)]
    assert [result["index"] for result in answer["results"]] == [0, 1, 2]
    assert [r.get("document") for r in answer["results"]] == [{"text": "a"}, None, None], "images on request only"
    answer = (await client.post("/v1/rerank", json={**body, "return_documents": True})).json()
    assert [result["document"] for result in answer["results"]] == [{"text": "a"}, *DOCUMENTS[1:]]
    answer = (await client.post("/v1/rerank", json={**body, "return_documents": True, "top_k": None})).json()
    assert [row.get("document", "absent") for row in answer["data"]] == ["a", "absent", "absent"]
    body = {"query": "a", "documents": {"content": [{"type": "text", "text": "a"}, part(URI)]}}  # vLLM's other form
    assert (await client.post("/rerank", json=body)).status_code == 200
    assert engine.calls[-1][1][1] == ["a", ImageInput(RED)]
    monkeypatch.setattr("penstock.server.admission.MAX_RESPONSE_BYTES", 300)
    for is_returned, status in ((None, 200), (True, 400)):  # only returned images count in the response size
        body = {"query": "a", "documents": DOCUMENTS, "return_documents": is_returned}
        assert (await client.post("/v1/rerank", json=body)).status_code == status


@pytest.mark.parametrize(
    ("side", "images"),
    [
        ({"content": [part(URI)]}, [RED]),
        ({"content": [part(URI), part(BLUE_URI)]}, [RED, BLUE]),
        ([{"content": [part(URI)]}, {"image": BLUE_URI}], [RED, BLUE]),
    ],
)
async def test_score_takes_images(client, engine, side, images: list[bytes]) -> None:
    response = await client.post("/score", json={"text_1": "a", "text_2": side})
    assert response.status_code == 200, response.text
    assert engine.calls[-1][1][1] == [ImageInput(image) for image in images]


MIXED = images_in("mixed")


@pytest.mark.parametrize(("path", "body", "where"), MIXED)
async def test_text_and_image_in_one_input_are_rejected(client, engine, path: str, body: dict, where: str) -> None:
    response = await client.post(path, json=body)
    message = f"{where} an image beside a text or another image, but fake-model embeds each text and each image"
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(message)
    assert response.json()["error"]["param"] == where.partition(" ")[0].partition("[")[0]


WRONG = [
    *images_in("wrong"),
    ("data:image/" + "x" * 245 + ",AAAA", "is a data URI without a comma in its first 256 characters"),
    ("data:image/png," + "a" * 2000, "larger than the limit of 1000 bytes (--max-image-bytes)"),
    ("data:image/png;base64," + "A" * 2000, "larger than the limit of 1000 bytes (--max-image-bytes)"),
]


@pytest.mark.parametrize(("image", "part"), WRONG)
async def test_wrong_image_is_named(serving, engine, image: str, part: str) -> None:
    async with serving(engine, max_image_bytes=1000) as client:
        response = await client.post("/v1/embeddings", json={"input": ["a", {"image": URI}, {"image": image}]})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "input")
    assert error["message"].startswith("input[2].image ")
    assert part in error["message"]
    assert not engine.calls


async def test_number_of_images_is_limited(serving, engine) -> None:
    async with serving(engine, max_images_per_request=2) as client:
        for number, status in ((2, 200), (3, 400)):
            response = await client.post("/v2/embed", json={"images": [URI] * number})
            assert response.status_code == status
        message = (await client.post("/rerank", json={"query": {"image": URI}, "documents": [{"image": URI}] * 2})).text
    assert "the request has 3 images; the limit is 2" in message
    assert "images has 3 images; the limit is 2 (--max-images-per-request)" in response.json()["message"]


async def test_other_uses_of_images_are_rejected(client, engine) -> None:
    for path, body, param in (
        ("/tokenize", {"messages": chat(part(URI))}, "messages"),
        ("/v1/embeddings", {"input": [{"image": URI}], "late_chunking": True}, "late_chunking"),
        ("/v1/classify", {"messages": chat(part(URI)), "labels": ["a", "b"]}, "messages"),
        ("/embed", {"inputs": [{"image": URI}]}, "inputs"),
    ):
        response = await client.post(path, json=body)
        assert response.status_code in (400, 422), path
        assert param in response.json()["message"]


async def test_large_images_hold_body_memory_until_the_response(serving, engine) -> None:
    large = base64.b64encode(bytes(1_500_000)).decode()
    async with serving(engine) as client:
        bodies = client._transport.app.state.context.admission.bodies
        held = []
        engine.on_enter = lambda: held.append(bodies.used)
        for image, num_bytes in ((large, 1_500_000), ("data:image/png," + "%00" * 500_000, 3 * 1_500_000)):
            response = await client.post("/v1/embeddings", json={"input": [{"image": image}]})
            assert response.status_code == 200
            assert 0 <= held.pop() - len(image) - num_bytes < 1_000
            assert bodies.used == 0


async def test_pixels_for_a_language_model_hold_body_memory(serving, make_engine) -> None:
    spec = ImageSpec(
        patch_size=16,
        resize=ImageResize.AREA,
        size=(0, 0),
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        max_patches=8_000,
        merge_size=2,
        min_pixels=4_096,
        max_pixels=2_000_000,
    )
    engine = make_engine(image_spec=spec)
    small = data_uri(Image.new("RGB", (2_000, 1_000)))
    async with serving(engine) as client:
        bodies = client._transport.app.state.context.admission.bodies
        held = []
        engine.on_enter = lambda: held.append(bodies.used)
        inputs = [{"image": small, "text": "a gate"}, {"image": small}]
        response = await client.post("/v1/embeddings", json={"input": inputs})
        assert response.status_code == 200, response.text
        assert held[0] >= 2 * 3 * 2_000_000 > 50 * len(small)
        assert bodies.used == 0
        bodies.add("another client", bodies.limit - 5_000_000)
        assert (await client.post("/v1/embeddings", json={"input": inputs})).status_code == 503
        engine.image_limits = images.ImageLimits(max_pixels=1_999_999)
        message = (await client.post("/v1/embeddings", json={"input": inputs})).json()["error"]["message"]
        assert "at most 1999999 in all" in message
        bad = await client.post("/v1/embeddings", json={"input": ["a", {"image": "aGVsbG8="}]})
    assert bad.status_code == 400
    assert bad.json()["error"]["message"].startswith("input[1].image is not an image in a supported format")


@pytest.mark.parametrize("is_base64", [True, False])
async def test_escapes_are_decoded_in_slices(client, engine, is_base64: bool, monkeypatch) -> None:
    monkeypatch.setattr(images, "_SLICE_CHARS", 8)
    data = bytes(range(256)) * 3 + b"==%"
    text = quote(base64.b64encode(data), safe="A") if is_base64 else quote(data, safe="=")
    uri = f"data:image/png{';base64' * is_base64},{text}"
    response = await client.post("/v1/embeddings", json={"input": [{"image": uri}]})
    assert response.status_code == 200, response.text
    assert engine.calls[-1][1][0] == [ImageInput(data)]


@pytest.mark.parametrize("image", [URI, "data:image/png,%41"])
async def test_full_body_memory_rejects_images_before_they_are_decoded(serving, engine, image, monkeypatch) -> None:
    monkeypatch.setattr(images, "binascii", None)
    async with serving(engine) as client:
        bodies = client._transport.app.state.context.admission.bodies
        bodies.add("another client", bodies.limit)
        response = await client.post("/v1/embeddings", json={"input": [{"image": image}]})
    assert response.status_code == 503
    assert not engine.calls


class FakeFetcher(ImageFetcher):
    """Returns RED after it has counted its bytes."""

    def __init__(self) -> None:
        super().__init__([AllowedHost.parse("*.example.org")], 1000)
        self.urls: list[str] = []

    async def fetch(self, url, on_bytes) -> bytes:
        self.urls.append(url)
        if "missing" in url:
            raise FetchError("cannot be fetched: its server answered with status 404")
        on_bytes(len(RED))
        return RED


async def test_urls_are_fetched(serving, engine, monkeypatch) -> None:
    fetcher = FakeFetcher()
    monkeypatch.setattr("penstock.server.app.ImageFetcher", lambda hosts, max_bytes: fetcher)
    async with serving(engine, allowed_media_domains="*.example.org") as client:
        admission = client._transport.app.state.context.admission
        response = await client.post(
            "/v1/embeddings", json={"input": ["a", *[{"url": f"{URL}?{i}"} for i in range(20)]]}
        )
        assert response.status_code == 200, response.text
        assert engine.calls[-1][1][0] == ["a", *[ImageInput(RED)] * 20]
        assert sorted(fetcher.urls) == sorted(f"{URL}?{i}" for i in range(20))
        response = await client.post("/v1/embeddings", json={"input": [{"image": URL}, {"image": f"{URL}/missing"}]})
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert message == "input[1].image cannot be fetched: its server answered with status 404."
        assert (admission.fetches.used, admission.bodies.used) == (0, 0)
        admission.fetches.add("another client", admission.fetches.limit)
        response = await client.post("/v1/embeddings", json={"input": [{"image": URL}]})
        assert (response.status_code, response.headers["retry-after"]) == (429, "2")
