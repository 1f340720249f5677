"""The OpenAPI document fits the requests, responses, errors and headers of the server."""

import json
import re
from collections.abc import Iterator
from functools import cache

import httpx
import pytest
import pytest_asyncio
from jsonschema import Draft202012Validator

from penstock.engine.client.core_supervisor import EngineState
from penstock.engine.protocol.tasks import PoolingTask
from penstock.server import penstock_version
from penstock.server.app import create_app
from penstock.server.dialects import DIALECTS
from penstock.server.models.served_model import ServedModel
from penstock.server.settings import ServerSettings, load_settings

from ..tables import table
from .fake_engine import FakeEngine, serving

SPARSE = {"tasks": (PoolingTask.SPARSE_EMBED,), "sparse": object()}
WITHOUT_FORWARD = {"/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize", "/decode", "/api/show", "/api/pull"}


@cache
def document_of(**settings: object) -> dict:
    return create_app([ServedModel(("served", "other"), None)], load_settings(ServerSettings, settings)).openapi()


def operations() -> dict[tuple[str, str], dict]:
    paths = document_of()["paths"].items()
    return {(method, path): operation for path, item in paths for method, operation in item.items()}


def posts() -> list[str]:
    return [path for method, path in operations() if method == "post"]


def check_response(method: str, path: str, response: httpx.Response) -> None:
    """Compares status, headers and body of a response with the document."""
    declared = operations()[method, path]["responses"][str(response.status_code)]
    for name, header in declared["headers"].items():
        if "$ref" in header:
            header = document_of()["components"]["headers"][header["$ref"].rsplit("/", 1)[-1]]
        if header.get("required"):
            assert name in response.headers, (path, response.status_code, name)
    media = response.headers["content-type"].partition(";")[0]
    schema = declared["content"][media].get("schema", {})
    if media == "application/json":
        validator = Draft202012Validator({**schema, "components": document_of()["components"]})
        errors = [error.message for error in validator.iter_errors(response.json())]
        assert not errors, (path, response.text, errors)


def examples_of(path: str) -> list[dict]:
    body = operations()["post", path]["requestBody"]["content"]["application/json"]["schema"]
    schemas = [body] if "examples" in body else body.get("oneOf") or body.get("anyOf") or [body]
    examples = []
    for schema in schemas:
        name = schema.get("$ref", "").rsplit("/", 1)[-1]
        own = schema.get("examples") or document_of()["components"]["schemas"][name]["examples"]
        assert own
        validator = Draft202012Validator({**body, "components": document_of()["components"]})
        for example in own:
            validator.validate(example)
        examples += own
    return examples


def with_known_tokens(example: dict) -> dict:
    """Replaces token ids by ids of the fake model."""
    flat = isinstance(example.get("input"), list) and isinstance(example["input"][0], int)
    return {**example, "input": [1, 2, 3]} if flat else example


KINDS = {
    "classifier": (("sequence_classifier", ("good", "bad")), {}, ["/predict"]),
    "sparse": ((), SPARSE, ["/embed_sparse"]),
    "embedding": ((), {}, None),
}


@pytest.fixture(params=KINDS)
async def suited(request, serving, make_engine):
    """Returns an engine, a client of its server, and the paths of its model."""
    arguments, fields, paths = KINDS[request.param]
    paths = paths or [path for path in posts() if path not in ("/predict", "/embed_sparse")]
    engine = make_engine(*arguments, image=make_engine().info, **fields)
    async with serving(engine, names=("served",)) as client:
        yield engine, client, paths


