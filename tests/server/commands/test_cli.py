"""The command line: exit codes, messages of one line, help and `penstock info`."""

import argparse
import asyncio
import contextlib
import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.server import penstock_version
from penstock.server.commands import cli
from penstock.server.commands.flags import add_flags
from penstock.server.commands.model_arguments import DEFAULT_NAMES, model_and_names
from penstock.server.settings import EmbedSettings, UsageError

from ...tables import cases, table

COMMAND = (sys.executable, "-P", "-m", "penstock.server")


@cases(__file__, "arguments", "message")
def test_invalid_command_line_is_one_line_with_code_2(arguments: str, message: str, capsys) -> None:
    assert cli.main(arguments.split()) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    assert shown.err.startswith("penstock: error: ")
    assert message in shown.err


def test_no_command_prints_the_help_with_code_2(capsys) -> None:
    assert cli.main([]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("usage: penstock")
    assert re.search(r"\ncommands:\n  COMMAND\n    serve +Serve models over HTTP", shown.err)
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"penstock {penstock_version()}\n"


def test_output_that_cannot_be_written_ends_with_one_line() -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([*COMMAND, "models"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    message = "penstock: error: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, message)
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*COMMAND, "models"], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (cli.BROKEN_PIPE, "")


@pytest.mark.parametrize("command", ["embed in.txt --output out.npy", "bench http://x"])
def test_sigterm_ends_a_command_only_while_it_runs(command: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    async def wait() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)
        except asyncio.CancelledError:  # the signal interrupts no other code
            events.append("cancelled")
            raise

    def terminate(*_: object) -> None:
        asyncio.run(wait())

    events: list[str] = []
    monkeypatch.setattr("penstock.server.embed_jobs.run.embed_file", terminate)
    monkeypatch.setattr("penstock.server.bench.sweep.Sweep", lambda *_: SimpleNamespace(run=terminate, results=[]))
    before = signal.getsignal(signal.SIGTERM)
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs of a shell script ignore it
    code = cli.main(command.split())
    signal.signal(signal.SIGINT, interrupt)
    assert code == cli.TERMINATED
    assert capsys.readouterr().err.startswith("penstock: terminated")
    assert signal.getsignal(signal.SIGTERM) is before
    assert events == ["cancelled"]


@cases(__file__, "command", "shown")
def test_completed_command_has_code_0(command: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluate(_: str, folders: list[Path], __: object) -> Iterator[dict[str, object]]:
        yield {"folder": str(*folders)}
        seen.append(out.getvalue().decode())
        yield {"scores": {}}

    out, seen, embed_file = io.BytesIO(), list[str](), Mock()
    sweep = Mock(results=[1], report=lambda: "table", draw=lambda: seen.append(out.getvalue().decode()))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out))
    monkeypatch.setattr("penstock.server.embed_jobs.run.embed_file", embed_file)
    monkeypatch.setattr("penstock.server.bench.sweep.Sweep", Mock(return_value=sweep))
    monkeypatch.setattr("penstock.server.quality.evaluate.evaluate", evaluate)
    assert cli.main(command.split()) == 0
    assert out.getvalue().decode() == shown
    assert seen == shown.splitlines(keepends=True)[:1], "a result is written at once"
    if embed_file.called:
        file, settings, model, name = embed_file.call_args.args
        assert (file, settings.output, Path(model).is_dir(), name) == ("in.txt", "out.npy", True, DEFAULT_NAMES[0])


@pytest.mark.parametrize("error", [OSError(errno.EIO, "failed"), OSError(errno.ENOSPC, "failed", "a.txt")])
def test_other_errors_than_a_full_output_are_raised(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_config", Mock(side_effect=error))
    with pytest.raises(OSError, match="failed"):
        cli.main(["config"])


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_signal_acts_after_the_engine_process_has_started(number: int, error: type, monkeypatch) -> None:
    events: list[str] = []

    @contextlib.contextmanager
    def start() -> Iterator[None]:
        os.kill(os.getpid(), number)
        events.append("started")
        yield

    monkeypatch.setattr(cli, "EngineProcess", start)
    before = {each: signal.getsignal(each) for each in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs of a shell script ignore it
    try:
        with pytest.raises(error), cli._engine_process(False):
            events.append("entered")
        assert signal.getsignal(signal.SIGHUP) is signal.getsignal(number) is signal.SIG_IGN  # also a second Ctrl-C
        signal.signal(number, signal.default_int_handler)
        monkeypatch.setattr(cli, "EngineProcess", Mock(side_effect=OSError))
        for in_process in (True, False):
            with cli._engine_process(in_process) as process:
                assert process is None
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert events == ["started"]


def test_flag_of_vllm_is_ignored_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--runner", "pooling", "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err.startswith("penstock: warning: --runner has no effect: ")
    assert json.loads(shown.out)["parameters"] == 22_713_728


def test_every_command_and_argument_is_described() -> None:
    parsers = [cli._parser()]
    for parser in parsers:  # grows
        for action in parser._actions:
            assert action.help or isinstance(action, argparse._SubParsersAction), (parser.prog, action.dest)
            assert action.metavar or action.choices or action.nargs == 0, action.dest
            if isinstance(action, argparse._SubParsersAction):
                assert all(command.help for command in action._choices_actions)
                assert len(action._choices_actions) == len(action.choices)
                parsers += action.choices.values()
        if len(parsers) > 1:
            assert parser.description
            assert parser.format_usage().count("\n") == 1


def test_help_of_a_flag_has_its_default_and_its_variable() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, EmbedSettings)
    helps = {action.dest: str(action.help) for action in parser._actions}
    assert helps["output"].endswith(" (required) [PENSTOCK_OUTPUT]")
    assert helps["field"].endswith(" (default: text) [PENSTOCK_FIELD]")
    assert helps["dimensions"].endswith("default: all dimensions of the model. [PENSTOCK_DIMENSIONS]")


def test_help_imports_no_heavy_package() -> None:
    code = (
        "import contextlib, sys\n"
        "from penstock.server.commands.cli import main\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'uvicorn', 'numpy', 'tokenizers'}\n"
        "for command in ('serve', 'embed', 'eval', 'info', 'models'):\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        main([command, '--help'])\n"
        "    print('heavy:', command, *sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    found = [line for line in done.stdout.splitlines() if line.startswith("heavy:")]
    assert found == [f"heavy: {command}" for command in ("serve", "embed", "eval", "info", "models")]


@pytest.fixture
def no_engine_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_engine_process", contextlib.nullcontext)


@pytest.mark.usefixtures("no_engine_process")
def test_no_form_of_a_flag_overrides_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_AUTO_TRUNCATE", "true")
    served = []
    monkeypatch.setattr("penstock.server.commands.serve.serve", lambda *given: served.append(given))
    for flags in (["--no-auto-truncate"], [], ["--in-process"]):
        assert cli.main(["serve", "some/model", *flags]) == 0
    assert [settings.engine.auto_truncate for settings, _, _ in served] == [False, True, True]
    assert [in_process for _, _, in_process in served] == [False, False, True]


def test_link_to_a_folder_is_served_under_its_name(tmp_path: Path) -> None:
    (tmp_path / "models--of--owner").mkdir()
    (tmp_path / "short").symlink_to(tmp_path / "models--of--owner")
    assert model_and_names(f"{tmp_path}/short/")[1] == ("short", f"{tmp_path}/short/")
    assert model_and_names(f"{tmp_path}/short/../models--of--owner")[1][0] == "models--of--owner"
    with pytest.raises(UsageError, match=r"^MODEL is empty"):
        model_and_names("")


def test_info_as_json_names_the_source_of_each_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--json", "--max-model-len", "64"]) == 0
    info = json.loads(text := capsys.readouterr().out)
    assert text == json.dumps(info, indent=2) + "\n"
    assert (info["name"], info["parameters"]) == (DEFAULT_NAMES[0], 22_713_728)
    assert info["bytes"] > 4 * info["parameters"]
    assert not {"kernels", "num_lanes", "arithmetic"} & set(info["fields"])  # chosen when the model is loaded
    assert info["memory"] == {"float32": 90_854_912, "bfloat16": 45_427_456, "float16": 45_427_456}
    assert info["fields"]["max_model_len"] == {"value": 64, "from": "--max-model-len"}
    assert info["fields"]["sequence_pooling"]["value"] == ["MEAN"]
    assert info["fields"]["path"]["from"] == "default"
    assert cli.main(["info", info["path"], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fields"]["path"]["from"] == "--model"
    assert cli.main(["info"]) == 0
    shown = capsys.readouterr().out
    assert "1_Pooling/config.json" in shown
    assert "22.7M parameters, 86.7 MiB of weights on disk; in memory 86.6 MiB as float32, " in shown


def test_info_as_json_shows_nested_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = table(__file__, "test_info_as_json_shows_nested_values")
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    for folder in (tmp_path, tmp_path / "2_Dense"):
        save_file({"weight": np.zeros(3, np.float32)}, folder / "model.safetensors")
    assert cli.main(["info", str(tmp_path), "--json"]) == 0
    (spec,) = json.loads(capsys.readouterr().out)["fields"]["dense"]["value"]
    assert cli._plain(tmp_path) == str(tmp_path)
    assert (spec["in_features"], spec["out_features"], spec["activation"]) == (32, 8, "Tanh")
    for folder in ("2_Dense", ""):
        (tmp_path / folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
        assert cli.main(["info", str(tmp_path)]) == 2
        assert ("2_Dense" in capsys.readouterr().err) is bool(folder)
