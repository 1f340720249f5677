"""A head goes out with what follows it, and alone where nothing does."""

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
    """A writer whose answer has begun."""
    writer = ResponseWriter(transport, transport.end)
    begin(writer)
    return writer


def begin(writer: ResponseWriter, *, response_started: bool = True) -> SimpleNamespace:
    cycle = SimpleNamespace(response_started=response_started)
    writer.begin(cycle)  # type: ignore[arg-type]
    return cycle


def test_a_head_goes_out_with_the_first_part_of_the_body(transport: Mock, writer: ResponseWriter) -> None:
    writer.write(HEAD)
    assert not transport.mock_calls
    writer.write(BODY)
    writer.write(REST)
    writer.flush()
    assert transport.mock_calls == [call.writelines((HEAD, BODY)), call.write(REST)]


def test_a_head_that_nothing_follows_goes_out_alone(transport: Mock, writer: ResponseWriter) -> None:
    writer.write(HEAD)
    writer.flush()
    writer.flush()
    assert transport.mock_calls == [call.write(HEAD)]


def test_an_empty_body_is_no_piece_beside_its_head(transport: Mock, writer: ResponseWriter) -> None:
    writer.write(HEAD)
    writer.write(b"")
    assert transport.mock_calls[0] == call.write(HEAD)
    assert not transport.writelines.called


def test_a_head_goes_out_before_the_end(transport: Mock, writer: ResponseWriter) -> None:
    writer.write(HEAD)
    writer.close()
    assert transport.mock_calls == [call.write(HEAD), call.end()]


def test_an_interim_response_does_not_wait(transport: Mock, writer: ResponseWriter) -> None:
    cycle = begin(writer, response_started=False)
    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert transport.mock_calls == [call.write(b"HTTP/1.1 100 Continue\r\n\r\n")]
    cycle.response_started = True
    writer.write(HEAD)
    writer.write(BODY)
    assert transport.mock_calls[1:] == [call.writelines((HEAD, BODY))]


def test_each_answer_has_a_head(transport: Mock, writer: ResponseWriter) -> None:
    for _ in range(2):
        begin(writer)
        writer.write(HEAD)
        writer.write(BODY)
    assert transport.mock_calls == [call.writelines((HEAD, BODY))] * 2


def test_a_lost_connection_keeps_no_head(transport: Mock, writer: ResponseWriter) -> None:
    writer.write(HEAD)
    writer.forget()
    writer.flush()
    assert not transport.mock_calls
