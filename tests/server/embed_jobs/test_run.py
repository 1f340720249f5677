"""`penstock embed`: formats, bad rows, and runs that are interrupted."""

import asyncio
import json

import numpy as np
import pytest

from penstock.engine.protocol.errors import EngineOverloadedError
from penstock.server.embed_jobs import input_file as input_module, output_file as output_module, run as module
from penstock.server.embed_jobs.input_file import InputFile, JsonLines
from penstock.server.embed_jobs.job_folder import MANIFEST
from penstock.server.embed_jobs.run import embed_file
from penstock.server.settings import CommandError, EmbedSettings, UsageError, load

TEXTS = [f"text number {i}" for i in range(23)] + ["", "naïve 東京"]


@pytest.fixture(autouse=True)
def fake(engine, monkeypatch: pytest.MonkeyPatch, tmp_path):
    """The command on the fake engine; `engine.calls` holds what was embedded."""

    async def start(config, *, log_level, log_format):
        return engine

    engine.info = type(engine.info)(**{**_fields(engine.info), "path": str(tmp_path)})
    monkeypatch.setattr(module.AsyncEngine, "start", start)
    monkeypatch.setattr(module, "configure_logging", lambda *_: None)
    return engine


def _fields(info) -> dict:
    return {name: getattr(info, name) for name in type(info).__dataclass_fields__}


def run(source, output, **settings: object) -> None:
    embed_file(str(source), load(EmbedSettings, {"output": str(output), "batch_size": 4, **settings}), "fake-model")


def expected(engine, texts=TEXTS) -> np.ndarray:
    rows = np.stack([engine._vector(text) for text in texts])
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def embedded_texts(engine) -> list[str]:
    return [text for _, (texts, _, _) in engine.calls for text in texts]


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "in.txt"
    path.write_text("\n".join(TEXTS) + "\n")
    return path


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "in.jsonl"
    rows = [json.dumps({"id": i, "body": text}) for i, text in enumerate(TEXTS)]
    path.write_text("\n".join(rows) + "\n\n")
    return path


@pytest.fixture
def parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "in.parquet"
    table = pyarrow.table({"id": pyarrow.array(range(len(TEXTS)), pyarrow.int16()), "body": TEXTS})
    parquet.write_table(table, path, row_group_size=10)
    return path


def read(path) -> np.ndarray:
    if path.suffix == ".npy":
        return np.load(path)
    if path.suffix == ".jsonl":
        return np.array([json.loads(line)["embedding"] for line in path.read_text().splitlines()], np.float32)
    from pyarrow import parquet

    return np.array(parquet.read_table(path)["embedding"].to_pylist(), np.float32)


@pytest.mark.parametrize("suffix", [".npy", ".jsonl", ".parquet"])
@pytest.mark.parametrize("source", ["lines", "jsonl", "parquet"])
def test_every_input_to_every_output(source: str, suffix: str, request, fake, tmp_path) -> None:
    path, output = request.getfixturevalue(source), tmp_path / f"out{suffix}"
    run(path, output, field="text" if source == "lines" else "body")
    np.testing.assert_allclose(read(output), expected(fake), atol=1e-6)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([path.name, output.name])
    assert fake.is_closed


def test_fields_of_the_rows_are_kept(jsonl, parquet, tmp_path) -> None:
    from pyarrow import parquet as reader

    run(jsonl, tmp_path / "out.jsonl", field="body")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["id"], row["body"]) for row in rows] == list(enumerate(TEXTS))
    run(parquet, tmp_path / "out.parquet", field="body")
    table = reader.read_table(tmp_path / "out.parquet")
    assert table["id"].to_pylist() == list(range(len(TEXTS)))
    assert str(table.schema.field("id").type) == "int16"


def test_options_reach_the_engine(lines, fake, tmp_path) -> None:
    run(lines, tmp_path / "out.npy", normalize=False, prompt_name="query")
    _, params, options = fake.calls[0][1]
    assert (params.normalize, options.prompt_name) == (False, "query")
    assert abs(np.linalg.norm(np.load(tmp_path / "out.npy"), axis=1) - 1).max() > 1e-3


SHARD_ROWS = 5


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_module, "SHARD_ROWS", SHARD_ROWS)


@pytest.mark.usefixtures("small_shards")
def test_an_interrupted_run_repeats_no_finished_shard(lines, fake, tmp_path) -> None:
    """A process that ends at once leaves whole shards and no others."""
    output = tmp_path / "out.npy"
    _run_and_stop(lines, output, fake)
    done = sorted(path.name for path in (tmp_path / "out.npy.partial").glob("part-*.npy"))
    assert done == ["part-00000000.npy", "part-00000001.npy"]
    fake.calls.clear()
    run(lines, output)
    assert embedded_texts(fake) == TEXTS[2 * SHARD_ROWS :]
    np.testing.assert_allclose(np.load(output), expected(fake), atol=1e-6)
    assert not (tmp_path / "out.npy.partial").exists()


