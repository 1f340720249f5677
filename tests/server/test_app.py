"""The life of the engines behind the application."""

import subprocess
import sys

import pytest

from penstock.engine.errors import ModelLoadError
from penstock.server.app import create_app
from penstock.server.context import ServedModel
from penstock.server.settings import ServerSettings


async def test_the_engine_is_drained_and_closed(serving, engine) -> None:
    async with serving(engine):
        assert not engine.is_closed
    assert engine.is_closed


async def test_the_resolved_table_is_logged_once(serving, engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with serving(engine):
        pass
    assert caplog.text.count("max_model_len") == 1


async def test_a_default_prompt_that_the_model_lacks_stops_the_start(serving, engine) -> None:
    with pytest.raises(ModelLoadError, match=r"--default-prompt-name.*'passage'"):
        async with serving(engine, default_prompt_name="passage"):
            pass
    assert engine.is_closed


async def test_a_second_model_that_cannot_load_closes_the_first(engine) -> None:
    async def start():
        return engine

    async def fail():
        raise ModelLoadError("no such model")

    app = create_app([ServedModel(("a",), start), ServedModel(("b",), fail)], ServerSettings())
    with pytest.raises(ModelLoadError):
        async with app.router.lifespan_context(app):
            pass
    assert engine.is_closed


async def test_a_failed_start_is_reported_in_one_line() -> None:
    async def fail():
        raise ModelLoadError("The folder x is not a model.")

    app = create_app([ServedModel(("a",), fail)], ServerSettings())
    sent = []

    async def receive() -> dict:
        return {"type": "lifespan.startup"}

    async def send(message: dict) -> None:
        sent.append(message)

    with pytest.raises(ModelLoadError):
        await app({"type": "lifespan", "state": {}}, receive, send)
    assert sent == [{"type": "lifespan.startup.failed", "message": "The folder x is not a model."}]


async def test_two_models_in_one_table(make_engine) -> None:
    import httpx

    async def start_first():
        return make_engine(name="one")

    async def start_second():
        return make_engine("sequence_classifier", ("x", "y"), name="two")

    app = create_app([ServedModel(("one", "uno"), start_first), ServedModel(("two",), start_second)], ServerSettings())
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client,
    ):
        assert (await client.post("/v1/embeddings", json={"input": "a", "model": "uno"})).status_code == 200
        assert (await client.post("/classify", json={"input": "a", "model": "two"})).status_code == 200
        assert (await client.post("/v1/embeddings", json={"input": "a"})).json()["model"] == "one"
        assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == ["one", "uno", "two"]


MODULES = ["cli", "serve", "app", "settings", "embed_file"]


@pytest.mark.parametrize("module", MODULES)
def test_the_server_imports_neither_torch_nor_transformers(module: str) -> None:
    code = (
        f"import sys, penstock.server.{module}\n"
        "heavy = {'torch', 'transformers', 'triton', 'safetensors'}\n"
        "print(*sorted(heavy & {name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
