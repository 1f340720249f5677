import contextlib
import json
import math
import shutil
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock, call

import pytest

from penstock.engine import AsyncEngine, EngineConfig
from penstock.engine.protocol.errors import MachineError, WeightError
from penstock.server.commands import cli, model_start, serve
from penstock.server.commands.model_start import served_models
from penstock.server.models.served_model import ServedModel
from penstock.server.settings import ServerSettings, UsageError, load_settings
from penstock.server.workers.supervisor import NothingServedError

from ...engine.model_files.folders import BERT
from ...tables import cases

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:53aa\nsize 90868376\n"


@pytest.fixture
def _restored_signals() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_restored_signals")
@pytest.mark.parametrize(
    ("model", "failure", "line", "code"),
    [
        ("/models/x", WeightError("There are no weights in /models/x."), "There are no weights in /models/x.", 2),
        ("/models/x", MachineError("There is no CUDA."), "There is no CUDA.", 3),
        ("/models/x", OSError(28, "No space left on device"), "started: [Errno 28] No space left on device", 3),
        ("owner/name", WeightError("There are no weights."), "There are no weights.", 3),
    ],
)
def test_failed_engine_start_is_one_line_and_a_code(model, failure, line: str, code: int, monkeypatch, caplog) -> None:
    monkeypatch.setattr(AsyncEngine, "start", AsyncMock(side_effect=failure))
    monkeypatch.setattr(serve, "configure_logging", lambda *_: None)
    monkeypatch.setattr(model_start, "resolve_local_model", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", model, "--host", "127.0.0.1", "--port", "0"])
    assert ended.value.code == code
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert line in record.getMessage()
    assert record.exc_info is None
    assert caplog.records[-1] is record  # the last line is the cause


@cases(__file__, "config", "plan", "settings", "message")
def test_settings_unsupported_by_several_processes_are_rejected(config, plan, settings, message: str) -> None:
    plans = [ServedModel(("b",), config=EngineConfig(model="b"), is_pinned=True, ttl_s=math.inf)]
    serve.check_workers(ServerSettings(api_workers=2), plans)
    plans.append(ServedModel(("a",), config=EngineConfig(model="/models/a", **config), **plan))
    with pytest.raises(UsageError, match=message):
        serve.check_workers(load_settings(ServerSettings, {"api_workers": 2, **settings}), plans)


@pytest.mark.parametrize(("max_loaded", "num_engines"), [(None, 3), (2, 2), (5, 3)])
def test_machine_is_shared_by_the_engines_in_memory(max_loaded: int | None, num_engines: int, monkeypatch) -> None:
    served = Mock(side_effect=UsageError("no more is needed"))
    monkeypatch.setattr(serve, "served_models", served)
    monkeypatch.setattr(serve, "configure_logging", lambda *_: None)
    plans = [ServedModel((name,), config=EngineConfig(model=name)) for name in "abc"]
    with pytest.raises(UsageError):
        serve.serve(ServerSettings(max_loaded_models=max_loaded), plans)
    assert served.call_args.args[2] == num_engines


@pytest.mark.usefixtures("_restored_signals")
@pytest.mark.parametrize("has_started", [True, False])
def test_server_that_has_not_started_exits_with_an_error(has_started: bool, tmp_path: Path, monkeypatch) -> None:
    server = Mock(started=has_started)
    monkeypatch.setattr(serve, "HttpServer", Mock(return_value=server))
    monkeypatch.setattr(serve, "create_app", created := Mock(wraps=serve.create_app))
    monkeypatch.setattr(serve, "raise_file_limit", raise_file_limit := Mock())
    monkeypatch.setattr(serve, "freeze_gc", freeze_gc := Mock())
    monkeypatch.setattr(serve, "configure_logging", lambda *_: None)
    settings = ServerSettings(host="127.0.0.1", port=0)
    with contextlib.nullcontext() if has_started else pytest.raises(SystemExit) as ended:
        serve.serve(settings, [plan(model(tmp_path / "a"), "a")])
    assert has_started or ended.value.code == serve.START_FAILED
    raise_file_limit.assert_called_once_with()
    freeze_gc.assert_not_called()
    created.call_args.kwargs["on_ready"]()
    freeze_gc.assert_called_once_with()
    (listener,) = server.run.call_args.kwargs["sockets"]
    listener.close()


@pytest.mark.parametrize(
    ("given", "device"),
    [({"devices": ("cuda:1",)}, "cuda:1"), ({"devices": ("cpu",)}, "cpu"), ({"device": "cpu"}, "cpu")],
)
def test_one_device_is_used_by_several_processes(given: dict[str, Any], device: str, monkeypatch, caplog) -> None:
    caplog.set_level("INFO")
    served = Mock()
    monkeypatch.setattr(serve, "_serve_by_workers", served)
    monkeypatch.setattr(serve, "configure_logging", lambda *_: None)
    monkeypatch.setattr(model_start, "resolve_local_model", lambda *_: None)
    plan = ServedModel(("a",), config=EngineConfig(model="/models/a", **given), is_pinned=True, ttl_s=math.inf)
    serve.serve(ServerSettings(api_workers=2, host="127.0.0.1", port=0, env_notes=("PORT=0 sets --port",)), [plan])
    assert "PORT=0 sets --port" in caplog.messages
    _, _, (model,), (listener,), _ = served.call_args.args
    config = model.config
    listener.close()
    assert (config.device, config.devices) == (device, ())
    assert bool(config.cores) == (given.get("devices") == ("cpu",))


@pytest.mark.parametrize(
    ("failures", "signals", "message", "code"),
    [
        ([], [signal.SIGTERM, signal.SIGINT], "", None),
        ([], [signal.SIGINT], "", KeyboardInterrupt),
        ([NothingServedError()], [signal.SIGINT], "no HTTP process can serve", 3),
        ([WeightError("no weights")], [], "no weights", 2),
    ],
)
def test_end_of_several_processes_has_an_exit_code(failures, signals, message, code, monkeypatch, caplog) -> None:
    supervisor, plans = Mock(failures=failures, signals=signals, run=AsyncMock()), [plan(Path("/models/a"), "a")]
    made = Mock(return_value=supervisor)
    monkeypatch.setattr("penstock.server.workers.supervisor.WorkerSupervisor", made)
    monkeypatch.setattr(serve, "raise_file_limit", raise_file_limit := Mock())
    settings = ServerSettings(api_workers=2)
    with contextlib.nullcontext() if code is None else pytest.raises((SystemExit, KeyboardInterrupt)) as ended:
        serve._serve_by_workers(settings, plans, plans, ["listener"], "process")
    assert code is None or getattr(ended.value, "code", KeyboardInterrupt) == code
    assert [record.getMessage() for record in caplog.records] == [message] * bool(message)
    supervisor.run.assert_awaited_once_with("listener")
    raise_file_limit.assert_called_once_with()
    assert serve._exit_code([WeightError("no weights"), MachineError("no GPU")], plans) == 2, "the first error counts"
    assert made.call_args.args[:3] == (settings, plans, "process")
    with pytest.raises(UsageError, match="--api-key-file: /missing"):
        serve._serve_by_workers(ServerSettings(api_key_file=Path("/missing")), plans, plans, [], None)


@cases(__file__, "settings", "message")
def test_unusable_metrics_port_is_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        serve.bound_sockets(load_settings(ServerSettings, {"host": "127.0.0.1", **settings}))


def test_port_of_a_stopped_server_can_be_bound_at_once() -> None:
    for listener in serve.bound_sockets(ServerSettings(host="127.0.0.1", port=0, metrics_port=0)):
        with listener:
            assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)