@pytest.mark.usefixtures("small_shards")
def test_shards_finish_in_any_order(lines, fake, tmp_path) -> None:
    """The first rows are never answered before the run ends: what came after them is kept."""
    output, answered = tmp_path / "out.npy", []

    async def all_but_the_first(inputs, params, options):
        if inputs[0] == TEXTS[0]:
            await asyncio.Event().wait()
        if len(answered) == 6:
            raise KeyboardInterrupt
        answered.append(inputs)
        return await type(fake).embed(fake, inputs, params, options)

    fake.embed = all_but_the_first
    with pytest.raises(KeyboardInterrupt):
        run(lines, output)
    del fake.embed
    done = [path.name for path in (tmp_path / "out.npy.partial").glob("part-*.npy")]
    assert done == ["part-00000001.npy"]
    fake.calls.clear()
    run(lines, output)
    assert embedded_texts(fake) == TEXTS[:SHARD_ROWS] + TEXTS[2 * SHARD_ROWS :]
    np.testing.assert_allclose(np.load(output), expected(fake), atol=1e-6)


@pytest.mark.parametrize(("most_rows", "most_chars"), [(5, 10**6), (1000, 60), (1, 1)])
def test_shards_are_bounded_in_rows_and_characters(
    most_rows: int, most_chars: int, lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_module, "SHARD_ROWS", most_rows)
    monkeypatch.setattr(input_module, "SHARD_CHARS", most_chars)
    source = input_module.open_input(lines, "text")
    survey = source.survey(lambda row: None)
    parts = [[row.text for row in rows] for _, rows in source.in_shards(survey.shards)]
    assert [text for part in parts for text in part] == TEXTS
    assert survey.num_rows == len(TEXTS)
    for part in parts:
        assert len(part) == 1 or (len(part) <= most_rows and sum(map(len, part)) <= most_chars)


def test_requests_are_bounded_in_rows_and_characters(fake, tmp_path) -> None:
    half = module.REQUEST_CHARS // 2
    texts = ["a"] * (module.REQUEST_ROWS + 3) + ["b" * half, "c" * half, "d", "e" * (module.REQUEST_CHARS + 1), "f"]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    fake.info = type(fake.info)(**{**_fields(fake.info), "max_model_len": 100_000})
    run(tmp_path / "in.jsonl", tmp_path / "out.npy", batch_size=1000)
    sizes = [len(texts) for _, (texts, _, _) in fake.calls]
    assert sizes == [module.REQUEST_ROWS, 4, 2, 1, 1]
    assert embedded_texts(fake) == texts


def test_an_engine_without_room_is_asked_again(lines, fake, tmp_path) -> None:
    refusals = iter(range(3))

    async def sometimes(inputs, params, options):
        if next(refusals, None) is not None:
            raise EngineOverloadedError("full", retry_after_s=0.01, reason="queue_tokens")
        return await type(fake).embed(fake, inputs, params, options)

    fake.embed = sometimes
    run(lines, tmp_path / "out.npy")
    del fake.embed
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected(fake), atol=1e-6)


@pytest.mark.parametrize(
    ("change", "what"),
    [("input", "input"), ("model", "model"), ("dimensions", "dimensions"), ("normalize", "normalize")],
)
@pytest.mark.usefixtures("small_shards")
def test_another_run_is_not_mixed_in(change: str, what: str, lines, fake, tmp_path) -> None:
    output, settings = tmp_path / "out.npy", {}
    _run_and_stop(lines, output, fake)
    if change == "input":
        lines.write_text(lines.read_text() + "one more\n")
    elif change == "model":
        fake.info = type(fake.info)(**{**_fields(fake.info), "max_model_len": 32})
    else:
        settings[change] = {"dimensions": 8, "normalize": False}[change]
    with pytest.raises(CommandError, match=f"another {what}"):
        run(lines, output, **settings)


@pytest.mark.usefixtures("small_shards")
def test_a_run_goes_on_with_another_number_of_lanes(lines, fake, tmp_path) -> None:
    output = tmp_path / "out.npy"
    _run_and_stop(lines, output, fake)
    fake.info = type(fake.info)(**{**_fields(fake.info), "kernels": "native, avx2", "num_lanes": 1})
    run(lines, output)
    assert np.array_equal(np.load(output), expected(fake))


