import asyncio
import csv
import itertools
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock, call

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.errors import EngineOverloadedError, InvalidRequestError, MachineError, WeightError
from penstock.server.embed_jobs import input_file as input_module, progress, run as run_module
from penstock.server.embed_jobs.input_formats import open_input
from penstock.server.embed_jobs.parquet_file import PARQUET_ROWS_AT_ONCE, JsonColumns
from penstock.server.embed_jobs.run import check_options, pooling_params
from penstock.server.settings import CommandError, EmbedSettings, UsageError

from ...tables import cases, table

SHARD_ROWS = 5
TEXTS = [f"text number {i}" for i in range(23)] + ["", "naïve 東京"]
LONG = "word " * 100
LINES = [*table(__file__, "lines_with_bad_rows"), *[json.dumps({"id": i, "text": f"text {i}"}) for i in range(10, 40)]]
BAD = {int(line): reason for line, reason in table(__file__, "reasons_of_bad_rows").items()}


def expected(engine, texts: list[str] = TEXTS) -> np.ndarray:
    rows = np.stack([engine._vector(text) for text in texts])
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def embedded_texts(engine) -> list[str]:
    return [text for _, (texts, _, _) in engine.calls for text in texts]


def fail_after(engine, num_rows: int) -> None:
    """The engine fails after so many rows, until `del engine.embed`."""
    count = 0

    async def embed(inputs, params, options):
        nonlocal count
        count += len(inputs)
        if count > num_rows:
            raise OSError("the machine is going down")
        return await type(engine).embed(engine, inputs, params, options)

    engine.embed = embed


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_vectors(path: Path) -> np.ndarray:
    if path.suffix == ".npy":
        return np.load(path)
    if path.suffix == ".csv":
        return np.array([json.loads(row["embedding"]) for row in read_csv(path)], np.float32)
    rows = read_rows(path) if path.suffix == ".jsonl" else parquet.read_table(path).to_pylist()
    return np.array([row["embedding"] for row in rows], np.float32)


def read_csv(path: Path, delimiter: str = ",") -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter=delimiter))


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_module, "SHARD_ROWS", SHARD_ROWS)


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "in.txt"
    path.write_text("\n".join(TEXTS) + "\n", encoding="utf-8-sig")  # a byte order mark is skipped
    return path


@pytest.fixture
def bad_lines(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(LINES) + "\n\n\n")  # blank lines at the end are no rows
    return path


@pytest.fixture
def unfinished(run, lines: Path, fake, small_shards: None, tmp_path: Path) -> Path:
    """The output of a run that failed after two shards."""
    fail_after(fake, 2 * SHARD_ROWS)
    with pytest.raises(CommandError, match="going down"):
        run(lines, tmp_path / "out.npy")
    del fake.embed
    fake.calls.clear()
    return tmp_path / "out.npy"


@pytest.mark.parametrize("suffix", [".npy", ".jsonl", ".csv", ".parquet"])
@pytest.mark.parametrize("source", ["in.txt", "in.jsonl", "in.csv", "in.parquet"])
def test_every_input_to_every_output(run, source: str, suffix: str, lines: Path, fake, tmp_path: Path) -> None:
    path, output = tmp_path / source, tmp_path / f"out{suffix}"
    if source == "in.jsonl":
        rows = "".join(json.dumps({"id": i, "body": text}) + "\n" for i, text in enumerate(TEXTS))
        path.write_text(rows + "\n", encoding="utf-8-sig")  # a byte order mark is skipped
    if source == "in.csv":
        rows = "".join(f'{i},"{text}"\r\n' for i, text in enumerate(TEXTS))
        path.write_text("id,body\r\n" + rows, encoding="utf-8-sig", newline="")
    if source == "in.parquet":
        parquet.write_table(pa.table({"id": range(len(TEXTS)), "body": TEXTS}), path, row_group_size=10)
    run(path, output, field="body")
    np.testing.assert_allclose(read_vectors(output), expected(fake), atol=1e-6)
    assert {p.name for p in tmp_path.iterdir()} == {lines.name, path.name, output.name}
    assert fake.is_closed


