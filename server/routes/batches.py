"""OpenAI's files and batches. Their state is on disk; each line of a batch is a request to another route."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, BinaryIO, Final, Literal, Protocol

from fastapi import Path, Query, Request, Response
from fastapi.responses import FileResponse
from starlette.types import Receive, Scope, Send

from penstock.engine.protocol.errors import UnknownObjectError

from ..batches.database import Page
from ..batches.service import BatchService
from ..batches.upload import file_too_large_error
from ..calls.context import reject_other_origins
from ..dialects import OPENAI, Responses
from ..errors import ErrorBody, quote
from ..http.json_reader import receive_part
from ..http.json_responses import json_response
from ..request_state import state_of
from ..routing import Router
from ..schemas.batch_bodies import (
    UPLOAD_SCHEMA,
    BatchList,
    BatchObject,
    BatchRequest,
    FileDeleted,
    FileList,
    FileObject,
)

FILES: Final = "/v1/files"
_MORE_ERRORS: Final[Responses] = {
    404: {"model": ErrorBody, "description": "The client has no such file or batch."},
    507: {"model": ErrorBody, "description": "The disk is full or failed."},
}
_CONFLICT: Final[Responses] = {
    409: {"model": ErrorBody, "description": "The state of the file or batch does not allow this."}
}
_CONTENT: Final[Responses] = {
    200: {"content": {"application/jsonl": {"schema": {"type": "string"}}}, "description": "The bytes of the file."}
}
router = Router(OPENAI, tag="openai", responses={**OPENAI.responses, **_MORE_ERRORS})
disabled_router = Router(OPENAI, in_schema=False)

FileId = Annotated[str, Path(description="Id of the file.")]
BatchId = Annotated[str, Path(description="Id of the batch.")]
After = Annotated[str | None, Query(description="Id of the last entry of the previous page.")]


class OpenFileResponse(FileResponse):
    """Sends an open file. It is sent completely even if it is removed meanwhile.

    Args:
        file: The file. It is closed when it has been sent.
        media_type: Its Content-Type.
    """

    def __init__(self, file: BinaryIO, *, media_type: str, filename: str) -> None:
        self._file = file
        number = file.fileno()
        super().__init__(f"/dev/fd/{number}", media_type=media_type, filename=filename, stat_result=os.fstat(number))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the file, or the ranges of it that the request asks for."""
        with self._file:
            await super().__call__(scope, receive, send)


class _Entry(Protocol):
    @property
    def id(self) -> str: ...

    def to_openai(self) -> dict[str, Any]: ...


@router.post(FILES, response_model=FileObject, openapi_extra=UPLOAD_SCHEMA)
async def upload_file(request: Request) -> Response:
    """Uploads a file of requests for a batch."""
    batches, headers = _batches(request), request.headers
    reject_other_origins(request)
    announced = headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > batches.max_upload_bytes:
        raise file_too_large_error(batches.files.max_bytes)
    file = await batches.files.receive(headers.get("content-type", ""), _body(request), _owner(request))
    return json_response(file.to_openai())


@router.get(FILES, response_model=FileList, operation_id="list_v1_files")
async def list_files(
    request: Request,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=10_000, description="Maximum number of entries.")] = 10_000,
    order: Annotated[Literal["asc", "desc"], Query(description="Order by creation time.")] = "desc",
    purpose: Annotated[str | None, Query(description="List only files with this purpose.")] = None,
) -> Response:
    """Lists the files of the client."""
    page = Page(after, limit, is_ascending=order == "asc")
    return _page(await _batches(request).page_of_files(_owner(request), page, purpose), limit)


@router.get("/v1/files/{file_id}", response_model=FileObject)
async def get_file(request: Request, file_id: FileId) -> Response:
    """Describes a file."""
    return json_response((await _batches(request).files.find(file_id, _owner(request))).to_openai())


@router.get("/v1/files/{file_id}/content", response_class=Response, responses=_CONTENT)
async def get_file_content(request: Request, file_id: FileId) -> Response:
    """Returns the bytes of a file."""
    files = _batches(request).files
    file = await files.find(file_id, _owner(request))
    try:
        opened = await asyncio.to_thread(files.path(file.id).open, "rb")
    except FileNotFoundError:  # it has been removed since it was found
        raise UnknownObjectError(f"There is no file {quote(file_id)}.", param="file_id") from None
    return OpenFileResponse(opened, media_type="application/jsonl", filename=file.filename)


@router.route(
    ["DELETE"], "/v1/files/{file_id}", response_model=FileDeleted, responses=_CONFLICT, operation_id="delete_file"
)
async def delete_file(request: Request, file_id: FileId) -> Response:
    """Removes a file that no batch reads."""
    await _batches(request).remove_file(file_id, _owner(request))
    return json_response({"id": file_id, "object": "file", "deleted": True})


@router.post("/v1/batches", cancels_on_disconnect=False, response_model=BatchObject)
async def create_batch(body: BatchRequest, request: Request) -> Response:
    """Creates a batch that runs the requests of a file, one at a time, while the model has no other requests."""
    return json_response((await _batches(request).create(body, _owner(request))).to_openai())


@router.get("/v1/batches", response_model=BatchList, operation_id="list_v1_batches")
async def list_batches(
    request: Request,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=100, description="Maximum number of entries.")] = 20,
) -> Response:
    """Lists the batches of the client, newest first."""
    return _page(await _batches(request).page(_owner(request), Page(after, limit)), limit)


@router.get("/v1/batches/{batch_id}", response_model=BatchObject)
async def get_batch(request: Request, batch_id: BatchId) -> Response:
    """Returns a batch: its status, counts and output files."""
    return json_response((await _batches(request).find(batch_id, _owner(request))).to_openai())


@router.post("/v1/batches/{batch_id}/cancel", response_model=BatchObject, responses=_CONFLICT)
async def cancel_batch(request: Request, batch_id: BatchId) -> Response:
    """Cancels a batch. The output of completed requests is kept."""
    reject_other_origins(request)
    return json_response((await _batches(request).cancel(batch_id, _owner(request))).to_openai())


@disabled_router.route(["GET", "POST"], FILES)
@disabled_router.route(["GET", "DELETE"], "/v1/files/{rest:path}")
@disabled_router.route(["GET", "POST"], "/v1/batches")
@disabled_router.route(["GET", "POST"], "/v1/batches/{rest:path}")
async def batches_disabled() -> Response:
    """Responds with 404 and the flag that enables files and batches."""
    return OPENAI.status_error(404, "Files and batches are off on this server; --data-dir FOLDER switches them on.")


def _batches(request: Request) -> BatchService:
    batches: BatchService = request.app.state.batches
    return batches


def _owner(request: Request) -> str:
    return state_of(request.scope).owner


async def _body(request: Request) -> AsyncIterator[bytes]:
    has_more = True
    while has_more:
        part, has_more = await receive_part(request.scope, request.receive)
        if part:
            yield part


def _page(found: Sequence[_Entry], limit: int) -> Response:
    """Returns one page. `found` has `limit` + 1 entries if another page follows."""
    entries = found[:limit]
    return json_response(
        {
            "object": "list",
            "data": [entry.to_openai() for entry in entries],
            "first_id": entries[0].id if entries else None,
            "last_id": entries[-1].id if entries else None,
            "has_more": len(found) > limit,
        }
    )
