"""`penstock ray embed` on clusters of several nodes (`make test-ray`), and its shards without Ray."""

import importlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock, call

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from penstock.engine import LLM, EngineConfig, PoolingParams
from penstock.engine.protocol.errors import InvalidRequestError
from penstock.server.cluster.ray_settings import RayEmbedSettings
from penstock.server.embed_jobs.job_folder import JobFolder, Shard
from penstock.server.settings import CommandError, UsageError, load_settings

from ...waiting import wait_until
from .conftest import Nodes, Starting, ended

NUM_ROWS = 4000
SHARD_ROWS = 100
KEPT = "finished rows are kept: run the same command again"
TEXTS = [f"Row {row}: a gate holds the water of a pool. " * (1 + row % 9) for row in range(NUM_ROWS)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two files. Their row groups and the shards differ in size."""
    folder = tmp_path / "in"
    folder.mkdir()
    table = pa.table({"id": range(NUM_ROWS), "text": TEXTS})
    parquet.write_table(table.slice(0, 2500), folder / "a.parquet", row_group_size=333)
    parquet.write_table(table.slice(2500), folder / "b.parquet", row_group_size=1000)
    return folder


def command(source: Path, out: Path, cluster: Nodes, *flags: str) -> tuple[str, ...]:
    program = (sys.executable, "-P", "-m", "penstock.server", "ray", "embed", str(source), str(out))
    return (*program, "--address", cluster.address, "--shard-rows", str(SHARD_ROWS), "--max-replicas", "2", *flags)


def num_done(out: Path) -> int:
    return len(list(out.glob("part-*.parquet")))


def wait_for_shards(out: Path, number: int, process: subprocess.Popen[str], log: Path) -> None:
    def are_done() -> bool:
        assert process.poll() is None, log.read_text()
        return num_done(out) >= number

    wait_until(are_done)


def check(out: Path, model: str, sample: Sequence[int] = range(0, NUM_ROWS, 37)) -> None:
    """The output has each row once, in order, with the vectors of a single engine."""
    table = parquet.read_table(out)
    assert table.column("id").to_pylist() == list(range(NUM_ROWS))
    assert table.column("text").to_pylist() == TEXTS
    assert table.schema.field("embedding").type == pa.list_(pa.float32(), 384)
    vectors = np.stack(table.column("embedding").combine_chunks().take(pa.array(sample)).to_numpy(zero_copy_only=False))
    with LLM(model, dtype="float32") as llm:
        expected = [answer.outputs.embedding for answer in llm.embed([TEXTS[row] for row in sample], use_tqdm=False)]
    assert np.allclose(vectors, expected, atol=1e-5)
    assert not list(out.glob(".unfinished-*"))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_node_loses_no_row(nodes: Starting, source: Path, tmp_path: Path, model: str) -> None:
    out, log = tmp_path / "out", tmp_path / "embed.log"
    with (
        nodes(0, 1, 1) as cluster,
        ended(command(source, out, cluster, "--min-replicas", "2"), log, stdout=subprocess.DEVNULL) as process,
    ):
        wait_for_shards(out, 8, process, log)
        cluster.kill(1)
        assert num_done(out) < NUM_ROWS // SHARD_ROWS
        assert process.wait(200) == 0, log.read_text()
    assert "4000/4000" in log.read_text()  # the progress bar
    check(out, model)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_run_continues(nodes: Starting, source: Path, tmp_path: Path, model: str) -> None:
    out, log = tmp_path / "out", tmp_path / "embed.log"
    with nodes(2) as cluster:
        with ended(command(source, out, cluster), log, stdout=subprocess.DEVNULL) as process:
            wait_for_shards(out, 8, process, log)
            process.kill()
            process.wait()
        time.sleep(5)  # the actors end
        finished = {path.name: path.stat().st_mtime_ns for path in out.glob("part-*.parquet")}
        assert 8 <= len(finished) < NUM_ROWS // SHARD_ROWS
        again = subprocess.run(command(source, out, cluster), capture_output=True, text=True, cwd="/", timeout=200)
        assert again.returncode == 0, again.stderr
        assert finished == {name: (out / name).stat().st_mtime_ns for name in finished}
        check(out, model)
        once_more = subprocess.run(command(source, out, cluster), capture_output=True, text=True, cwd="/", timeout=60)
        assert once_more.returncode == 2
        assert "is finished; give --overwrite" in once_more.stderr


class RejectsShort:
    """A fake LLM. A vector is the length of its text. Texts of one letter are rejected, and two texts "both"."""

    def __init__(self, **_: object) -> None: ...

    def embed(self, texts: Sequence[Any], **options: object) -> list[Any]:
        assert options == {"pooling_params": PoolingParams(), "prompt_name": "query", "use_tqdm": False}
        texts = [text.read_bytes() if isinstance(text, Path) else text for text in texts]
        if any(len(text) == 1 for text in texts) or texts == ["both", "both"]:
            raise InvalidRequestError("too short")
        return [SimpleNamespace(outputs=SimpleNamespace(embedding=[len(text)])) for text in texts]


@pytest.fixture
def embedder_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Embedder, imported with stand-ins for Ray."""
    for name in ("ray", "ray.data", "ray.exceptions"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    modules = [f"penstock.server.cluster.{name}" for name in ("ray_embed", "ray_connection")]
    for name in modules:
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(modules[0])
    for name in modules:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(module, "LLM", RejectsShort)
    monkeypatch.setattr(module, "configure_logging", lambda *_: None)
    monkeypatch.setattr(module, "RayError", LookupError)
    return module


class Dataset:
    """A dataset of Ray with the numbers of shards. It runs the embedder in this process."""

    def __init__(self, items: list[int], **options: object) -> None:
        self.items, self.options = items, options

    def map_batches(self, embedder: Any, *, fn_constructor_args: tuple[Any, ...], **options: object) -> Any:
        self.embed = embedder(*fn_constructor_args)
        self.options |= options
        return self

    def iter_rows(self) -> Iterator[dict[str, Any]]:
        for item in self.items:
            yield {name: values[0] for name, values in self.embed({"item": np.array([item])}).items()}


def test_job_embeds_its_unfinished_shards_until_a_bad_row(embedder_class: Any, tmp_path: Path, capsys) -> None:
    module, path, folders = embedder_class, str(tmp_path / "in.parquet"), []
    parquet.write_table(pa.table({"text": ["aa", "bbb", "cc", "d", "ee", "ff"]}), path)
    shards = [Shard(number, path, 2 * number, 2) for number in range(3)]
    job = JobFolder(tmp_path / "out", ".parquet", "--overwrite")
    config = module.EmbedderConfig(EngineConfig(model="m"), "text", False, PoolingParams(), "query", job, "info", "x")
    given = {"output": "out", "address": "a:1", "min_replicas": 3, "max_replicas": 4, "replica_cpus": 2.5}
    settings = load_settings(RayEmbedSettings, given)
    module.ray.init = Mock(side_effect=lambda *_, **__: folders.append(Path.cwd()))
    datasets: list[Dataset] = []

    def from_items(items: list[int], **options: object) -> Dataset:
        datasets.append(Dataset(items, **options))
        return datasets[-1]

    module.ray.data.from_items = Mock(side_effect=from_items)
    with pytest.raises(CommandError, match=r"row 4: too short; finished rows are kept: run the same command again"):
        module.embed_on_ray(shards, config, {"a": 1}, settings)
    parquet.write_table(pa.table({"text": ["aa", "bbb", "cc", "dd", "ee", "ff"]}), path)
    module.embed_on_ray(shards, config, {"a": 1}, settings)
    assert re.search(r"6/6 .* rows/s", capsys.readouterr().err)
    context = module.DataContext.get_current.return_value
    assert (context.enable_progress_bars, context.print_on_execution_start) == (False, False)
    assert [parquet.read_table(job.path(shard)).num_rows for shard in shards] == [2, 2, 2]
    with pytest.raises(UsageError, match="is finished"):
        module.embed_on_ray(shards, config, {"a": 1}, settings)
    assert [dataset.items for dataset in datasets] == [[0, 1, 2], [0, 1]]
    compute = module.ActorPoolStrategy.return_value
    options = {"batch_size": 1, "compute": compute, "num_cpus": 2.5, "num_gpus": None}
    assert [each.options for each in datasets] == [{"override_num_blocks": n, **options} for n in (3, 2)]
    threads = {"max_concurrent_calls_per_actor": 2, "enable_true_multi_threading": True}
    sizes = [call(min_size=n, max_size=n, **threads) for n in (3, 2)]
    assert module.ActorPoolStrategy.call_args_list == sizes
    module.ray.init.assert_called_with("a:1", logging_level="INFO", log_to_driver=False)
    assert (folders, module.ray.shutdown.call_count) == ([Path("/")] * 2, 2)
    assert Path.cwd() != Path("/")

    module.embed_on_ray([], config, {"a": 1}, replace(settings, overwrite=True))
    assert len(datasets) == 2, "no shard is left"
    job = JobFolder(tmp_path / "lost", ".parquet", "--overwrite")
    for error, message in (
        (LookupError("a\n node died \n"), "the job could not be finished: node died; finished rows are kept"),
        (None, "3 of 3 shards have no file; run the same command again"),
    ):
        rows = Mock(side_effect=error, return_value=iter([]))
        module.ray.data.from_items.side_effect = None
        module.ray.data.from_items.return_value.map_batches.return_value.iter_rows = rows
        with pytest.raises(CommandError, match=message):
            module.embed_on_ray(shards, config._replace(job=job), {}, settings)
    module.ray.init.side_effect = ConnectionError("nobody there")
    with pytest.raises(CommandError, match="--address: nobody there"):
        module.embed_on_ray(shards, config._replace(job=job), {}, settings)


def test_shards_report_their_rows_or_the_first_bad_row(embedder_class: Any, tmp_path: Path) -> None:
    texts, path = ["aa", "bbb", "cc", "d", "ee", None, "both", "both"], str(tmp_path / "in.parquet")
    parquet.write_table(pa.table({"text": texts}), path)
    shards = [Shard(number, path, 2 * number, 2) for number in range(4)]
    job = JobFolder(tmp_path / "out", ".parquet", "--overwrite")
    job.begin({})
    config = embedder_class.EmbedderConfig(
        EngineConfig(model="m"), "text", False, PoolingParams(), "query", job, "info", "text"
    )
    embed = embedder_class.Embedder(config, shards)
    found = embed({"item": np.array([2, 0, 1, 3])})
    assert found["num_rows"] == [2, 2, 2, 2]
    bad_rows = [f"{path}, row 6: the column 'text' has no text", f"{path}, row 4: too short"]
    reasons = [f"{each}; {KEPT}" for each in (*bad_rows, f"{path}: the engine rejects rows 7 to 8 together")]
    assert found["error"] == [reasons[0], "", *reasons[1:]]
    rows = parquet.read_table(job.path(shards[0])).to_pylist()
    assert rows == [{"text": "aa", "embedding": [2.0]}, {"text": "bbb", "embedding": [3.0]}]
    assert job.unfinished_shards(shards) == shards[1:]
    Path(path).unlink()
    assert embed({"item": np.array([0])}) == {"num_rows": [2], "error": [""]}, "a finished shard is not read again"
    parquet.write_table(pa.table({"text": texts}), path)
    JobFolder(tmp_path / "out", ".parquet", "--overwrite").begin({"model": "n"}, overwrite=True)
    assert "holds another job now" in embed({"item": np.array([0])})["error"][0]


def test_images_of_a_shard_are_bytes_or_paths_beside_the_file(embedder_class: Any, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"12345")
    path = str(tmp_path / "in.parquet")
    pictures = [{"bytes": b"123", "path": None}, {"bytes": None, "path": "a.png"}, {"bytes": None, "path": "lost.png"}]
    parquet.write_table(pa.table({"picture": pictures}), path)
    shards = [Shard(number, path, 2 * number, 2 - number) for number in range(2)]
    job = JobFolder(tmp_path / "out", ".parquet", "--overwrite")
    job.begin({})
    config = embedder_class.EmbedderConfig(
        EngineConfig(model="m"), "picture", True, PoolingParams(), "query", job, "info", "text"
    )
    found = embedder_class.Embedder(config, shards)({"item": np.array([0, 1])})
    reason = "the column 'picture' has 'lost.png', which is no file, or an empty one"
    assert found["error"] == ["", f"{path}, row 3: {reason}; {KEPT}"]
    rows = parquet.read_table(job.path(shards[0])).to_pylist()
    assert [row["picture"] for row in rows] == pictures[:2]
    assert [row["embedding"] for row in rows] == [[3.0], [5.0]]
