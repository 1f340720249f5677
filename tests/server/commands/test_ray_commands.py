"""`penstock ray`: errors that are found without a cluster, and the message without Ray."""

import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pyarrow as pa
import pytest
from pyarrow import parquet

from penstock.engine import logs
from penstock.server.cluster.ray_settings import RayEmbedSettings, RayServeSettings
from penstock.server.commands import cli, ray_commands
from penstock.server.embed_jobs.job_folder import Shard
from penstock.server.settings import load_settings

from ...tables import cases, table


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Run a command as if Ray were installed. Returns its exit code and its error message."""
    monkeypatch.setattr(logs, "configure_logging", configure := Mock())
    monkeypatch.setattr(ray_commands, "find_spec", lambda _: True)

    def run(*words: object) -> tuple[int, str]:
        code = cli.main(["ray", *map(str, words)])
        assert code or configure.call_args.args == ("info", "console")
        return code, capsys.readouterr().err

    return run


@pytest.mark.parametrize(("words", "name"), [("serve", "Ray"), ("embed a b", "Ray"), ("embed a b", "pandas")])
def test_missing_package_is_named(run, monkeypatch: pytest.MonkeyPatch, words: str, name: str) -> None:
    monkeypatch.setattr(ray_commands, "find_spec", lambda package: None if package == name.lower() else True)
    message = f"penstock: error: penstock ray needs {name}: run `pip install 'penstock[ray]'`\n"
    assert run(*words.split()) == (2, message)


@cases(__file__, "words", "message")
def test_flag_without_effect_on_a_cluster_is_rejected(run, words: str, message: str) -> None:
    code, error = run(*words.split())
    assert code == 2
    assert error.startswith(f"penstock: error: {message}")


def test_pin_and_ttl_are_rejected_on_a_cluster(run, tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text('[[models]]\nmodel = "a/b"\nttl = 60\n')
    message = "penstock: error: pin, ttl: a/b stays loaded on Ray while it is deployed; leave both out\n"
    assert run("serve", "--config", file) == (2, message)


@cases(__file__, "columns", "message")
def test_invalid_input_is_rejected_without_a_cluster(run, columns: dict, message: str, tmp_path: Path) -> None:
    parquet.write_table(pa.table(columns), tmp_path / "in.parquet")
    code, error = run("embed", tmp_path / "in.parquet", tmp_path / "out")
    assert code == 2
    assert message in error
    assert not (tmp_path / "out").exists()


def test_output_that_holds_the_input_is_rejected(run, tmp_path: Path) -> None:
    folder = tmp_path / "both"
    folder.mkdir()
    file = folder / "part-00000000.parquet"
    parquet.write_table(pa.table({"text": ["a"]}), file)
    (folder / "_manifest.json").write_text('{"identity": {}, "finished": true}')
    (tmp_path / "same").symlink_to(folder)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "in.parquet").symlink_to(file)
    for source in (folder, file, tmp_path / "same", tmp_path / "links"):
        code, error = run("embed", source, folder, "--overwrite")
        assert code == 2
        assert f"OUT: {folder} holds the input" in error
    assert file.exists()


@pytest.mark.parametrize(("given", "dtype"), table(__file__, "test_all_engines_of_a_cluster_have_one_dtype"), ids=str)
def test_all_engines_of_a_cluster_have_one_dtype(given: dict[str, object], dtype: str, caplog) -> None:
    caplog.set_level("INFO")
    for settings in (
        load_settings(RayServeSettings, given),
        load_settings(RayEmbedSettings, {"output": "out", **given}),
    ):
        caplog.clear()
        assert settings.on_replica(settings.engine_config("a/b")).dtype == dtype
        assert ("a/b: --dtype auto is float32" in caplog.text) == (dtype == "float32")


def test_manifest_holds_the_dtype(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = []
    stub = SimpleNamespace(
        EmbedderConfig=lambda config, *_: config,
        embed_on_ray=lambda shards, config, identity, settings: jobs.append((shards, config, identity)),
    )
    monkeypatch.setitem(sys.modules, "penstock.server.cluster.ray_embed", stub)
    parquet.write_table(pa.table({"text": ["a"]}), tmp_path / "in.parquet")
    words = ("embed", tmp_path / "in.parquet", tmp_path / "out")
    assert run(*words)[0] == run(*words, "--dtype", "bfloat16")[0] == 0
    (shards, first, one), (_, _, other) = jobs
    assert shards == [Shard(0, str(tmp_path / "in.parquet"), 0, 1)]
    assert (one["dtype"], one["arithmetic"], other["dtype"]) == ("float32", None, "bfloat16")
    assert first.dtype == "float32"
    assert one["model"] != other["model"]
    code, error = run(*words, "--image-field", "text")
    assert (code, "reads no images" in error) == (2, True)


def test_models_are_deployed_with_their_settings(run, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = SimpleNamespace(serve_on_ray=Mock())
    monkeypatch.setitem(sys.modules, "penstock.server.cluster.ray_serve", stub)
    assert run("serve", "a/b", "--default-prompt-name", "query", "--min-replicas", "2")[0] == 0
    (application,), settings = stub.serve_on_ray.call_args.args
    assert (application.names, application.default_prompt_name, settings.min_replicas) == (("a/b",), "query", 2)
    assert application.config.dtype == "float32"


def test_replica_gets_a_thread_for_each_core_and_an_absolute_path(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    for given, num_threads in (({"replica_cpus": 2.5}, 3), ({"replica_cpus": 2.5, "num_threads": 1}, 1)):
        settings = load_settings(RayServeSettings, given)
        config = settings.on_replica(settings.engine_config("model"))
        assert (config.num_threads, config.model) == (num_threads, str(tmp_path / "model"))
    assert settings.on_replica(settings.engine_config("owner/model")).model == "owner/model"
