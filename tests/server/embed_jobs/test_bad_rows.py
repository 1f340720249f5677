"""Rows left out by `penstock embed --on-bad-row skip`, and their list."""

import json
from pathlib import Path

import numpy as np
import pytest

from penstock.server.embed_jobs import input_file as input_module, run as module
from penstock.server.embed_jobs.input_file import PARQUET_ROWS_AT_ONCE
from penstock.server.embed_jobs.run import embed_file
from penstock.server.settings import CommandError, EmbedSettings, load

LONG = "word " * 100
LINES = [
    '{"id": 0, "text": "a"}',
    "",
    '{"id": 2, "text": "b"}',
    '{"id": 3, "text": null}',
    '{"id": 4}',
    "{broken",
    '{"id": 6, "text": "c"}',
    json.dumps({"id": 7, "text": LONG}),
    '{"id": 8, "text": ""}',
    '{"id": 9, "text": 5}',
    *[json.dumps({"id": i, "text": f"text {i}"}) for i in range(10, 40)],
]
BAD = {
    2: "a blank line",
    4: "holds no text",
    5: "no field 'text'",
    6: "not valid JSON",
    8: "102 tokens; the model takes 64",
    10: "holds no text",
}


@pytest.fixture(autouse=True)
def fake(engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    async def start(config, *, log_level, log_format):
        return engine

    fields = {name: getattr(engine.info, name) for name in type(engine.info).__dataclass_fields__}
    engine.info = type(engine.info)(**{**fields, "path": str(tmp_path)})
    monkeypatch.setattr(module.AsyncEngine, "start", start)
    monkeypatch.setattr(module, "configure_logging", lambda *_: None)
    return engine


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(LINES) + "\n\n\n")  # blank lines at the end move no row
    return path


def run(source: Path, output: Path, **settings: object) -> None:
    settings = {"output": str(output), "batch_size": 4, "on_bad_row": "skip", **settings}
    embed_file(str(source), load(EmbedSettings, settings), "fake-model")


def check_report(output: Path) -> None:
    report = output.with_name(output.name + ".skipped.jsonl")
    rows = [json.loads(line) for line in report.read_text().splitlines()]
    assert [row["line"] for row in rows] == list(BAD)
    assert all(reason in row["reason"] for row, reason in zip(rows, BAD.values(), strict=True))


def test_bad_rows_are_left_out_and_listed(source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    output = tmp_path / "out.jsonl"
    run(source, output)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["id"] for row in rows] == [i for i in range(40) if i + 1 not in BAD]
    check_report(output)
    assert "34 rows are in" in caplog.messages[-1]
    assert "6 bad rows were left out, see" in caplog.messages[-1]


def test_row_i_of_npy_is_row_i_of_the_input(source: Path, fake, tmp_path: Path) -> None:
    run(source, tmp_path / "out.npy")
    vectors = np.load(tmp_path / "out.npy")
    assert len(vectors) == len(LINES)
    assert [line for line, row in enumerate(vectors, 1) if np.isnan(row).all()] == list(BAD)
    for line, vector in enumerate(vectors, 1):
        if line not in BAD:
            expected = fake._vector(json.loads(LINES[line - 1])["text"])
            np.testing.assert_allclose(vector, expected / np.linalg.norm(expected), atol=1e-6)


def test_parquet_leaves_bad_rows_out(source: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    run(source, tmp_path / "out.parquet")
    table = parquet.read_table(tmp_path / "out.parquet")
    assert table["id"].to_pylist() == [i for i in range(40) if i + 1 not in BAD]
    parquet.write_table(pyarrow.table({"id": [0, 1, 2], "text": ["a", None, LONG]}), tmp_path / "in.parquet")
    run(tmp_path / "in.parquet", tmp_path / "again.parquet")
    assert parquet.read_table(tmp_path / "again.parquet")["id"].to_pylist() == [0]
    lines = (tmp_path / "again.parquet.skipped.jsonl").read_text().splitlines()
    assert [json.loads(line)["row"] for line in lines] == [2, 3]


def test_block_of_bad_rows_alone_is_left_out(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    texts = [None] * PARQUET_ROWS_AT_ONCE + ["a"]
    parquet.write_table(pyarrow.table({"id": range(len(texts)), "text": texts}), tmp_path / "in.parquet")
    run(tmp_path / "in.parquet", tmp_path / "out.parquet")
    assert parquet.read_table(tmp_path / "out.parquet")["id"].to_pylist() == [PARQUET_ROWS_AT_ONCE]


def test_resumed_run_lists_every_bad_row_once(
    source: Path, fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_module, "SHARD_ROWS", 6)
    output, embed, count = tmp_path / "out.jsonl", type(fake).embed, 0

    async def embed_some(inputs, params, options):
        nonlocal count
        count += 1
        if count > 6:
            raise OSError("the machine is going down")
        return await embed(fake, inputs, params, options)

    for _ in range(3):
        count, fake.embed = 0, embed_some
        with pytest.raises(CommandError, match="going down"):
            run(source, output)
    del fake.embed
    run(source, output)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["id"] for row in rows] == [i for i in range(40) if i + 1 not in BAD]
    for row in rows:
        expected = fake._vector(row["text"])
        np.testing.assert_allclose(row["embedding"], expected / np.linalg.norm(expected), atol=1e-6)
    check_report(output)


def test_failed_run_continues_with_skip(fake, tmp_path: Path) -> None:
    source, output = tmp_path / "in.txt", tmp_path / "out.npy"
    source.write_text("\n".join(["a", "b", LONG, "c"]))
    with pytest.raises(CommandError, match=r"line 3: 102 tokens.*--on-bad-row skip"):
        run(source, output, on_bad_row="fail")
    run(source, output)
    assert np.isnan(np.load(output)).all(axis=1).tolist() == [False, False, True, False]


def test_list_of_an_earlier_run_is_removed(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.npy"
    run(source, output)
    (tmp_path / "good.txt").write_text("a\n")
    run(tmp_path / "good.txt", output, overwrite=True)
    assert not output.with_name("out.npy.skipped.jsonl").exists()


@pytest.mark.parametrize("lines", [["{broken"], [json.dumps({"text": LONG})], ["{broken", json.dumps({"text": LONG})]])
def test_file_without_a_good_row_is_refused(lines: list[str], tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    with pytest.raises(CommandError, match=r"line 1: .*no row of the file can be embedded"):
        run(tmp_path / "in.jsonl", tmp_path / "out.npy")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
