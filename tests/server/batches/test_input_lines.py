import itertools
import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from penstock.server.batches import input_lines
from penstock.server.batches.input_lines import BatchInput
from penstock.server.http.json_reader import count_values


def line(name: str = "a", **body: object) -> bytes:
    row = {"custom_id": name, "method": "POST", "url": "/v1/embeddings", "body": body or {"input": "x"}}
    return json.dumps(row).encode()


@pytest.fixture
def read(tmp_path: Path):
    def read(content: bytes, *, max_line_bytes: int = 10_000_000, max_values: int = 1_000_000) -> BatchInput:
        (tmp_path / "lines").write_bytes(content)
        return BatchInput(tmp_path / "lines", "/v1/embeddings", max_line_bytes, max_values, counts_inputs=True)

    return read


def codes(file: BatchInput) -> list[tuple[str, int | None]]:
    return [(error.code, error.line) for error in file.check().errors]


def test_byte_order_mark_and_empty_lines_are_skipped(read) -> None:
    file = read(b"\xef\xbb\xbf" + line("a") + b"\r\n\n  \n" + line("b"))
    assert file.check() == (2, [])
    spans = file.next_spans(set())
    assert [file.read(span)[0] for span in spans] == ["a", "b"]
    assert file.custom_ids(spans) == [(1, "a"), (4, "b")]
    assert [span.number for span in file.next_spans({1})] == [4]
    assert [span.number for span in file.next_spans(set(), after=spans[0])] == [4]


def test_unknown_keys_of_a_line_are_ignored(read) -> None:
    assert read(json.dumps({**json.loads(line()), "note": 1}).encode()).check() == (1, [])


def test_custom_id_may_have_512_characters(read) -> None:
    assert codes(read(line("a" * 512))) == []
    assert codes(read(line("a" * 513))) == [("invalid_custom_id", 1)]


def test_values_of_a_line_are_counted_before_parsing(read) -> None:
    many = line("a", input=[[]] * 50_000)
    num_values = max(count_values(many))
    assert codes(read(many, max_values=num_values)) == []
    assert codes(read(many, max_values=num_values - 1)) == [("line_too_long", 1)]
    assert codes(read(line("a") + b"\n" + b"[" * 100_000, max_values=1_000_000)) == [("invalid_json_line", 2)]
    assert codes(read(b"\xff\xfe\n" + line("a"))) == [("invalid_json_line", 1)]


def test_inputs_of_all_lines_are_limited(read, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = [line(str(i), input=["x"] * 1000) for i in range(50)]
    assert codes(read(b"\n".join(lists))) == []
    assert codes(read(b"\n".join([*lists, line("one", input="x")]))) == [("too_many_inputs", None)]
    monkeypatch.setattr(input_lines, "MAX_INPUTS", 2)
    inputs = ("x", [1, 2, 3], [], ["a"])  # a text, the token ids of a text, nothing, a list of one text
    file = read(b"\n".join(line(str(i), input=each) for i, each in enumerate(inputs)))
    (error,) = file.check().errors
    assert error.message == "The lines hold 3 inputs together; the limit is 2. Split the file."


def test_lines_and_errors_of_a_file_are_limited(read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_lines, "MAX_LINES", 3)
    assert read(b"\n".join([line("a"), b"", line("b"), line("c")])).check() == (3, [])
    too_many = read(b"\n".join([line("a"), b"", line("b"), line("c"), line("d")])).check()
    assert (too_many.num_lines, [(error.code, error.line) for error in too_many.errors]) == (0, [("too_many_lines", 5)])
    monkeypatch.setattr(input_lines, "MAX_ERRORS", 2)
    assert codes(read(b"1\n2\n3\n")) == [("invalid_json_line", 1), ("invalid_json_line", 2)]


def test_body_of_a_line_is_that_of_the_route(read) -> None:
    file = read(line(input="é", dimensions=3))
    (span,) = file.next_spans(set())
    assert json.loads(file.read(span)[1]) == {"input": "é", "dimensions": 3}


def test_line_that_orjson_can_read_but_not_write_is_invalid(read) -> None:
    deep = line("b", x=1).replace(b'"x": 1', b'"x": ' + b"[" * 300 + b"]" * 300)
    assert codes(read(line("a") + b"\n" + deep)) == [("invalid_body", 2)]


def test_line_after_much_white_space_is_too_long(read) -> None:
    file = read(b" " * 200_000 + line("a") + b"\n" + line("b"), max_line_bytes=1000)
    assert codes(file) == [("line_too_long", 1)]
    assert [span.number for span in file.next_spans(set())] == [1, 2]
    assert read(b" " * 200_000 + b"\n" + line("b"), max_line_bytes=1000).check() == (1, [])
    assert read(line("a") + b" " * 200_000 + b"\n" + line("b"), max_line_bytes=1000).check() == (2, [])
    assert codes(read(line("a") + b" " * 200_000 + b"x", max_line_bytes=1000)) == [("line_too_long", 1)]
    assert codes(read(line("a"), max_line_bytes=len(line("a")))) == []
    assert codes(read(line("a"), max_line_bytes=len(line("a")) - 1)) == [("line_too_long", 1)]


def test_reader_leaves_half_of_the_time_to_other_threads(read, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(input_lines, "time", timer := Mock(monotonic=lambda: next(clock) * 0.0003))
    assert len(read(b"\n".join(line(str(i)) for i in range(150))).next_spans(set())) == 100
    assert {call.args for call in timer.sleep.call_args_list} == {(0.001,)}
    assert 20 <= timer.sleep.call_count <= 30