def _run_and_stop(lines, output, engine) -> None:
    """Leaves an unfinished run: the engine fails at some row."""
    embed = type(engine).embed
    count = 0

    async def embed_some(inputs, params, options):
        nonlocal count
        count += len(inputs)
        if count > 10:
            raise OSError("the machine is going down")
        return await embed(engine, inputs, params, options)

    engine.embed = embed_some
    with pytest.raises(CommandError, match="going down"):
        run(lines, output)
    del engine.embed


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("damage", [b"", b"\xff\xfe\x00", b"{", b"[" * 100_000, b"[]", b"{}", b'{"identity": []}'])
def test_a_damaged_manifest_is_named_with_the_way_out(damage: bytes, lines, fake, tmp_path) -> None:
    output, folder = tmp_path / "out.npy", tmp_path / "out.npy.partial"
    _run_and_stop(lines, output, fake)
    (folder / MANIFEST).write_bytes(damage)
    with pytest.raises(CommandError) as error:
        run(lines, output)
    message = str(error.value)
    assert "\n" not in message
    assert f"{folder / MANIFEST} is damaged (" in message
    assert "delete the folder to start over" in message
    assert len(list(folder.glob("part-*"))) == 2


def test_a_file_in_the_place_of_the_folder_is_named(lines, tmp_path) -> None:
    (tmp_path / "out.npy.partial").write_text("mine")
    with pytest.raises(CommandError, match=r"out\.npy\.partial is a file, .* move it away"):
        run(lines, tmp_path / "out.npy")


# (what, file, content, part of the message)
BAD_ROWS = [
    ("not JSON", "in.jsonl", b'{"text": "a"}\n{"text": \n', "in.jsonl, line 2: not valid JSON"),
    ("not an object", "in.jsonl", b'{"text": "a"}\n[1]\n', "in.jsonl, line 2: not a JSON object"),
    ("a blank line", "in.jsonl", b'{"text": "a"}\n \n{"text": "b"}\n', "in.jsonl, line 2: a blank line holds no row"),
    ("null", "in.jsonl", b'{"text": null}\n', "line 1: the field 'text' holds no text"),
    ("no field", "in.jsonl", b'{"body": "a"}\n', "line 1: no field 'text'; it has body; see --field"),
    ("not a text", "in.jsonl", b'{"text": 5}\n', "line 1: the field 'text' holds no text"),
    ("not UTF-8", "in.txt", b"a\nb\n\xff\n", "in.txt, line 3: not valid UTF-8"),
    ("empty", "in.txt", b"", "holds no rows"),
]


@pytest.mark.parametrize(
    ("name", "content", "part"), [case[1:] for case in BAD_ROWS], ids=[case[0] for case in BAD_ROWS]
)
def test_bad_rows_are_named_before_any_work(name: str, content: bytes, part: str, fake, tmp_path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CommandError) as error:
        run(tmp_path / name, tmp_path / "out.npy")
    assert part in str(error.value)
    assert error.value.exit_code == 1
    assert not fake.calls
    assert [path.name for path in tmp_path.iterdir()] == [name]


def parquet_bytes(damage: str) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    sink = pyarrow.BufferOutputStream()
    texts = pyarrow.array(["a", "b"] * 2000)
    if damage == "not UTF-8":
        offsets = pyarrow.py_buffer(np.array([0, 1, 2], np.int32))
        texts = pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, offsets, pyarrow.py_buffer(b"a\xff")])
    parquet.write_table(pyarrow.table({"text": texts}), sink, use_dictionary=False)
    whole = sink.getvalue().to_pybytes()
    noise = np.random.default_rng(0).bytes(300)
    return {
        "empty": b"",
        "garbage": noise,
        "marks alone": b"PAR1\0\0\0\0PAR1",
        "cut": whole[:-40],
        "damaged rows": whole[:40] + noise + whole[340:],
        "damaged footer": whole[:-200] + noise[:180] + whole[-20:],
        "not UTF-8": whole,
    }[damage]


@pytest.mark.parametrize(
    "damage", ["empty", "garbage", "marks alone", "cut", "damaged rows", "damaged footer", "not UTF-8"]
)
def test_a_damaged_parquet_is_named(damage: str, fake, tmp_path) -> None:
    (tmp_path / "in.parquet").write_bytes(parquet_bytes(damage))
    with pytest.raises(CommandError) as error:
        run(tmp_path / "in.parquet", tmp_path / "out.npy")
    assert str(error.value).startswith(f"{tmp_path / 'in.parquet'}: it cannot be read as Parquet (")
    assert "\n" not in str(error.value)
    assert not fake.calls