@pytest.mark.parametrize(
    ("batch_size", "max_rows", "max_chars"), [(6, 3, 10**6), (1, 1, 10**6), (200, 20, 65), (200, 20, 64)]
)
def test_requests_are_bounded_in_rows_and_characters(
    run, lines: Path, fake, batch_size: int, max_rows: int, max_chars: int, monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run_module, "REQUEST_ROWS", 20)
    monkeypatch.setattr(run_module, "REQUEST_CHARS", max_chars)
    run(lines, tmp_path / "out.npy", batch_size=batch_size)
    requests = sorted((texts for _, (texts, _, _) in fake.calls), key=lambda texts: TEXTS.index(texts[0]))
    assert list(itertools.chain(*requests)) == TEXTS
    for texts in requests:
        assert len(texts) <= max_rows
        assert sum(map(len, texts)) <= max_chars
    for before, after in itertools.pairwise(requests):
        assert len(before) == max_rows or sum(map(len, before)) + len(after[0]) > max_chars


@pytest.mark.parametrize(("batch_size", "max_chars", "num_rows"), [(6, 10**6, 6), (200, 39, 3), (200, 40, 4)])
def test_rows_in_flight_are_bounded(
    run, lines: Path, fake, batch_size, max_chars, num_rows, monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr(run_module, "REQUEST_ROWS", 1)
    monkeypatch.setattr(run_module, "IN_FLIGHT_CHARS", max_chars)  # the first rows have 13 characters
    running, most = 0, []

    async def embed(inputs, params, options):
        nonlocal running
        running += len(inputs)
        most.append(running)
        await asyncio.sleep(0.001)
        running -= len(inputs)
        return await type(fake).embed(fake, inputs, params, options)

    fake.embed = embed
    run(lines, tmp_path / "out.npy", batch_size=batch_size)
    assert max(most[:10]) == num_rows


@pytest.mark.parametrize(
    ("error", "kind"), [(WeightError("no weights"), UsageError), (MachineError("x"), CommandError)]
)
def test_model_that_cannot_be_loaded_is_an_error(lines: Path, error, kind, monkeypatch, tmp_path: Path) -> None:
    start = AsyncMock(side_effect=error)
    monkeypatch.setattr(run_module.AsyncEngine, "start", start)
    monkeypatch.setattr(run_module, "configure_logging", configure := Mock())
    settings = EmbedSettings(output=str(tmp_path / "out.npy"), log_level="debug", log_format="json")
    with pytest.raises(CommandError, match=f"^{error}$") as failed:
        run_module.embed_file(str(lines), settings, str(tmp_path), "shown")
    assert type(failed.value) is kind
    configure.assert_called_once_with("debug", "json")
    (config,) = start.call_args.args
    assert (config.model, config.name) == (str(tmp_path), "shown")
    assert start.call_args.kwargs == {"log_level": "DEBUG", "log_format": "json"}


def test_columns_of_csv_files_are_kept(run, fake, tmp_path: Path) -> None:
    texts = ['a "quoted", text', "two\nlines", "", "naïve 東京"]
    first, second, third = (tmp_path / name for name in ("in.csv", "out.tsv", "again.parquet"))
    with first.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["id", "body", "note"], *([i, text, "a\tb"] for i, text in enumerate(texts))])
    run(first, second, field="body")
    rows = read_csv(second, "\t")
    assert [(row["id"], row["body"], row["note"]) for row in rows] == [(str(i), t, "a\tb") for i, t in enumerate(texts)]
    vectors = np.array([json.loads(row["embedding"]) for row in rows], np.float32)
    np.testing.assert_allclose(vectors, expected(fake, texts), atol=1e-6)
    run(first, third, field="body")
    table = parquet.read_table(third)
    assert table.column_names == ["id", "body", "note", "embedding"]
    assert table["body"].to_pylist() == texts


def test_jsonl_values_are_written_as_csv(run, fake, tmp_path: Path) -> None:
    record = {"text": "a", "n": 2**70, "x": 0.5, "list": [1, "é"], "yes": True, "none": None}
    (tmp_path / "in.jsonl").write_text(f'{json.dumps(record)}\n{{"text": "b", "late": "c"}}\n')
    run(tmp_path / "in.jsonl", tmp_path / "out.csv")
    assert b"\r" not in (tmp_path / "out.csv").read_bytes()
    first, second = read_csv(tmp_path / "out.csv")
    del first["embedding"], second["embedding"]
    assert first == {
        "text": "a", "n": str(2**70), "x": "0.5", "list": '[1, "é"]', "yes": "true", "none": "", "late": ""
    }  # fmt: skip
    assert {name: value for name, value in second.items() if value} == {"text": "b", "late": "c"}