@pytest.mark.parametrize("api_key", [(), ("k",)])
def test_ready_server_warns_only_without_a_key(api_key: tuple[str, ...], caplog) -> None:
    caplog.set_level("INFO")
    serve._announce([], ServerSettings(api_key=api_key), [Mock(getsockname=lambda: ("::", 81))])
    assert "http://localhost:81/ " in caplog.messages[0]
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"][: 2 - len(api_key)]


def test_contradicting_devices_are_rejected() -> None:
    plan = ServedModel(("a",), config=EngineConfig(model="/models/a", device="cuda:0", devices=("cuda:1",)))
    with pytest.raises(UsageError, match="remove --device cuda:0"):
        model_start.single_core_config(plan, 1)
    assert (
        model_start.single_core_config(ServedModel(("a",), config=EngineConfig(model="/models/a")), 3).num_engines == 3
    )


def header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


def model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(BERT))
    (folder / "model.safetensors").write_bytes(header(b"{}"))
    return folder


def plan(folder: Path, name: str, **more: Any) -> ServedModel:
    return ServedModel((name,), config=EngineConfig(model=str(folder), name=name), **more)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("model.safetensors", POINTER),
        ("model.safetensors", header(b'{"a": [1]}')),
        ("config.json", b""),
        ("tokenizer_config.json", b"\xff\xfe"),
    ],
)
def test_damaged_model_keeps_no_other_from_serving(file: str, content: bytes, tmp_path: Path) -> None:
    good, bad = model(tmp_path / "good"), model(tmp_path / "bad")
    (bad / "modules.json").write_text("[]")
    (bad / file).write_bytes(content)
    plans = [plan(bad, str(bad)), replace(plan(good, "good"), names=("good", str(good), "alias"))]
    models = served_models(plans, ServerSettings(model_memory=2**30), 2)
    names = [(served.names[0], set(served.hidden_names)) for served in models]
    assert names == [(str(bad), set()), ("good", {str(good)})], "a path on the disk is not shown"
    assert models[1].info is not None
    assert models[1].num_bytes == (good / "model.safetensors").stat().st_size


