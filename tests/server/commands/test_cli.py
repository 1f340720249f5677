"""The command line, as a process: exit codes, one line on stderr, nothing heavy before a mistake is found."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.server.cluster.ray_settings import RayEmbedSettings, RayServeSettings
from penstock.server.commands import cli
from penstock.server.commands.default_model import model_and_names
from penstock.server.settings import (
    GROUPS,
    EmbedSettings,
    InfoSettings,
    ServerSettings,
    declared_settings,
    environment_variable,
)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "penstock.server", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("serve", "--port", "x"), "--port: "),
        (("serve", "--dtype", "fp8"), "--dtype: "),
        (("serve", "--pooler-config", "{}}"), "--pooler-config: "),
        (("serve", "--max-model-len", "-3"), "--max-model-len: "),
        (("serve", "--bogus"), "--bogus"),
        (("bogus",), "bogus"),
        ((), "COMMAND"),
        (("embed", "x.txt"), "--output is required"),
        (("info", "--device", "tpu"), "--device: "),
        (("models", "--task", "translate"), "--task: invalid choice: 'translate'"),
    ],
)
def test_wrong_values_are_one_line_and_code_2(
    arguments: tuple[str, ...], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = cli.main(arguments)
    except SystemExit as exit_:
        code = exit_.code
    shown = capsys.readouterr()
    assert code == 2
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    assert shown.err.startswith("penstock")
    assert part in shown.err


def test_missing_input_file_is_one_line_and_code_2() -> None:
    done = run("embed", "/nonexistent.txt", "--output", "out.npy")
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("penstock")
    assert "/nonexistent.txt" in done.stderr


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (("/no/such/model",), "/no/such/model"),
        (("--default-prompt-name", "x"), "--default-prompt-name: "),
        (("--max-model-len", "100000"), "--max-model-len"),
    ],
)
def test_unsupported_model_files_give_one_line_and_code_2(flags: tuple[str, ...], part: str) -> None:
    done = run("serve", "--port", "0", *flags)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert part in done.stderr


def test_a_wrong_variable_is_named() -> None:
    done = run("serve", PENSTOCK_PORT="x")
    assert done.returncode == 2
    assert "PENSTOCK_PORT: " in done.stderr


def test_info_of_no_model_gives_one_line(tmp_path) -> None:
    done = run("info", str(tmp_path))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


def test_version_and_help() -> None:
    assert run("--version").stdout.startswith("penstock ")
    text = run("serve", "--help").stdout
    for field in declared_settings(ServerSettings):
        assert environment_variable(field) in text
        assert field == "model" or f"--{field.replace('_', '-')}" in text


@pytest.mark.parametrize("command", ["serve", "embed", "info", "models"])
def test_help_imports_nothing_heavy(command: str) -> None:
    code = (
        "import sys\n"
        "from penstock.server.commands.cli import main\n"
        "try:\n"
        f"    main(['{command}', '--help'])\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'uvicorn', 'numpy', 'tokenizers'}\n"
        "print('heavy:', *sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].strip() == "heavy:"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--port", "x"), "must be a whole number (got 'x')"),
        (("--max-queue-s", "long"), "must be a number (got 'long')"),
        (("--max-model-len", "0"), "must be at least 1 (got '0')"),
        (("--dtype", "fp8"), "must be auto, float32, bfloat16, float16 or int8 (got 'fp8')"),
        (("--device", "tpu"), "must be auto, cpu, cuda or cuda:N, such as cuda:1 (got 'tpu')"),
        (("--otlp-traces-endpoint", "a"), "must begin with http:// or https:// and name a host (got 'a')"),
    ],
)
def test_wrong_values_give_plain_messages(
    arguments: tuple[str, str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", *arguments]) == 2
    assert capsys.readouterr().err == f"penstock: error: {arguments[0]}: {reason}\n"


def help_of(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "titles"),
    [
        ("serve", ["Model", "Limits", "HTTP", "Several models", "Batches", "Memory", "Logging"]),
        ("embed", ["Input and output", "Model", "Limits", "Memory", "Logging"]),
        ("info", ["Model", "Limits", "Memory", "Logging"]),
    ],
)
def test_help_is_in_groups(
    command: str, titles: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.findall(r"^([A-Z][\w ]+):$", help_of(command, monkeypatch, capsys), re.MULTILINE) == titles


def test_help_shows_choices_words_for_values_and_defaults(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of("serve", monkeypatch, capsys)
    for shown in (
        "--empty-input {embed,error}",
        "--dtype {auto,float32,bfloat16,float16,int8}",
        "--device {auto,cpu,cuda,cuda:N}",
        "--max-queue-s SECONDS",
        "--pooler-config JSON",
        "--answer-memory SIZE",
    ):
        assert re.search(rf"^  {re.escape(shown)}\s", text, re.MULTILINE), shown
    for line in re.findall(r"^  --.*(?:\n {4,}.*)*", text, re.MULTILINE):
        assert "default:" in line.lower(), line
        assert not re.search(r"default: (None|PoolerConfig|\(|\{)", line), line
    assert re.search(r"--answer-memory .*\(default: 512MiB\)", text)
    assert re.search(r"--access-log.*\n? *.*\(default: off\)", text)


def test_groups_of_the_help_are_known() -> None:
    classes = (ServerSettings, EmbedSettings, InfoSettings, RayServeSettings, RayEmbedSettings)
    assert {each.setting.group for cls in classes for each in declared_settings(cls).values()} == set(GROUPS)


def test_every_flag_is_in_its_settings_class() -> None:
    parser = cli._parser()
    commands = next(a for a in parser._actions if hasattr(a, "choices") and a.choices)
    ray = next(a for a in commands.choices["ray"]._actions if hasattr(a, "choices") and a.choices)
    for its_commands, name, settings in (
        (commands, "serve", ServerSettings),
        (commands, "embed", EmbedSettings),
        (commands, "info", InfoSettings),
        (ray, "serve", RayServeSettings),
        (ray, "embed", RayEmbedSettings),
    ):
        flags = {action.dest for action in its_commands.choices[name]._actions} - {"help", "file", "json"}
        assert flags == set(declared_settings(settings))


@pytest.fixture
def no_engine_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_engine_process", contextlib.nullcontext)


@pytest.mark.usefixtures("no_engine_process")
def test_bool_flags_have_both_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_AUTO_TRUNCATE", "true")
    seen = {}
    monkeypatch.setattr(
        "penstock.server.commands.serve.serve", lambda settings, plans, _: seen.update(settings=settings)
    )
    assert cli.main(["serve", "some/model", "--no-auto-truncate"]) == 0
    assert seen["settings"].engine.auto_truncate is False
    assert cli.main(["serve", "some/model"]) == 0
    assert seen["settings"].engine.auto_truncate is True


@pytest.mark.usefixtures("no_engine_process")
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["serve", "some/model"], "penstock: interrupted\n"),
        (
            ["embed", "x.txt", "--output", "out.npy"],
            "penstock: interrupted; the same command goes on where it stopped\n",
        ),
    ],
)
def test_interruption_tells_how_to_continue(
    arguments: list[str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock.server.commands.serve.serve", interrupt)
    monkeypatch.setattr("penstock.server.embed_jobs.run.embed_file", interrupt)
    assert cli.main(arguments) == cli.INTERRUPTED
    assert capsys.readouterr().err == line


def test_info_shows_parameters_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert line.startswith(
        "  22.7M parameters, 86.7 MiB of weights on disk; in memory 86.6 MiB as float32, 43.3 MiB as bfloat16"
    )


@pytest.mark.parametrize("arguments", [("models",), ("models", "--json"), ("info", "--json")])
def test_closed_output_pipe_is_no_error(arguments: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-P", "-m", "penstock.server", *arguments]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (cli.CUT_SHORT, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no disk that is always full")
@pytest.mark.parametrize("command", ["models", "config"])
def test_output_to_a_full_disk_gives_one_line(command: str) -> None:
    with Path("/dev/full").open("w") as full:
        command_line = [sys.executable, "-P", "-m", "penstock.server", command]
        done = subprocess.run(command_line, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "penstock: error: the output cannot be written: No space left on device\n"


def test_link_to_a_folder_is_served_under_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "models--of--somebody").mkdir()
    (tmp_path / "short").symlink_to(tmp_path / "models--of--somebody")
    assert model_and_names(f"{tmp_path}/short/")[1] == ("short", f"{tmp_path}/short/")
    assert model_and_names(f"{tmp_path}/short/../models--of--somebody")[1][0] == "models--of--somebody"


def test_info_as_json() -> None:
    done = run("info", "--json", "--max-model-len", "64")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["parameters"] == 22_713_728
    assert answer["bytes"] > 4 * answer["parameters"]
    assert not {"kernels", "num_lanes", "arithmetic"} & set(answer["fields"])  # decided where the model is loaded
    assert answer["memory"] == {"float32": 90_854_912, "bfloat16": 45_427_456, "float16": 45_427_456}
    assert answer["fields"]["max_model_len"] == {"value": 64, "from": "--max-model-len"}
    assert answer["fields"]["sequence_pooling"]["value"] == ["MEAN"]
    assert answer["fields"]["path"]["from"] == "default"
    named = json.loads(run("info", answer["path"], "--json").stdout)
    assert named["fields"]["path"]["from"] == "--model"


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("serve", "--prot", "80"), "--prot; did you mean --port?"),
        (("serve", "--max-modl-len=5"), "--max-modl-len; did you mean --max-model-len?"),
        (("embed", "a.txt", "--outptu", "b.npy"), "--outptu; did you mean --output?"),
        (("ray", "serve", "--min-replica-s", "2"), "--min-replica-s; did you mean --min-replicas?"),
        (("info", "--jsn"), "--jsn; did you mean --json?"),
        (("serve", "--quite-another"), "unrecognized arguments: --quite-another"),
    ],
)
def test_misspelt_flag_gets_a_suggestion(
    arguments: tuple[str, ...], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    assert meant in capsys.readouterr().err