@cases(__file__, "content", "message")
def test_unusable_csv_header_is_rejected(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text(content, errors="surrogateescape")
    with pytest.raises(UsageError, match=message):
        open_input(tmp_path / "in.csv", "text")


def test_log_shows_finished_rows_of_both_runs(run, unfinished: Path, lines: Path, caplog, monkeypatch) -> None:
    monkeypatch.setattr(progress, "LOG_EVERY_S", 0.0)
    caplog.set_level("INFO", progress.logger.name)
    run(lines, unfinished)
    numbers = [int(message.split("/25 rows, ")[0]) for message in caplog.messages if "/25 rows, " in message]
    assert numbers == sorted({*numbers, 25})
    assert numbers[1] > 2 * SHARD_ROWS


def test_options_reach_the_engine(run, lines: Path, fake, tmp_path: Path) -> None:
    run(lines, tmp_path / "out.npy", normalize=False, prompt_name="query")
    _, params, options = fake.calls[0][1]
    assert (params.normalize, options.prompt_name) == (False, "query")
    assert abs(np.linalg.norm(np.load(tmp_path / "out.npy"), axis=1) - 1).max() > 1e-3


def test_adapter_of_the_command_applies_to_every_row(fake) -> None:
    engine = EngineConfig(model="", adapter=("legal=/models/legal",))
    settings = EmbedSettings(output="out.npy", engine=engine)
    assert pooling_params(settings).adapter == "legal"
    assert settings.row_options()["adapter"] == ["legal=/models/legal"]
    two = replace(settings, engine=replace(engine, adapter=("legal=/a", "tax=/b")))
    with pytest.raises(UsageError, match="--adapter: every row gets the same adapter; name one"):
        check_options(two, fake.info)


def test_continued_run_repeats_no_finished_shard(run, unfinished: Path, lines: Path, fake, replace_info) -> None:
    folder = unfinished.with_name("out.npy.partial")
    assert sorted(path.name for path in folder.glob("part-*")) == ["part-00000000.npy", "part-00000001.npy"]
    replace_info(kernels="native, avx2", num_lanes=1)  # changes no vector
    (folder / "part-00000002.rejected.json").write_text('[[0, "of an interrupted write"]]')
    run(lines, unfinished)
    assert embedded_texts(fake) == TEXTS[2 * SHARD_ROWS :]
    np.testing.assert_allclose(np.load(unfinished), expected(fake), atol=1e-6)
    assert {path.name for path in folder.parent.iterdir()} == {lines.name, unfinished.name}


@pytest.mark.parametrize("changed", ["input", "model", "model file", "dimensions", "normalize"])
def test_another_job_does_not_continue_a_run(run, unfinished: Path, lines: Path, replace_info, changed: str) -> None:
    if changed == "input":
        lines.write_text(lines.read_text() + "one more\n")
    if changed == "model":
        replace_info(max_model_len=32)
    if changed == "model file":
        lines.with_name("model.safetensors").write_bytes(b"other weights")
    settings = {"dimensions": {"dimensions": 8}, "normalize": {"normalize": False}}.get(changed, {})
    with pytest.raises(CommandError, match=f"another {changed.split()[0]}"):
        run(lines, unfinished, **settings)


def test_request_is_sent_again_to_a_full_engine(run, lines: Path, fake, tmp_path: Path, monkeypatch) -> None:
    rejections = iter((0.01, 5.0, 0.5))

    async def reject_three(inputs, params, options):
        if (retry_after_s := next(rejections, None)) is not None:
            raise EngineOverloadedError("full", retry_after_s=retry_after_s, reason="queue_tokens")
        return await type(fake).embed(fake, inputs, params, options)

    fake.embed = reject_three
    monkeypatch.setattr(asyncio, "sleep", slept := AsyncMock())
    run(lines, tmp_path / "out.npy")
    assert slept.await_args_list == [call(0.01), call(1.0), call(0.5)]
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected(fake), atol=1e-6)