async def test_started_process_is_used_by_the_first_load_of_the_first_model(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(AsyncEngine, "start", start := AsyncMock())
    plans, process, cache = [plan(model(tmp_path / name), name) for name in ("first", "second")], Mock(), Mock()
    first, second = served_models(plans, ServerSettings(log_format="json"), 2, process, cache)
    for served in (second, first, first):
        await served.start()
    assert [call.kwargs["process"] for call in start.call_args_list] == [None, process, None]
    engines = [(call.args[0].name, call.args[0].num_engines) for call in start.call_args_list]
    assert engines == [("second", 2), ("first", 2), ("first", 2)]
    expected = {"log_level": "INFO", "log_format": "json", "process": None, "cache": cache}
    assert start.call_args.kwargs == expected


def test_missing_folder_keeps_no_other_from_serving(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plans = [plan(model(tmp_path / "good"), "good"), plan(tmp_path / "nothing", "gone", is_preloaded=False)]
    models = served_models(plans, ServerSettings(), 2)
    assert [served.info is None for served in models] == [False, True]
    assert models[1].num_bytes == 0
    assert "gone could not be loaded now" in caplog.text


def test_start_is_rejected_if_no_model_is_usable(tmp_path: Path) -> None:
    bad = model(tmp_path / "bad")
    (bad / "config.json").write_text("")
    shutil.copytree(bad, tmp_path / "worse")
    with pytest.raises(UsageError, match=r"bad/config\.json cannot be read"):
        served_models([plan(bad, "bad"), plan(tmp_path / "worse", "worse")], ServerSettings(), 2)


def test_missing_prompt_is_rejected(tmp_path: Path) -> None:
    plans = [plan(model(tmp_path / "a"), "a"), plan(model(tmp_path / "b"), "b", default_prompt_name="query")]
    with pytest.raises(UsageError, match="b has no prompt 'query'"):
        served_models(plans, ServerSettings(), 2)


def test_model_above_the_memory_limit_names_both_sizes(tmp_path: Path) -> None:
    big = model(tmp_path / "big")
    text = json.dumps({"a": {"dtype": "F32", "shape": [1 << 18], "data_offsets": [0, 1 << 20]}}).encode()
    (big / "model.safetensors").write_bytes(header(text) + bytes(1 << 20))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (adapter / "adapter_model.safetensors").write_bytes(header(text) + bytes(1 << 20))
    given = plan(big, "big")
    for fields, size in (
        ({}, "1.0"),
        ({"dtype": "bfloat16"}, "0.5"),
        ({"devices": ("cuda:0", "cuda:1")}, "2.0"),
        ({"adapter": (f"legal={adapter}",)}, "2.0"),
    ):
        changed = replace(given, config=replace(given.config, **fields))
        with pytest.raises(UsageError, match=f"big alone needs {size} MiB, but the limit is 0.2 MiB"):
            served_models([changed], ServerSettings(model_memory=2**18), 1)
    served_models([given], ServerSettings(model_memory=2**20), 1)
    inside = replace(given.config, adapter=(f"legal={shutil.move(adapter, big / 'adapter')}",))
    served_models([replace(given, config=inside)], ServerSettings(model_memory=2**21), 1)


def test_cache_is_off_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "VectorCache", made := Mock())
    assert serve.open_cache(ServerSettings()) is None
    serve.open_cache(ServerSettings(cache=2**30, cache_dir_size=2**20))
    serve.open_cache(ServerSettings(cache_dir=tmp_path, cache_dir_size=2**20))
    assert made.call_args_list == [call(2**30, None, 2**20), call(0, tmp_path, 2**20)]


def test_cache_of_several_http_processes_is_rejected(tmp_path: Path) -> None:
    for given in ({"cache": 2**30}, {"cache_dir": tmp_path}):
        with pytest.raises(UsageError, match="--api-workers: the cache needs a single process"):
            serve.open_cache(ServerSettings(api_workers=2, **given))
    assert serve.open_cache(ServerSettings(api_workers=2)) is None
