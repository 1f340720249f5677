"""Encodings of vectors: dtypes, byte orders, integers, bits, base64 and bytes."""

import base64
import json

import httpx
import numpy as np
import pytest

from penstock.server.http.quantization import EmbedDtype, quantize
from penstock.server.http.vectors import Encoding, wire_rows

from ...tables import cases

TEXTS = ["hello world", "goodbye"]
QUANTIZED = {"int8": np.int8, "uint8": np.uint8, "binary": np.int8, "ubinary": np.uint8}


async def post(client: httpx.AsyncClient, **body: object) -> httpx.Response:
    response = await client.post("/v1/embeddings", json={"input": TEXTS, **body})
    assert response.status_code == 200, response.text
    return response


async def embeddings(client: httpx.AsyncClient, **body: object) -> list:
    return [row["embedding"] for row in (await post(client, **body)).json()["data"]]


async def truth(client: httpx.AsyncClient) -> np.ndarray:
    return np.array(await embeddings(client), np.float32)


def decoded(raw: bytes, dtype: str, order: str) -> np.ndarray:
    if dtype == "bfloat16":  # the upper half of float32
        return (np.frombuffer(raw, f"{order}u2").astype(np.uint32) << 16).view(np.float32)
    if dtype == "fp8_e5m2":  # the upper half of float16
        return (np.frombuffer(raw, np.uint8).astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    if dtype == "fp8_e4m3":
        code = np.frombuffer(raw, np.uint8).astype(int)
        exponent, mantissa = code >> 3 & 15, code & 7
        size = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
        return np.where(code & 0x80, -size, size)
    return np.frombuffer(raw, order + {"float32": "f4", "float16": "f2"}[dtype])


@cases(__file__, "dtype", "rtol", "atol")
async def test_rows_are_written_in_each_dtype_and_byte_order(client, dtype: str, rtol: float, atol: float) -> None:
    expected = await truth(client)
    for endianness, order in ((None, "<"), ("native", "="), ("little", "<"), ("big", ">")):
        options = {"embed_dtype": dtype, "endianness": endianness}
        texts = await embeddings(client, encoding_format="base64", **options)
        rows = np.stack([decoded(base64.b64decode(text, validate=True), dtype, order) for text in texts])
        np.testing.assert_allclose(rows, expected, rtol=rtol, atol=atol)
        response = await post(client, encoding_format="bytes_only", **options)
        assert "metadata" not in response.headers
        np.testing.assert_array_equal(decoded(response.content, dtype, order), rows.ravel())
    numbers = np.array(await embeddings(client, **options), np.float32)
    np.testing.assert_array_equal(numbers, expected)  # JSON numbers have no dtype


async def test_bytes_have_metadata_in_a_header(client: httpx.AsyncClient) -> None:
    response = await post(client, encoding_format="bytes", embed_dtype="float16", model="alias")
    assert response.headers["content-type"] == "application/octet-stream"
    metadata = json.loads(response.headers["metadata"])
    assert set(metadata) == {"id", "created", "model", "data", "usage"}
    assert metadata["model"] == "alias"
    assert metadata["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    rows = []
    for i, row in enumerate(metadata["data"]):
        assert (row["index"], row["embed_dtype"], row["endianness"]) == (i, "float16", "little")
        rows.append(np.frombuffer(response.content[row["start"] : row["end"]], "<f2").reshape(row["shape"]))
    assert metadata["data"][-1]["end"] == len(response.content)
    np.testing.assert_array_equal(rows, (await truth(client)).astype(np.float16))


async def test_metadata_header_escapes_model_names(serving, engine) -> None:
    async with serving(engine, names=("modèle-東",)) as client:
        response = await post(client, encoding_format="bytes")
    assert json.loads(response.headers["metadata"])["model"] == "modèle-東"


async def test_too_long_metadata_header_is_rejected(client: httpx.AsyncClient, engine) -> None:
    body = {"input": ["a"] * 513, "encoding_format": "bytes"}
    response = await client.post("/v1/embeddings", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "encoding_format")
    assert "bytes_only" in response.json()["message"]
    assert not engine.calls
    response = await client.post("/v1/embeddings", json={**body, "input": ["a"] * 512})
    assert len(response.headers["metadata"]) < 65_000
    assert (await client.post("/v1/embeddings", json={**body, "encoding_format": "bytes_only"})).status_code == 200


@pytest.mark.parametrize("kind", QUANTIZED)
async def test_integers_are_written_in_json(client: httpx.AsyncClient, kind: str) -> None:
    expected, limits = await truth(client), np.iinfo(QUANTIZED[kind])
    for body in (
        {"encoding_format": kind},
        {"embedding_type": kind},
        {"embedding_type": [kind]},
        {"encoding_type": kind},
        {"embedding_type": kind, "encoding_format": "base64"},  # the OpenAI SDKs add base64
        {"output_dtype": kind},
        {"output_dtype": kind, "encoding_format": "float"},
    ):
        rows = await embeddings(client, **body)
        assert all(type(value) is int and limits.min <= value <= limits.max for row in rows for value in row)
        if kind.endswith("binary"):
            bits = np.unpackbits((np.array(rows) + (128 if kind == "binary" else 0)).astype(np.uint8), axis=1)
            np.testing.assert_array_equal(bits, expected > 0)
        else:
            signed = np.array(rows) - (128 if kind == "uint8" else 0)
            np.testing.assert_allclose(signed / 127, expected, atol=0.51 / 127)


@pytest.mark.parametrize("kind", QUANTIZED)
async def test_integers_are_written_in_base64_and_bytes(client: httpx.AsyncClient, kind: str) -> None:
    expected = np.array(await embeddings(client, output_dtype=kind))
    texts = await embeddings(client, output_dtype=kind, encoding_format="base64")  # as voyageai does
    rows = [np.frombuffer(base64.b64decode(text), QUANTIZED[kind]) for text in texts]
    np.testing.assert_array_equal(rows, expected)
    for body in ({"embedding_type": kind}, {"output_dtype": kind}):
        response = await post(client, encoding_format="bytes", **body)
        np.testing.assert_array_equal(np.frombuffer(response.content, QUANTIZED[kind]), expected.ravel())
        data = json.loads(response.headers["metadata"])["data"]
        assert [(row["embed_dtype"], row["shape"]) for row in data] == [(kind, [expected.shape[1]])] * 2


async def test_several_types_are_written_by_name(client: httpx.AsyncClient) -> None:
    rows = await embeddings(client, embedding_type=["float", "base64", "ubinary", "float"], encoding_format="base64")
    assert [set(row) for row in rows] == [{"float", "base64", "ubinary"}] * 2
    expected = await truth(client)
    np.testing.assert_array_equal(np.array([row["float"] for row in rows], np.float32), expected)
    for row, vector in zip(rows, expected, strict=True):
        np.testing.assert_array_equal(np.frombuffer(base64.b64decode(row["base64"]), "<f4"), vector)


@pytest.mark.parametrize("field", ["encoding_format", "embedding_type", "output_dtype"])
async def test_bits_need_a_width_of_whole_bytes(serving, make_engine, field: str) -> None:
    engine = make_engine(is_matryoshka=True)
    async with serving(engine) as client:
        response = await client.post("/v1/embeddings", json={"input": "a", "dimensions": 6, field: "binary"})
        inputs = [{"content": [{"type": "text", "text": "a"}]}]
        body = {"inputs": inputs, "output_dimension": 6, "output_dtype": "binary"}
        assert (await client.post("/v1/multimodalembeddings", json=body)).status_code == 400
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)
    assert "6 dimensions" in response.json()["message"]
    assert not engine.calls


@cases(__file__, "dtype", "value", "code")
def test_small_dtypes_round_to_even(dtype: str, value: float, code: int) -> None:
    (row,) = wire_rows(np.array([[value]], np.float32), Encoding(dtype=EmbedDtype(dtype)))
    assert row.tolist() == [code]


def test_length_of_a_vector_does_not_change_its_integers() -> None:
    rows = np.random.default_rng(3).normal(size=(2, 64)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    np.testing.assert_array_equal(quantize(4 * rows, "int8"), quantize(rows, "int8"))


def test_extreme_values_use_the_whole_range() -> None:
    rows = np.zeros((3, 1024), np.float32)
    rows[1, 0], rows[2, 5] = 1, -1
    assert not quantize(rows, "int8")[0].any()
    assert (quantize(rows, "uint8")[0] == 128).all()
    assert (quantize(rows, "int8")[1, 0], quantize(rows, "uint8")[1, 0]) == (127, 255)
    assert (quantize(rows, "int8")[2, 5], quantize(rows, "uint8")[2, 5]) == (-127, 1)
