"""`penstock embed` on the fake engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.server.embed_jobs import run as run_module
from penstock.server.embed_jobs.run import embed_file
from penstock.server.settings import EmbedSettings, load_settings


@pytest.fixture
def replace_info(engine) -> Callable[..., None]:
    """Replace fields of the engine's ModelInfo."""

    def replace(**fields: object) -> None:
        kind = type(engine.info)
        engine.info = kind(**{name: getattr(engine.info, name) for name in kind.__dataclass_fields__} | fields)

    return replace


@pytest.fixture
def fake(engine, replace_info: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The engine that the command starts; `fake.calls` holds the requests."""

    async def start(config, *, log_level, log_format):
        return engine

    replace_info(path=str(tmp_path))
    monkeypatch.setattr(run_module.AsyncEngine, "start", start)
    monkeypatch.setattr(run_module, "configure_logging", lambda *_: None)
    return engine


@pytest.fixture
def run(fake) -> Callable[..., None]:
    """Embed a file: `run(source, output, on_bad_row="skip")`."""

    def embed(source: Path, output: Path, **settings: object) -> None:
        settings = {"output": str(output), "batch_size": 4, **settings}
        embed_file(str(source), load_settings(EmbedSettings, settings), "fake-model")

    return embed
