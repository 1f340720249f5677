"""`penstock embed` with images."""

import base64
import json
import os
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from penstock.engine.protocol.images import ImageInput
from penstock.server.embed_jobs import input_file as input_module, parquet_file as parquet_module
from penstock.server.embed_jobs.input_file import Row
from penstock.server.embed_jobs.input_formats import open_input
from penstock.server.settings import CommandError, UsageError

from ...engine.images.pictures import colored
from ...tables import table

NAMES = ["a.png", "b.JPG", "sub/c.webp", "sub/d.gif"]


FILES = [colored(*row) for row in (("red",), ("blue", "JPEG"), ("green", "WEBP"), ("white", "GIF"))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    for name, data in zip(NAMES, FILES, strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture
def fake(fake, replace_info):
    """An engine that reads images, which are rejected if they begin with "bad"."""

    async def embed(inputs, params, options):
        for index, item in enumerate(inputs):
            if isinstance(item, ImageInput) and item.data.startswith(b"bad"):
                raise item.error(index, "is not an image")
        return await type(fake).embed(fake, inputs, params, options)

    replace_info(image=fake.info)
    fake.embed = embed
    return fake


def expected(fake, files: list[bytes] = FILES) -> np.ndarray:
    rows = np.stack([fake._vector(ImageInput(data)) for data in files])
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def check(fake, rows: list[dict], files: list[bytes] = FILES) -> None:
    np.testing.assert_allclose([row["embedding"] for row in rows], expected(fake, files), atol=1e-6)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "npy"])
def test_folder_is_embedded_in_the_order_of_its_paths(run, fake, folder: Path, tmp_path: Path, suffix: str) -> None:
    (folder / "notes.txt").write_text("not an image")
    (folder / ".hidden.png").write_bytes(FILES[0])
    (folder / "folder.png").mkdir()
    output = tmp_path / f"out.{suffix}"
    run(folder, output)
    if suffix == "npy":
        np.testing.assert_allclose(np.load(output), expected(fake), atol=1e-6)
        return
    text = output.read_text().splitlines() if suffix == "jsonl" else []
    rows = [json.loads(line) for line in text] or parquet.read_table(output).to_pylist()
    assert [row["file"] for row in rows] == NAMES
    check(fake, rows)


def test_jsonl_has_paths_data_uris_and_objects(run, fake, folder: Path, tmp_path: Path) -> None:
    codes = [base64.b64encode(data).decode() for data in FILES]
    values = [NAMES[0], f"data:image/jpeg;base64,{codes[1]}", {"bytes": codes[2], "path": "x"}, {"path": NAMES[3]}]
    source = folder / "in.jsonl"
    source.write_text("".join(json.dumps({"id": i, "picture": value}) + "\n" for i, value in enumerate(values)))
    run(source, tmp_path / "out.jsonl", image_field="picture")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["id"], row["picture"]) for row in rows] == list(enumerate(values))
    check(fake, rows)
    for name, head in (("in.csv", "picture\n"), ("in.txt", "")):
        (folder / name).write_text(head + "\n".join(NAMES))
        run(folder / name, tmp_path / "out.npy", image_field="picture", overwrite=True)
        np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected(fake), atol=1e-6)


@pytest.mark.parametrize("form", ["bytes", "struct", "path"])
def test_parquet_has_bytes_or_paths(run, fake, folder: Path, tmp_path: Path, form: str, monkeypatch) -> None:
    monkeypatch.setattr(parquet_module, "PARQUET_IMAGES_AT_ONCE", 3)
    values = {
        "bytes": FILES,
        "struct": [{"bytes": data, "path": None} for data in FILES[:2]]
        + [{"bytes": None, "path": n} for n in NAMES[2:]],
        "path": NAMES,
    }[form]
    source, output = folder / "in.parquet", tmp_path / "out.parquet"
    parquet.write_table(pa.table({"id": range(5), "picture": [*values, None]}), source)
    with pytest.raises(CommandError, match=r"in\.parquet, row 5: the column 'picture' has no image"):
        run(source, output, image_field="picture")
    run(source, output, image_field="picture", on_bad_row="skip")
    table = parquet.read_table(output)
    assert table.schema.field("picture") == parquet.read_schema(source).field("picture")
    rows = table.to_pylist()
    assert [row["picture"] for row in rows] == values
    check(fake, rows)


