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


@pytest.fixture
def writer(transport: Mock) -> ResponseWriter:
    """Returns a writer after the start of a response."""
    writer = ResponseWriter(transport, transport.end)
    begin(writer)
    return writer


def begin(writer: ResponseWriter, *, response_started: bool = True) -> SimpleNamespace:
    cycle = SimpleNamespace(response_started=response_started)
    writer.begin(cycle)  # type: ignore[arg-type]
    return cycle


def test_head_is_written_with_the_first_part_of_the_body(transport: Mock, writer: ResponseWriter) -> None:
    writer.write(HEAD)
    assert not transport.mock_calls
    writer.write(BODY)
    writer.write(REST)
    writer.flush()
    assert transport.mock_calls == [call.writelines((HEAD, BODY)), call.write(REST)]


def test_head_without_a_body_is_written_by_flush(transport: Mock, writer: ResponseWriter) -> None:
    writer.write(HEAD)
    writer.flush()
    writer.flush()
    assert transport.mock_calls == [call.write(HEAD)]


def test_empty_body_adds_nothing_to_the_head(transport: Mock, writer: ResponseWriter) -> None:
    writer.write(HEAD)
    writer.write(b"")
    assert transport.mock_calls[0] == call.write(HEAD)
    assert not transport.writelines.called


def test_head_is_written_before_close(transport: Mock, writer: ResponseWriter) -> None:
    writer.write(HEAD)
    writer.close()
    assert transport.mock_calls == [call.write(HEAD), call.end()]


def test_interim_response_is_written_at_once(transport: Mock, writer: ResponseWriter) -> None:
    cycle = begin(writer, response_started=False)
    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert transport.mock_calls == [call.write(b"HTTP/1.1 100 Continue\r\n\r\n")]
    cycle.response_started = True
    writer.write(HEAD)
    writer.write(BODY)
    assert transport.mock_calls[1:] == [call.writelines((HEAD, BODY))]


def test_each_response_has_a_head(transport: Mock, writer: ResponseWriter) -> None:
    for _ in range(2):
        begin(writer)
        writer.write(HEAD)
        writer.write(BODY)
    assert transport.mock_calls == [call.writelines((HEAD, BODY))] * 2


def test_head_of_a_lost_connection_is_dropped(transport: Mock, writer: ResponseWriter) -> None:
    writer.write(HEAD)
    writer.forget()
    writer.flush()
    assert not transport.mock_calls
