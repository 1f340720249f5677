"""The head of a response is written together with the first part of its body."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest

from penstock.server.http.streams import ResponseWriter

HEAD, BODY, REST = b"HTTP/1.1 200 OK\r\n\r\n", b"some", b"more"


@pytest.fixture
def transport() -> Mock:
    return Mock()


def begin(writer: ResponseWriter, *, response_started: bool = True) -> SimpleNamespace:
    cycle = SimpleNamespace(response_started=response_started)
    writer.begin(cycle)
    return cycle


@pytest.fixture
def writer(transport: Mock) -> ResponseWriter:
    """Returns a writer after the start of a response."""
    writer = ResponseWriter(transport, transport.end)
    begin(writer)
    return writer


def test_head_is_written_with_the_first_part_of_the_body(transport: Mock, writer: ResponseWriter) -> None:
    for number in (1, 2):
        writer.write(HEAD)
        assert not transport.mock_calls
        writer.write(BODY)
        writer.write(REST)
        writer.flush()
        assert transport.mock_calls == [call.writelines((HEAD, BODY)), call.write(REST)]
        assert writer.num_written == number * len(HEAD + BODY + REST)
        transport.reset_mock()
        begin(writer)


@pytest.mark.parametrize(
    ("end", "calls"),
    [
        (lambda writer: writer.flush(), [call.write(HEAD)]),
        (lambda writer: writer.write(b""), [call.write(HEAD), call.write(b"")]),
        (lambda writer: writer.close(), [call.write(HEAD), call.end()]),
        (lambda writer: writer.forget(), []),  # the connection is lost
    ],
)
def test_head_without_a_body_is_written_at_the_end(transport: Mock, writer: ResponseWriter, end, calls: list) -> None:
    writer.write(HEAD)
    end(writer)
    writer.flush()
    assert transport.mock_calls == calls


def test_interim_response_is_written_at_once(transport: Mock, writer: ResponseWriter) -> None:
    cycle = begin(writer, response_started=False)
    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert transport.mock_calls == [call.write(b"HTTP/1.1 100 Continue\r\n\r\n")]
    cycle.response_started = True
    writer.write(HEAD)
    writer.write(BODY)
    assert transport.mock_calls[1:] == [call.writelines((HEAD, BODY))]