BAD = {int(line): reason for line, reason in table(__file__, "reasons_of_bad_images").items()}


def test_bad_images_are_skipped_with_their_reasons(run, fake, folder: Path, tmp_path: Path) -> None:
    (folder / "empty.png").touch()
    (folder / "bad.png").write_bytes(b"bad file")
    values = ["missing.png", "empty.png", "https://example.org/a.png", "data:image/png,a", "data:;base64,A", "bad.png"]
    values += [5, "x" * 5000, NAMES[0]]
    source, output = folder / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"text": value}) + "\n" for value in values))
    with pytest.raises(CommandError, match=r"line 1: the field 'text' has 'missing\.png', which is no file"):
        run(source, output, image_field="text")
    run(source, output, image_field="text", on_bad_row="skip")
    report = [json.loads(line) for line in (tmp_path / "out.jsonl.skipped.jsonl").read_text().splitlines()]
    assert [row["line"] for row in report] == list(BAD)
    for row in report:
        assert BAD[row["line"]] in row["reason"]
    check(fake, [json.loads(line) for line in output.read_text().splitlines()], FILES[:1])


@pytest.mark.skipif(sys.platform == "darwin", reason="file names of macOS are UTF-8")
def test_file_name_that_is_not_utf8_is_a_bad_row(run, fake, folder: Path, tmp_path: Path) -> None:
    (folder / os.fsdecode(b"z\xff.png")).write_bytes(FILES[0])
    output = tmp_path / "out.jsonl"
    with pytest.raises(CommandError, match=r"image 5: the file name z\\xff\.png is not UTF-8"):
        run(folder, output)
    run(folder, output, on_bad_row="skip")
    check(fake, [json.loads(line) for line in output.read_text().splitlines()])


def test_changed_image_does_not_continue_an_interrupted_run(
    run, fake, folder: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(input_module, "SHARD_ROWS", 2)
    (folder / "sub/d.gif").write_bytes(b"bad file")
    output = tmp_path / "out.npy"
    with pytest.raises(CommandError, match=r"image 4: .*sub/d\.gif is not an image"):
        run(folder, output, batch_size=1)
    count = len(fake.calls)
    run(folder, output, on_bad_row="skip")
    assert len(fake.calls) == count + 1, "finished shards are kept"
    output.unlink()
    with pytest.raises(CommandError, match="image 4"):
        run(folder, output, batch_size=1)
    os.utime(folder / NAMES[0], (1, 1))
    with pytest.raises(UsageError, match="another files;"):
        run(folder, output, on_bad_row="skip")
    (folder / NAMES[0]).rename(folder / "z.png")
    with pytest.raises(UsageError, match="another input, files;"):
        run(folder, output, on_bad_row="skip")


def test_shards_are_bounded_in_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = colored("red") + bytes(4_000_000)
    for i in range(8):
        (folder / f"{i}.png").write_bytes(large)
    source = open_input(folder, "text")
    rows = [row for row in source.rows() if isinstance(row, Row)]
    assert [row.size for row in rows] == [12_500] * 8 + [800] * 4
    monkeypatch.setattr(input_module, "SHARD_CHARS", 30_000)
    assert [shard.num_rows for shard in source.summarize(lambda row: None, skip_bad=False).shards] == [2, 2, 2, 4 + 2]


def test_unusable_inputs_are_rejected(run, fake, folder: Path, tmp_path: Path, replace_info) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CommandError, match="empty holds no images"):
        run(tmp_path / "empty", tmp_path / "out.npy")
    replace_info(image=None)
    with pytest.raises(UsageError, match="reads no images; name a model that does"):
        run(folder, tmp_path / "out.npy")