@pytest.mark.parametrize("kind", [OSError, InvalidRequestError])
def test_error_of_the_first_row_is_reported(run, fake, kind: type, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(run_module, "REQUEST_ROWS", 1)

    async def fail(inputs, params, options):
        await asyncio.sleep(0.01 * (inputs[0] == "a"))  # b fails first
        raise kind(f"lost {inputs[0]}")

    fake.embed = fail
    (tmp_path / "in.txt").write_text("a\nb\n")
    with pytest.raises(CommandError, match="lost a"):
        run(tmp_path / "in.txt", tmp_path / "out.npy")


def test_changed_file_cancels_the_rows_in_flight(run, small_shards, lines: Path, fake, monkeypatch) -> None:
    async def embed(inputs, params, options):
        if inputs[0] == TEXTS[0]:
            return await type(fake).embed(fake, inputs, params, options)
        try:
            await asyncio.sleep(60)
        finally:
            closed.append(fake.is_closed)

    def shorten(_: object) -> str:
        lines.write_text("\n".join(TEXTS[: SHARD_ROWS + 2]))
        return "digest"

    closed: list[bool] = []
    fake.embed = embed
    monkeypatch.setattr(run_module, "model_digest", shorten)
    with pytest.raises(CommandError, match=r"in\.txt was changed while it was read; start over"):
        run(lines, lines.with_name("out.npy"))
    assert closed == [False], "the engine is closed after its last request"


def test_input_is_never_replaced(run, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n')
    (tmp_path / "link.jsonl").symlink_to(rows)
    with pytest.raises(UsageError, match=r"link\.jsonl is the input; name another file"):
        run(rows, tmp_path / "link.jsonl", overwrite=True)
    assert rows.read_text() == '{"text": "a"}\n'


def test_existing_output_is_replaced_only_with_overwrite(run, lines: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.npy"
    output.write_text("precious")
    with pytest.raises(UsageError, match="exists; use --overwrite"):
        run(lines, output)
    assert output.read_text() == "precious"
    run(lines, output, overwrite=True)
    assert len(np.load(output)) == len(TEXTS)


@pytest.mark.skipif(os.geteuid() == 0, reason="needs another user than root, who may write to every folder")
def test_folder_without_write_permission_is_rejected(run, lines: Path, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(UsageError, match="locked cannot be written: Permission denied"):
        run(lines, tmp_path / "locked" / "out.npy")


@pytest.mark.parametrize(
    ("source", "output", "part"),
    [
        *table(__file__, "test_unusable_path_is_rejected"),
        ("a" * 300 + ".txt", "out.npy", "File name too long: "),
        ("in.txt", "a" * 300 + ".npy", "File name too long: "),
    ],
)
def test_unusable_path_is_rejected(run, source: str, output: str, part: str, lines: Path, tmp_path: Path) -> None:
    (tmp_path / "in.xml").write_text("a")
    (tmp_path / "folder.npy").mkdir()
    with pytest.raises(CommandError) as error:
        run(tmp_path / source, tmp_path / output)
    assert part in str(error.value)


@cases(__file__, "option", "message")
def test_option_unsupported_by_the_model_is_rejected(run, option, message, lines: Path, fake, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        run(lines, tmp_path / "out.npy", **option)
    assert not fake.calls
    assert fake.is_closed
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]


@cases(__file__, "name", "content", "part")
def test_bad_row_is_named_before_the_run(run, name: str, content: str, part: str, fake, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(CommandError) as error:
        run(tmp_path / name, tmp_path / "out.npy")
    assert part in str(error.value)
    assert error.value.exit_code == 1
    assert not fake.calls
    assert [path.name for path in tmp_path.iterdir()] == [name]


def check_skipped_rows(output: Path) -> None:
    rows = read_rows(output.with_name(output.name + ".skipped.jsonl"))
    assert [row["line"] for row in rows] == list(BAD)
    assert all(reason in row["reason"] for row, reason in zip(rows, BAD.values(), strict=True))


def test_resumed_run_skips_and_lists_each_bad_row_once(run, bad_lines, fake, tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(input_module, "SHARD_ROWS", 6)
    output = tmp_path / "out.jsonl"
    for _ in range(3):
        fail_after(fake, 10)
        with pytest.raises(CommandError, match="going down"):
            run(bad_lines, output, on_bad_row="skip")
    del fake.embed
    caplog.set_level("INFO")
    run(bad_lines, output, on_bad_row="skip")
    rows = read_rows(output)
    assert [row["id"] for row in rows] == [i for i in range(40) if i + 1 not in BAD]
    np.testing.assert_allclose(read_vectors(output), expected(fake, [row["text"] for row in rows]), atol=1e-6)
    check_skipped_rows(output)
    assert "wrote 34 rows to" in caplog.messages[-1]
    assert "6 bad rows were skipped, see" in caplog.messages[-1]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["[1]", '{"text": 5}'], "line 1: not a JSON object"),
        (['{"text": 5}', json.dumps({"text": LONG})], "line 1: the field 'text' has a number, not a text"),
    ],
)
def test_file_without_a_good_row_leaves_nothing(run, lines: list[str], reason: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    with pytest.raises(CommandError, match=f"in.jsonl, {reason}; no row of the file can be embedded"):
        run(tmp_path / "in.jsonl", tmp_path / "out.npy", on_bad_row="skip")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_shard_without_a_good_row_is_skipped(run, small_shards: None, fake, tmp_path: Path) -> None:
    lines = ["[1]"] * (2 * SHARD_ROWS) + ['{"text": "a"}']
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", on_bad_row="skip")
    assert [row["text"] for row in read_rows(tmp_path / "out.jsonl")] == ["a"]


def test_vectors_are_kept_if_the_output_cannot_be_written(
    run, lines: Path, fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        error = OSError(28, "No space left on device")
        patch.setattr("penstock.server.embed_jobs.output_file.replace_file", Mock(side_effect=error))
        with pytest.raises(
            CommandError, match=f"out.npy cannot be written: {error.strerror}; the vectors of all 25 rows"
        ):
            run(lines, tmp_path / "out.npy")
    fake.calls.clear()
    run(lines, tmp_path / "out.npy")
    assert not fake.calls
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected(fake), atol=1e-6)


def test_vectors_are_kept_if_the_format_lacks_a_column(run, fake, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    monkeypatch.setattr(JsonColumns, "fields", lambda _: [pa.field("text", pa.int64())])
    with pytest.raises(CommandError, match=r"does not support the columns of .*in\.jsonl .*: rename the folder"):
        run(tmp_path / "in.jsonl", tmp_path / "out.parquet")
    (tmp_path / "out.parquet.partial").rename(tmp_path / "out.npy.partial")
    fake.calls.clear()
    run(tmp_path / "in.jsonl", tmp_path / "out.npy")
    assert not fake.calls


def test_row_i_of_npy_is_row_i_of_the_input(run, bad_lines: Path, fake, tmp_path: Path) -> None:
    output = tmp_path / "out.npy"
    run(bad_lines, output, on_bad_row="skip")
    vectors = np.load(output)
    good = [line for line in range(len(LINES)) if line + 1 not in BAD]
    assert np.isnan(vectors).all(axis=1).tolist() == [line not in good for line in range(len(LINES))]
    texts = [json.loads(LINES[line])["text"] for line in good]
    np.testing.assert_allclose(vectors[good], expected(fake, texts), atol=1e-6)
    # The next run has no bad rows and removes the list of this one.
    (tmp_path / "good.txt").write_text("a\n")
    run(tmp_path / "good.txt", output, on_bad_row="skip", overwrite=True)
    assert not output.with_name("out.npy.skipped.jsonl").exists()


def test_bad_rows_are_left_out_of_parquet(run, bad_lines: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.parquet", tmp_path / "out.parquet"
    run(bad_lines, output, on_bad_row="skip")
    assert parquet.read_table(output)["id"].to_pylist() == [i for i in range(40) if i + 1 not in BAD]
    texts = ["a", None, LONG, *[None] * (2 * PARQUET_ROWS_AT_ONCE), "b"]  # one batch holds bad rows alone
    parquet.write_table(pa.table({"id": range(len(texts)), "text": texts}), source)
    run(source, output, on_bad_row="skip", overwrite=True)
    assert parquet.read_table(output)["id"].to_pylist() == [0, len(texts) - 1]
    rows = read_rows(tmp_path / "out.parquet.skipped.jsonl")
    assert [row["row"] for row in rows] == list(range(2, len(texts)))
    assert rows[0]["reason"] == "the column 'text' has no text"
