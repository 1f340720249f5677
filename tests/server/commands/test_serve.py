"""`penstock serve` from its settings to its exit code, with an engine that cannot start."""

import math
import signal
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from penstock.engine import AsyncEngine, EngineConfig
from penstock.engine.protocol.errors import MachineError, ModelLoadError, UnsupportedModelError, WeightError
from penstock.server.commands import cli, serve, served_models
from penstock.server.commands.model_plans import ModelPlan
from penstock.server.settings import ServerSettings, UsageError, load


@pytest.fixture
def _signals_as_before() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_signals_as_before")
@pytest.mark.parametrize(
    ("model", "failure", "line", "code"),
    [
        ("/models/x", WeightError("There are no weights in /models/x."), "There are no weights in /models/x.", 2),
        ("/models/x", UnsupportedModelError("Its tokenizer is unknown."), "Its tokenizer is unknown.", 2),
        ("/models/x", MachineError("There is no CUDA."), "There is no CUDA.", 3),
        ("/models/x", OSError(28, "No space left on device"), "started: [Errno 28] No space left on device", 3),
        ("owner/name", WeightError("There are no weights."), "There are no weights.", 3),
        ("owner/name", ModelLoadError("The hub does not answer."), "The hub does not answer.", 3),
    ],
)
def test_an_engine_that_cannot_start_ends_the_server_in_a_line(
    model: str,
    failure: Exception,
    line: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr(AsyncEngine, "start", fail)
    monkeypatch.setattr(serve, "configure_logging", lambda *_: None)
    monkeypatch.setattr(served_models, "resolved", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", model, "--host", "127.0.0.1", "--port", "0"])
    assert ended.value.code == code
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert line in record.getMessage()
    assert record.exc_info is None
    assert caplog.records[-1] is record  # nothing that uvicorn says of its end hides the cause


@pytest.mark.parametrize(
    ("config", "plan", "settings", "message"),
    [
        ({"in_process": True}, {}, {}, "--in-process"),
        ({"data_parallel": 2}, {}, {}, "leave --data-parallel out"),
        ({}, {}, {"data_dir": "/data"}, "leave --data-dir out"),
        ({}, {"is_preloaded": False}, {}, "every model is loaded at the start; a is to come and go"),
        ({}, {"ttl_s": 60.0}, {}, "a is to come and go"),
        ({}, {}, {"admin_key": "key"}, "leave --admin-key out"),
        ({}, {}, {"admin_key_file": "/keys"}, "leave --admin-key-file out"),
        ({}, {}, {"model_memory": "1GiB"}, "leave --model-memory out"),
    ],
)
def test_what_several_processes_cannot_do_is_refused(
    config: dict[str, object], plan: dict[str, object], settings: dict[str, object], message: str
) -> None:
    made = ModelPlan(("a",), EngineConfig(model="/models/a", **config), **plan)
    with pytest.raises(UsageError, match=message):
        serve.check_workers(load(ServerSettings, {"api_workers": 2, **settings}), [made])


@pytest.mark.parametrize(
    ("given", "device"),
    [
        ({"devices": ("cuda:1",)}, "cuda:1"),
        ({"devices": ("cpu",)}, "cpu"),
        ({"device": "cpu"}, "cpu"),
    ],
)
def test_one_place_is_where_the_engine_of_several_processes_runs(
    given: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Mock()
    monkeypatch.setattr(serve, "_serve_by_workers", served)
    monkeypatch.setattr(serve, "configure_logging", lambda *_: None)
    monkeypatch.setattr(served_models, "resolved", lambda *_: None)
    made = ModelPlan(("a",), EngineConfig(model="/models/a", **given), is_pinned=True, ttl_s=math.inf)
    serve.serve(ServerSettings(api_workers=2, host="127.0.0.1", port=0), [made])
    _, _, ((_, config),), listener, _ = served.call_args.args
    listener.close()
    assert (config.device, config.devices) == (device, ())
    assert bool(config.cores) == (given.get("devices") == ("cpu",))


def test_a_place_that_is_not_there_is_refused() -> None:
    made = ModelPlan(("a",), EngineConfig(model="/models/a", device="cuda:0", devices=("cuda:1",)))
    with pytest.raises(UsageError, match="leave --device cuda:0 out"):
        served_models.kept_config(made, 1)


def test_several_models_that_stay_are_served_by_several_processes() -> None:
    plans = [ModelPlan((name,), EngineConfig(model=name), is_pinned=True, ttl_s=math.inf) for name in ("a", "b")]
    serve.check_workers(ServerSettings(api_workers=2), plans)
