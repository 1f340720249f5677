"""`penstock serve` from its settings to its exit code, with an engine that cannot start."""

import signal
from collections.abc import Iterator

import pytest

from penstock.engine import AsyncEngine
from penstock.engine.protocol.errors import ModelLoadError
from penstock.server.commands import cli, serve, served_models


@pytest.fixture
def _signals_as_before() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_signals_as_before")
@pytest.mark.parametrize(
    ("failure", "line"),
    [
        (ModelLoadError("There are no weights in /models/x."), "There are no weights in /models/x."),
        (OSError(28, "No space left on device"), "could not be started: [Errno 28] No space left on device"),
    ],
)
def test_an_engine_that_cannot_start_ends_the_server_in_a_line(
    failure: Exception, line: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr(AsyncEngine, "start", fail)
    monkeypatch.setattr(serve, "configure_logging", lambda *_: None)
    monkeypatch.setattr(served_models, "resolved", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "/models/x", "--host", "127.0.0.1", "--port", "0"])
    assert ended.value.code == serve.START_FAILED
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert line in record.getMessage()
    assert record.exc_info is None
    assert caplog.records[-1] is record  # nothing that uvicorn says of its end hides the cause