def test_unwritable_columns_keep_the_embeddings(fake, tmp_path, monkeypatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def refuse(*_: object) -> None:
        raise pyarrow.ArrowNotImplementedError("no such type")

    parquet.write_table(pyarrow.table({"text": ["a", "b"]}), tmp_path / "in.parquet")
    monkeypatch.setattr(output_module, "_parquet_schema", refuse)
    with pytest.raises(CommandError, match=r"rename the folder out\.parquet\.partial to out\.npy\.partial"):
        run(tmp_path / "in.parquet", tmp_path / "out.parquet")
    (tmp_path / "out.parquet.partial").rename(tmp_path / "out.npy.partial")
    fake.calls.clear()
    run(tmp_path / "in.parquet", tmp_path / "out.npy")
    assert not fake.calls
    assert len(np.load(tmp_path / "out.npy")) == 2


@pytest.mark.parametrize(("source", "output"), [("a" * 300 + ".txt", "out.npy"), ("in.txt", "a" * 300 + ".npy")])
def test_too_long_file_names_give_one_line(source: str, output: str, lines, tmp_path) -> None:
    with pytest.raises(CommandError, match=r"File name too long: .*aaaa"):
        run(tmp_path / source, tmp_path / output)


def test_a_parquet_null_is_named(tmp_path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": ["a", None]}), tmp_path / "in.parquet")
    with pytest.raises(CommandError, match=r"in\.parquet, row 2: the column 'text' holds no text"):
        run(tmp_path / "in.parquet", tmp_path / "out.npy")
    with pytest.raises(CommandError, match="no column 'body'; it has text"):
        run(tmp_path / "in.parquet", tmp_path / "out.npy", field="body")


@pytest.mark.usefixtures("small_shards")
def test_too_long_a_row_is_named_and_shards_before_it_are_kept(lines, fake, tmp_path) -> None:
    texts = [*TEXTS[:9], "word " * 100, *TEXTS[9:]]
    lines.write_text("\n".join(texts))
    output = tmp_path / "out.npy"
    with pytest.raises(CommandError, match=r"in\.txt, line 10: 102 tokens; the model takes 64; --auto-truncate"):
        run(lines, output)
    assert (tmp_path / "out.npy.partial" / "part-00000000.npy").exists()


def test_existing_output_is_kept(lines, fake, tmp_path) -> None:
    output = tmp_path / "out.npy"
    output.write_text("precious")
    with pytest.raises(UsageError, match="exists; give --overwrite"):
        run(lines, output)
    assert output.read_text() == "precious"
    run(lines, output, overwrite=True)
    assert len(np.load(output)) == len(TEXTS)


@pytest.mark.parametrize(
    ("source", "output", "part"),
    [
        ("missing.txt", "out.npy", "FILE: there is no file"),
        ("in.csv", "out.npy", "FILE: in.csv must end in"),
        ("in.txt", "out.csv", "--output: out.csv must end in"),
        ("in.txt", "nowhere/out.npy", "--output: there is no folder"),
        ("in.txt", "folder.npy", "folder.npy is a folder"),
    ],
)
def test_wrong_paths(source: str, output: str, part: str, lines, fake, tmp_path) -> None:
    (tmp_path / "in.csv").write_text("a")
    (tmp_path / "folder.npy").mkdir()
    with pytest.raises(UsageError) as error:
        run(tmp_path / source, tmp_path / output)
    assert part in str(error.value)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"dimensions": 4}, "^--dimensions is 4, but .* leave --dimensions out .* load it with --hf-overrides"),
        ({"prompt_name": "x"}, "^--prompt-name: .* no prompt 'x'"),
    ],
)
def test_option_refused_by_the_model_names_no_row(option, message, lines, fake, tmp_path) -> None:
    with pytest.raises(UsageError, match=message):
        run(lines, tmp_path / "out.npy", **option)
    assert not fake.calls
    assert fake.is_closed
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]


@pytest.mark.parametrize(("name", "content"), [("in.txt", "a\nb\n"), ("in.jsonl", '{"text": "a"}\n{"text": "b"}\n')])
def test_a_byte_order_mark_is_skipped(name: str, content: str, fake, tmp_path) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8-sig")
    run(tmp_path / name, tmp_path / "out.npy")
    assert embedded_texts(fake) == ["a", "b"]


def test_unwritable_fields_keep_the_embeddings(fake, tmp_path, monkeypatch) -> None:
    deep = "[" * 500 + "]" * 500
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n{"text": "b", "deep": ' + deep + "}\n")
    monkeypatch.setattr(JsonLines, "json_object", InputFile.json_object)  # such as a value of Parquet
    with pytest.raises(CommandError, match=r"in\.jsonl, line 2: its fields cannot be written as JSON"):
        run(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
    fake.calls.clear()
    (tmp_path / "out.jsonl.partial").rename(tmp_path / "out.npy.partial")  # what the message says
    run(tmp_path / "in.jsonl", tmp_path / "out.npy")
    assert not fake.calls
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected(fake, ["a", "b"]), atol=1e-6)


def test_parquet_without_pyarrow_says_how_to_install_it(lines, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(UsageError, match=r"pip install penstock\[parquet\]"):
        run(lines, tmp_path / "out.parquet")
