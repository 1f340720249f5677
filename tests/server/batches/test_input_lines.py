"""Input files: read line by line, whatever they hold."""

import json
from pathlib import Path

import pytest

from penstock.server.batches.input_lines import InputFile


def line(name: str = "a", **body: object) -> bytes:
    row = {"custom_id": name, "method": "POST", "url": "/v1/embeddings", "body": body or {"input": "x"}}
    return json.dumps(row).encode()


@pytest.fixture
def read(tmp_path: Path):
    def read(content: bytes, *, max_line_bytes: int = 10_000_000, max_values: int = 1_000_000) -> InputFile:
        (tmp_path / "lines").write_bytes(content)
        return InputFile(tmp_path / "lines", "/v1/embeddings", max_line_bytes, max_values)

    return read


def codes(file: InputFile) -> list[tuple[str, int | None]]:
    return [(error.code, error.line) for error in file.check().errors]


def test_marks_and_empty_lines_are_passed_over(read) -> None:
    file = read(b"\xef\xbb\xbf" + line("a") + b"\r\n\n  \n" + line("b"))
    assert file.check() == (2, [])
    assert [(found.number, found.custom_id) for part in file.slices(set()) for found in part] == [(1, "a"), (4, "b")]
    assert [found.number for part in file.slices({1}) for found in part] == [4]


def test_other_keys_are_passed_over(read) -> None:
    assert read(json.dumps({**json.loads(line()), "note": 1}).encode()).check() == (1, [])


def test_a_long_line_is_told_and_never_read_whole(read) -> None:
    file = read(line("a", input="x" * 500_000) + b"\n" + line("b"), max_line_bytes=1000)
    assert codes(file) == [("line_too_long", 1)]


def test_a_dense_line_is_counted_before_it_is_parsed(read) -> None:
    assert codes(read(line("a", input=[[]] * 50_000))) == []
    assert codes(read(line("a", input=[[]] * 50_000), max_values=100_000)) == [("line_too_long", 1)]
    assert codes(read(line("a") + b"\n" + b"[" * 200_000)) == [("invalid_json_line", 2)]
    assert codes(read(b"\xff\xfe\n" + line("a"))) == [("invalid_json_line", 1)]


def test_inputs_are_counted_as_texts(read) -> None:
    lists = [line(str(i), input=["x"] * 1000) for i in range(50)]
    assert codes(read(b"\n".join(lists))) == []
    assert codes(read(b"\n".join([*lists, line("one", input="x")]))) == [("too_many_inputs", None)]
    ids = [line(str(i), input=list(range(1000))) for i in range(51)]  # of one text each
    assert codes(read(b"\n".join(ids))) == []


def test_slices_are_small(read) -> None:
    file = read(b"\n".join(line(str(i), input="x" * 20_000) for i in range(150)))
    sizes = [len(part) for part in file.slices(set())]
    assert sum(sizes) == 150
    assert max(sizes) < 60
    many = read(b"\n".join(line(str(i)) for i in range(250)))
    assert [len(part) for part in many.slices(set())] == [100, 100, 50]
