"""Receives the upload of a file: parses the form and writes the file."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO, Final

from fastapi import HTTPException
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from penstock.engine.protocol.errors import InvalidRequestError, StorageError

from ..admission import LimitError, ServerRejectionReason
from ..errors import quote

MULTIPART: Final = "multipart/form-data"
_PIECE_BYTES: Final = 512 * 1024
"""Bytes per call to the thread that parses and writes."""
_MAX_FIELD_BYTES: Final = 4096
_MAX_PARTS: Final = 16
OVERHEAD_BYTES: Final = 64 * 1024
"""Bytes that a body may have in addition to its file."""


class Upload:
    """A form with one file, `file`, and fields of text. Written to by one thread at a time.

    Attributes:
        fields: The other parts of the form.
        filename: Name given by the client; None before the file part.
        num_bytes: Bytes of the file so far.

    Args:
        content_type: Content-Type of the request, with the boundary.

    Raises:
        HTTPException: 415 if the body is not a form.
        OSError: The file cannot be created.
    """

    def __init__(self, content_type: str, path: Path, max_bytes: int) -> None:
        media, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if media != MULTIPART.encode() or not boundary:
            raise HTTPException(415, f"Content-Type is {quote(content_type)}; send {MULTIPART} with a boundary.")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._num_parts = 0
        self._name = ""
        self._value: bytearray | None = None  # value of the current field; None while the part is the file
        self._header = [bytearray(), bytearray()]
        self._disposition = b""
        self._is_whole = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
                    "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._begin_value,
                    "on_part_data": self._take,
                    "on_part_end": self._end_part,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise InvalidRequestError(f"The form cannot be read: {error}.") from error
        self._file: BinaryIO = path.open("xb")

    async def receive(self, body: AsyncIterator[bytes]) -> None:
        """Receives a whole body. Returns when the file is on the disk.

        Raises:
            InvalidRequestError: The form is invalid.
            HTTPException: 413 if the file is too large.
            StorageError: The disk fails or is full.
        """
        waiting = bytearray()
        num_body = 0
        try:
            async for piece in body:
                waiting += piece
                num_body += len(piece)
                if num_body > self._max_bytes + OVERHEAD_BYTES:
                    raise file_too_large_error(self._max_bytes)
                if len(waiting) >= _PIECE_BYTES:
                    await asyncio.to_thread(self._parser.write, bytes(waiting))
                    waiting.clear()
            await asyncio.to_thread(self._parser.write, bytes(waiting))
            if not self._is_whole:
                raise InvalidRequestError("The form ends before its last boundary.")
            await asyncio.to_thread(self._sync)
        except FormParserError as error:
            raise InvalidRequestError(f"The form cannot be read: {error}.") from error
        except OSError as error:
            raise StorageError(f"The server cannot keep the file: {error.strerror}. Please try again later.") from error

    def close(self) -> None:
        """Closes the file, and breaks the reference cycle of this object and its parser."""
        self._parser.callbacks = {}
        self._file.close()

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def _begin_part(self) -> None:
        self._num_parts += 1
        self._disposition = b""
        if self._num_parts > _MAX_PARTS:
            raise InvalidRequestError(
                f"The form has more than {_MAX_PARTS} parts; send file, purpose and expires_after."
            )

    def _end_header(self) -> None:
        name, value = map(bytes, self._header)
        if name.lower() == b"content-disposition":
            self._disposition = value
        self._header = [bytearray(), bytearray()]

    def _begin_value(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name != "file":
            self._value = bytearray()
            return
        if self.filename is not None:
            raise InvalidRequestError("The form has more than one file; upload them one by one.", param="file")
        self._value = None
        self.filename = options.get(b"filename", b"").decode("utf-8", "replace") or "upload"

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._value is None:
            self.num_bytes += end - start
            if self.num_bytes > self._max_bytes:
                raise file_too_large_error(self._max_bytes)
            self._file.write(memoryview(data)[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > _MAX_FIELD_BYTES:
            raise InvalidRequestError(f"{quote(self._name)} is longer than {_MAX_FIELD_BYTES} bytes.")

    def _end_part(self) -> None:
        if self._value is not None:
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self._is_whole = True


def file_too_large_error(max_bytes: int) -> LimitError:
    """Returns the error for a file larger than `max_bytes`."""
    message = f"The file is larger than the limit of {max_bytes} bytes (--max-file-bytes). Split it."
    return LimitError(413, message, ServerRejectionReason.FILE_BYTES, {"connection": "close"})