async def test_responses_to_examples_fit_the_document(suited) -> None:
    _, client, paths = suited
    for path in paths:
        for example in examples_of(path):
            response = await client.post(path, json=with_known_tokens(example))
            assert response.status_code == 200, (path, example, response.text)
            check_response("post", path, response)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def full_document(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Returns the document with all optional routes."""
    folder = tmp_path_factory.mktemp("document") / "data"
    async with serving(FakeEngine(), data_dir=folder, admin_key=("a",), operator_routes=True) as client:
        return (await client.get("/openapi.json", headers={"authorization": "Bearer a"})).json()


def test_every_operation_is_described(full_document: dict) -> None:
    described = [operation for item in full_document["paths"].values() for operation in item.values()]
    statuses = {status for operation in described for status in operation["responses"]}
    assert statuses == set(table(__file__, "documented_statuses"))
    for path, item in full_document["paths"].items():
        for operation in item.values():
            assert operation["tags"], path
            assert operation["description"], path
            assert operation.get("requestBody", {"required": True})["required"], path
            for status, response in operation["responses"].items():
                for media, content in response.get("content", {}).items():
                    assert media != "application/json" or content["schema"], (path, status)
    upload = full_document["paths"]["/v1/files"]["post"]["requestBody"]["content"]["multipart/form-data"]
    assert upload["schema"]["required"] == ["file", "purpose"]


def test_every_field_of_a_body_is_described(full_document: dict) -> None:
    operations = [operation for item in full_document["paths"].values() for operation in item.values()]
    names = set(re.findall(r"schemas/(\w+)", json.dumps([operation.get("requestBody") for operation in operations])))
    assert len(names) > 20
    for name in names:
        for field, schema in full_document["components"]["schemas"][name]["properties"].items():
            assert "$ref" in schema or '"description"' in json.dumps(schema), (name, field)


def integers_of(schema: dict) -> Iterator[dict]:
    """Yields the schemas of integers in a schema of a field."""
    if schema.get("type") == "integer":
        yield schema
    for inner in (*schema.get("anyOf", ()), schema.get("items", {})):
        yield from integers_of(inner) if inner else ()


async def test_integers_of_bodies_are_bounded(client: httpx.AsyncClient, full_document: dict) -> None:
    operations = [operation for item in full_document["paths"].values() for operation in item.values()]
    names = set(re.findall(r"schemas/(\w+)", json.dumps([operation.get("requestBody") for operation in operations])))
    for name in names - {"BatchRequest"}:
        for field, schema in full_document["components"]["schemas"][name]["properties"].items():
            least = 1 if "dimension" in field or field == "truncate_prompt_tokens" else 0
            expected = (-999, 999) if field == "priority" else (least, 2**53 - 1)
            for integer in integers_of(schema):
                assert (integer.get("minimum"), integer.get("maximum")) == expected, (name, field)
    for field, values in {"priority": (-1000, 1000), "top_n": (-1, 2**53), "max_tokens_per_doc": (-1, 2**53)}.items():
        for value in values:
            response = await client.post("/v2/rerank", json={"query": "a", "documents": ["b"], field: value})
            assert (response.status_code, field in response.text) == (400, True), value


def test_examples_name_the_served_model() -> None:
    def example_of(document: dict) -> list[object]:
        return [parameter.get("example") for parameter in document["paths"]["/v1/models/{name}"]["get"]["parameters"]]

    assert example_of(document_of()) == ["served", None]
    assert example_of(create_app([], ServerSettings()).openapi()) == [None, None]


def test_every_component_is_used(full_document: dict) -> None:
    components = full_document["components"]
    used, texts = set(), [json.dumps(full_document["paths"])]
    while texts:
        for kind, name in re.findall(r'"#/components/(\w+)/([^"]+)"', texts.pop()):
            if (kind, name) not in used:
                used.add((kind, name))
                texts.append(json.dumps(components[kind][name]))
    kinds = components.keys() - {"securitySchemes"}  # operations name them without a reference
    assert {(kind, name) for kind in kinds for name in components[kind]} == used


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/encode", "/pooling", "/classify"])
def test_body_has_one_kind_of_input(path: str) -> None:
    schema = operations()["post", path]["requestBody"]["content"]["application/json"]["schema"]
    validator = Draft202012Validator({**schema, "components": document_of()["components"]})
    texts, chat = {"input": ["a"]}, {"messages": [{"role": "user", "content": "a"}]}
    is_valid = [validator.is_valid(body) for body in (texts, chat, texts | {"messages": None}, texts | chat, {})]
    assert is_valid == [True, True, True, False, False]


async def test_get_responses_fit_the_document(serving, engine) -> None:
    async with serving(engine, names=("served", "other")) as client:
        for path in (path for method, path in operations() if method == "get"):
            response = await client.get(path.replace("{name}", "served"))
            assert response.status_code == 200
            check_response("get", path, response)
        engine.state = EngineState.DEAD
        for path in ("/health", "/health/live", "/health/ready"):
            response = await client.get(path)
            assert response.status_code == 503
            check_response("get", path, response)
    parameters = operations()["get", "/v1/models/{name}"]["parameters"]
    assert parameters[0]["example"] == "served"


WRONG = [*table(__file__, "rejections_fit_the_document"), ("x" * 5000, {})]


async def test_rejections_fit_the_document(serving, engine) -> None:
    async with serving(engine, max_body_bytes=4000) as client:
        for path in posts():
            statuses = set()
            bodies = [(json.dumps({**example, "model": "unknown"}).encode(), {}) for example in examples_of(path)]
            for body, headers in [*WRONG, *bodies]:
                headers = {"content-type": "application/json", **headers}
                response = await client.post(path, content=body, headers=headers)
                statuses.add(response.status_code)
                check_response("post", path, response)
            if path.startswith("/api/"):  # Ollama's routes accept any Content-Type
                statuses.add(415)
            assert statuses in ({400, 404, 413, 415}, {400, 404, 413, 415, 422}), path


async def test_documented_request_headers_are_read(suited) -> None:
    _, client, paths = suited
    for path in paths:
        named = {parameter["$ref"].rsplit("/", 1)[-1] for parameter in operations()["post", path]["parameters"]}
        expected = {"RequestId", "TraceParent", "RequestTimeout", "Priority"}
        assert named == (expected - {"RequestTimeout", "Priority"} if path in WITHOUT_FORWARD else expected)
        for header in ("x-request-timeout", "x-priority"):
            for example in examples_of(path):
                response = await client.post(path, json=with_known_tokens(example), headers={header: "soon"})
                assert response.status_code in ((200,) if path in WITHOUT_FORWARD else (400, 422)), path
                check_response("post", path, response)


async def test_document_lists_keys_of_routes_that_need_one(serving, make_engine) -> None:
    assert "securitySchemes" not in document_of()["components"]
    assert not any("security" in operation or "401" in operation["responses"] for operation in operations().values())
    document = document_of(api_key=("k",))
    assert set(document["components"]["securitySchemes"]) == {"bearer", "apiKey"}
    assert [document["info"][name] for name in ("title", "version")] == ["penstock", penstock_version()]
    async with serving(make_engine(), api_key=("k",)) as client:
        for path, item in document["paths"].items():
            for method, operation in item.items():
                response = await client.request(method, path)
                is_closed = operation.get("security") == [{"bearer": []}, {"apiKey": []}]
                assert is_closed == (response.status_code == 401) == ("401" in operation["responses"]), path
                assert not is_closed or response.headers["www-authenticate"] == "Bearer"
                if is_closed:
                    schema = operation["responses"]["401"]["content"]["application/json"]["schema"]
                    Draft202012Validator({**schema, "components": document["components"]}).validate(response.json())


async def test_allow_names_every_method_of_a_path(client: httpx.AsyncClient) -> None:
    for path, methods in {"/health": "GET, HEAD", "/": "GET, HEAD, POST", "/rerank": "POST", "/info": "GET"}.items():
        response = await client.options(path)
        assert (response.status_code, response.headers["allow"]) == (405, methods)


@pytest.mark.parametrize(("name", "is_allowed"), [("allowed", True), ("forbidden", False)])
async def test_document_allows_accepted_bodies_only(serving, make_engine, name: str, is_allowed: bool) -> None:
    engine, classifier = make_engine(image=make_engine().info), make_engine("sequence_classifier", ("good", "bad"))
    async with serving(engine, names=("served",), unknown_fields="reject") as client, serving(classifier) as other:
        for path, body in table(__file__, f"bodies_{name}"):
            schema = operations()["post", path]["requestBody"]["content"]["application/json"]["schema"]
            validator = Draft202012Validator({**schema, "components": document_of()["components"]})
            assert validator.is_valid(body) is is_allowed, (path, body)
            response = await (other if path == "/predict" else client).post(path, json=body)
            assert response.status_code in ((200,) if is_allowed else (400, 422)), (path, body, response.text)
            check_response("post", path, response)


def test_openapi_document_allows_ignored_keys_only() -> None:
    components = document_of()["components"]
    for path, body, names in table(__file__, "bodies"):
        if path in ("/", "/invocations"):
            continue
        schema = operations()["post", path]["requestBody"]["content"]["application/json"]["schema"]
        validator = Draft202012Validator({**schema, "components": components})
        validator.validate({**body, "user": "u", "unknown_key": None})
        ignored = [key for dialect in DIALECTS if dialect.name in names for key in dialect.ignored_keys]
        validator.validate({**body, **dict.fromkeys(ignored, "x")})
        assert not validator.is_valid({**body, "unknown_key": 1}), path
    embedding = components["schemas"]["EmbeddingRequest"]["properties"]
    assert embedding["drop_params"]["description"].startswith("Accepted and ignored: ")
