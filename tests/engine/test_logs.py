"""Log lines are written by a background thread, in order, and a slow reader does not block the process."""

import contextlib
import logging
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from io import TextIOWrapper
from typing import NamedTuple

import orjson
import pytest

from penstock.engine import logs
from penstock.engine.logs import BackgroundHandler, JsonFormatter

MAX_WAITING = 8


class Piped(NamedTuple):
    """A logger, its handler, and the descriptor of the pipe to read its lines from."""

    logger: logging.Logger
    handler: BackgroundHandler
    reader: int

    def read(self) -> list[str]:
        """Waits until all lines are written and returns them."""
        text, is_written = b"", False
        while not is_written:
            is_written = self.handler.wait_written()
            with contextlib.suppress(BlockingIOError):
                text += os.read(self.reader, 2**20)
        return text.decode().splitlines()


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> Iterator[Piped]:
    monkeypatch.setattr(logs, "_MAX_WAITING", MAX_WAITING)
    monkeypatch.setattr(logs, "_EXIT_WAIT_S", 0.2)
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    with os.fdopen(writer, "w", encoding="utf-8") as stream:
        handler = BackgroundHandler(stream)
        logger = logging.Logger("piped")  # noqa: LOG001 - only this test uses it
        logger.addHandler(handler)
        yield Piped(logger, handler, reader)
        os.close(reader)  # ends a blocked write
        handler.flush()


def fill(piped: Piped) -> str:
    """Fills the pipe and returns the line that does not fit."""
    line = "x" * 2**17
    piped.logger.info("%s", line)
    while piped.handler._waiting:
        time.sleep(0.001)
    return line


def test_lines_are_written_in_order_with_their_old_values(piped: Piped) -> None:
    words = ["a"]
    for number in range(MAX_WAITING):
        piped.logger.info("%d %s", number, words)
        words.append("b")
    assert piped.read() == [f"{number} {['a', *'b' * number]}" for number in range(MAX_WAITING)]


def test_record_that_cannot_be_formatted_is_reported(piped: Piped, capsys: pytest.CaptureFixture[str]) -> None:
    piped.logger.info("%d rows", "many")
    piped.logger.info("next")
    assert piped.read() == ["next"]
    assert "--- Logging error ---" in capsys.readouterr().err


def test_json_lines_hold_exception_and_fields(piped: Piped) -> None:
    piped.handler.setFormatter(JsonFormatter())
    fields = {"status": 200}
    try:
        raise ValueError("made up")
    except ValueError:
        piped.logger.exception("it failed", extra={"fields": fields})
    fields["status"] = 500
    (line,) = map(orjson.loads, piped.read())
    assert (line["message"], line["level"], line["status"]) == ("it failed", "error", 200)
    assert line["exception"].endswith("ValueError: made up")


def test_lines_above_the_limit_are_dropped_and_counted(piped: Piped) -> None:
    first = fill(piped)
    for number in range(MAX_WAITING + 5):
        piped.logger.info("%d", number)
    assert not piped.handler.wait_written()
    *lines, notice = piped.read()
    assert lines == [first, *map(str, range(MAX_WAITING))]
    assert notice.startswith("5 log lines before this one are lost")
    piped.logger.info("on")
    assert piped.read() == ["on"]


@pytest.fixture
def script() -> str:
    return textwrap.dedent("""
        import logging, sys
        from penstock.engine.logs import configure_logging

        configure_logging("info", "console")
        for number in range(int(sys.argv[1])):
            logging.info("line %05d %s", number, "x" * 50)
    """)


def test_process_writes_all_lines_before_it_ends(script: str) -> None:
    done = subprocess.run([sys.executable, "-P", "-c", script, "4000"], capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    assert [int(line.split()[5]) for line in lines] == list(range(4000))


def test_process_ends_soon_without_a_reader(script: str) -> None:
    command = [sys.executable, "-P", "-c", script, "20000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.wait(30) == 0
        assert isinstance(process.stderr, TextIOWrapper)
        assert process.stderr.readline().split()[5] == "00000"
