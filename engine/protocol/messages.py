"""Typed messages between engine clients and the core of the engine.

The first frame of a message is a small msgspec struct. Arrays follow as raw little-endian buffers, which
ClientMessageBuilder and batch_outputs.py pack. Nothing is pickled. An in-process core gets the same structs by
reference.

An engine client is a process that uses the engine: the server, or each of its HTTP processes. Each has a connection to
the core. Connection 0 leads to the process that started the core. A connection number is never reused. The field
`client` of a request is another thing: the HTTP client, by the name of its API key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from .config import EngineConfig
from .images import ImagePatches
from .model_info import ModelInfo, TokenizerSpec
from .params import PoolingParams

Frame = bytes | bytearray | memoryview

STUCK_EXIT_CODE: Final = 75
"""Exit code of an engine process that ended itself because a step exceeded its time limit."""
_REQUEST_NUMBER_BITS: Final = 40
"""Low bits of a request id: a counter of the connection. The bits above are the number of the connection."""


def first_request_id(connection_number: int) -> int:
    """Returns the id of the first request of a connection; the next ones count up from there."""
    return connection_number << _REQUEST_NUMBER_BITS


def connection_number_of(request_id: int) -> int:
    """Returns the number of the connection that a request came from."""
    return request_id >> _REQUEST_NUMBER_BITS


class Start(msgspec.Struct, tag=True, frozen=True):
    """Engine client to core, first message: load this model, and log as the client does (logs.py)."""

    config: EngineConfig
    log_level: str = "INFO"
    log_format: str = "console"


class Attach(msgspec.Struct, tag=True, frozen=True):
    """A further engine client to core, first message: its number. Its requests end when its socket closes."""

    connection_number: int


class RequestFields(msgspec.Struct, array_like=True, gc=False):
    """A SubmitRequest in a ClientMessage, without its inputs. `params` and `client` are indices into its lists."""

    request_id: int
    params: int
    client: int
    priority: int
    timeout_s: float | None
    num_inputs: int


class InputColumns(msgspec.Struct, array_like=True):
    """The inputs of all requests of a message, one list per field; see TokenizedInput.

    `queries` are indices into ClientMessage.query_shapes; -1 for none. For each image of an input, `image_inputs`
    has the index of the input, and `image_indices` the index of the image in ClientMessage.grids.
    """

    num_tokens: list[int] = []
    type_boundaries: list[int] = []
    num_skipped_tokens: list[int] = []
    num_masked: list[int] = []
    queries: list[int] = []
    image_inputs: list[int] = []
    image_indices: list[int] = []


class ClientMessage(msgspec.Struct, tag=True):
    """Engine client to core: the requests and cancellations of one iteration of its event loop.

    Frame: the int32 token ids of all inputs, the float32 vectors of all queries, then the pixels of all images. See
    ClientMessageBuilder.pack.

    Attributes:
        connection_number: Number of the sending engine client; 0: the process that started the core.
        params: The distinct parameters of the requests.
        clients: The distinct `client` and `namespace` of the requests; see SubmitRequest.
        requests: One header for each request.
        inputs: The inputs of all requests, in order.
        query_shapes: Rows and columns of each query (TokenizedInput.query_vectors).
        grids: Patches, rows and columns of patches, and bytes of a patch, of each image (TokenizedInput.images).
        cancels: Ids of requests to cancel.
        resets: Ids of requests to empty the prefix cache. The core sends PrefixCacheCleared for each. Running
            requests continue.
    """

    connection_number: int = 0
    params: list[PoolingParams] = []
    clients: list[tuple[str, str]] = []
    requests: list[RequestFields] = []
    inputs: InputColumns = msgspec.field(default_factory=InputColumns)
    query_shapes: list[tuple[int, int]] = []
    grids: list[tuple[int, int, int, int]] = []
    cancels: list[int] = []
    resets: list[int] = []


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Engine client to core: finish the running step, then exit."""


class ModelReady(msgspec.Struct, tag=True, frozen=True):
    """Core to engine client: the model is loaded."""

    info: ModelInfo
    tokenizer: TokenizerSpec


class LoadFailed(msgspec.Struct, tag=True, frozen=True):
    """Core to engine client: the model cannot be served. `kind` is a class name of errors.py."""

    kind: str
    message: str


class ChunkMetrics(msgspec.Struct, array_like=True):
    """Counters of sequences that run in chunks, since the start. The first two are gauges.

    Attributes:
        num_running_sequences: Sequences that have started and not ended.
        num_running_chunks: Chunks that are scheduled or running.
        completed_sequences: Sequences that completed.
        failed_sequences: Sequences that failed too often.
        cancelled_sequences: Sequences that were cancelled before they completed.
        completed_chunks: Chunks that completed.
        completed_tokens: Tokens of completed chunks.
        cached_tokens: Tokens that did not run because they were cached.
        failed_chunks: Failures of chunks.
        preemptions: Preemptions of sequences.
        run_s: Seconds that completed chunks ran, summed.
    """

    num_running_sequences: int = 0
    num_running_chunks: int = 0
    completed_sequences: int = 0
    failed_sequences: int = 0
    cancelled_sequences: int = 0
    completed_chunks: int = 0
    completed_tokens: int = 0
    cached_tokens: int = 0
    failed_chunks: int = 0
    preemptions: int = 0
    run_s: float = 0.0


class SequencePoolStats(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The memory of sequences that run in chunks, and their chunks.

    `usage` of the pool and `memory_pressure` are shares from 0 to 1. `chunk_tokens` is the size of the largest chunk of
    the step. The others are counters since the start.
    """

    usage: float = 0.0
    memory_pressure: float = 0.0
    chunk_tokens: int = 0
    prefix_queried_tokens_total: int = 0
    prefix_hit_tokens_total: int = 0
    num_evicted_blocks_total: int = 0
    chunks: ChunkMetrics = msgspec.field(default_factory=ChunkMetrics)


class SchedulerStats(msgspec.Struct, array_like=True, frozen=True):
    """Load of one step.

    Attributes:
        num_seqs: Sequences that ran.
        token_budget: Token limit of the step.
        num_waiting: Sequences that wait at the end of the step.
        num_waiting_tokens: Their tokens.
        num_deferred: Sequences that waited at the start of the step and did not fit into it.
        num_images: Images of the sequences that ran.
    """

    num_seqs: int
    token_budget: int
    num_waiting: int
    num_waiting_tokens: int
    num_deferred: int
    num_images: int = 0


class ArrayHeader(msgspec.Struct, array_like=True, frozen=True):
    """Describes one frame of float32 values: the output `name` of some sequences.

    Token-level outputs have one part per chunk. The engine client joins them along the first axis.

    Attributes:
        name: Name of the output, such as "embedding".
        width: Columns of the values.
        request_ids: The request of each sequence.
        indices: Index of each sequence among the inputs of its request.
        is_last: False if a later step returns more rows of the sequence.
        row_lens: Token rows of each sequence in this frame; None for one row per sequence.
        widths: Columns of each sequence, if they differ. Values beyond them are undefined.
    """

    name: str
    width: int
    request_ids: list[int]
    indices: list[int]
    is_last: list[bool]
    row_lens: list[int] | None = None
    widths: list[int] | None = None


class StepResults(msgspec.Struct, tag=True, frozen=True):
    """Core to engine client: the results and the load of one step. Frames: the values of each array, float32.

    A step that runs only inner chunks of long sequences has no arrays. `num_tokens` is 0 if no sequence ran: after
    loading, and when every sequence of a batch failed. The engine client then counts no step, and reads the other
    metrics.

    Attributes:
        arrays: Headers of the frames.
        num_tokens: Tokens that the step processed; 0: no sequence ran.
        step_s: Seconds that the step took.
        sequence_pool_stats: None for models that run all sequences whole.
        scheduler_stats: Load of the step.
        finished: Requests that end with this message: id, seconds until the first forward started, and seconds from
            there to the end of the last forward.
    """

    arrays: list[ArrayHeader]
    num_tokens: int
    step_s: float
    sequence_pool_stats: SequencePoolStats | None = None
    scheduler_stats: SchedulerStats | None = None
    finished: list[tuple[int, float, float]] = []


class PrefixCacheCleared(msgspec.Struct, tag=True, frozen=True):
    """Core to engine client: the prefix cache was emptied.

    Attributes:
        request_id: Id of the request to clear it.
        num_blocks: Blocks that were cached; None: the model has no prefix cache.
    """

    request_id: int
    num_blocks: int | None


class RequestFailed(msgspec.Struct, tag=True, frozen=True):
    """Core to engine client: a request failed as a whole. `kind`: a class of errors.py; `param` as in EngineError."""

    request_id: int
    kind: str
    message: str
    param: str | None = None


ToCore = Start | Attach | ClientMessage | Stop
LoadResult = ModelReady | LoadFailed
"""The first message of a core."""
FromCore = LoadResult | StepResults | PrefixCacheCleared | RequestFailed

encode: Final[Callable[[ToCore | FromCore], bytes]] = msgspec.msgpack.Encoder().encode
"""Returns the first frame of a message."""
decode_to_core: Final[Callable[[Frame], ToCore]] = msgspec.msgpack.Decoder[ToCore](ToCore).decode
"""Parses the first frame of a message to the core. Raises msgspec.ValidationError on a foreign frame."""
decode_from_core: Final[Callable[[Frame], FromCore]] = msgspec.msgpack.Decoder[FromCore](FromCore).decode
"""Parses the first frame of a message from the core. Raises msgspec.ValidationError on a foreign frame."""


@dataclass(slots=True, eq=False)
class TokenizedInput:
    """One tokenized input. Treat it as immutable; it is not frozen because a frozen one takes twice as long to create.

    Attributes:
        token_ids: [L] int32, special tokens included.
        type_boundary: Index of the first token of type 1; 0 means that all tokens are of type 0.
        num_skipped_tokens: Leading tokens that pooling leaves out: the prompt, if the model excludes it; else 0.
        num_masked: Trailing tokens of a ColBERT query. They attend to the other tokens; no token attends to them.
        query_vectors: [Q, D] float32. Query vectors, if this input is a ColBERT document to score.
        images: The patches of its images. In an encoder of images there is one, and `token_ids` are zeros, one for each
            row of the model; otherwise `token_ids` contain placeholders for them. Empty: a text.
        is_truncated: Whether a part of the input was removed to fit a limit. Unknown in the engine's process.
    """

    token_ids: NDArray[np.int32]
    type_boundary: int = 0
    num_skipped_tokens: int = 0
    num_masked: int = 0
    query_vectors: NDArray[np.float32] | None = None
    images: tuple[ImagePatches, ...] = ()
    is_truncated: bool = False

    @classmethod
    def of_image(cls, image: ImagePatches, num_class_rows: int) -> TokenizedInput:
        """Returns the input of an image. `num_class_rows`: see ImageSpec."""
        return cls(np.zeros(len(image.pixels) + num_class_rows, np.int32), images=(image,))

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, part: slice) -> TokenizedInput:
        """Returns some of the tokens, as a view; boundaries stay those of the whole input."""
        return TokenizedInput(
            self.token_ids[part],
            self.type_boundary,
            self.num_skipped_tokens,
            self.num_masked,
            self.query_vectors,
            self.images,
        )


class SubmitRequest(NamedTuple):
    """The message that starts a Request in the engine process. A ClientMessage holds several.

    Attributes:
        request_id: Unique among all engine clients; see `first_request_id`.
        params: Its resolved parameters.
        inputs: At least one.
        priority: Lower runs first.
        timeout_s: Seconds until its deadline; None: no deadline.
        client: The HTTP client, by the name of its API key; see RequestOptions.
        namespace: Requests share cached prefixes within a namespace only; see RequestOptions.
    """

    request_id: int
    params: PoolingParams
    inputs: Sequence[TokenizedInput]
    priority: int = 0
    timeout_s: float | None = None
    client: str = ""
    namespace: str = ""


@dataclass(slots=True, eq=False)
class ClientMessageBuilder:
    """Collects the requests and cancellations of one iteration of the event loop.

    Attributes:
        requests: Requests to submit.
        cancels: Ids of requests to cancel.
        resets: Ids of requests to empty the prefix cache.
    """

    requests: list[SubmitRequest] = field(default_factory=list)
    cancels: list[int] = field(default_factory=list)
    resets: list[int] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        return not (self.requests or self.cancels or self.resets)

    def pack(self) -> tuple[ClientMessage, Frame]:
        """Returns the message and its frame. There must be something to send."""
        params = dict.fromkeys(request.params for request in self.requests)
        clients = dict.fromkeys((request.client, request.namespace) for request in self.requests)
        inputs = [tokens for request in self.requests for tokens in request.inputs]
        queries = {
            id(tokens.query_vectors): tokens.query_vectors for tokens in inputs if tokens.query_vectors is not None
        }
        pictured = [(i, image) for i, tokens in enumerate(inputs) if tokens.images for image in tokens.images]
        images = {id(image): image for _, image in pictured}
        param_index, client_index, query_index, image_index = (
            {key: index for index, key in enumerate(table)} for table in (params, clients, queries, images)
        )
        headers = [
            RequestFields(
                request.request_id,
                param_index[request.params],
                client_index[request.client, request.namespace],
                request.priority,
                request.timeout_s,
                len(request.inputs),
            )
            for request in self.requests
        ]
        columns = InputColumns(
            num_tokens=[len(tokens.token_ids) for tokens in inputs],
            type_boundaries=[tokens.type_boundary for tokens in inputs],
            num_skipped_tokens=[tokens.num_skipped_tokens for tokens in inputs],
            num_masked=[tokens.num_masked for tokens in inputs],
            queries=[
                -1 if tokens.query_vectors is None else query_index[id(tokens.query_vectors)] for tokens in inputs
            ],
            image_inputs=[index for index, _ in pictured],
            image_indices=[image_index[id(image)] for _, image in pictured],
        )
        arrays = [tokens.token_ids for tokens in inputs]
        arrays += [np.ascontiguousarray(query, np.float32).view(np.int32).ravel() for query in queries.values()]
        arrays += [_as_int32(image.pixels) for image in images.values()]
        frame = memoryview(np.concatenate(arrays, dtype=np.int32)).cast("B") if arrays else b""
        any_id = next(iter(self.cancels or self.resets or [self.requests[0].request_id]))
        message = ClientMessage(
            connection_number=connection_number_of(any_id),
            params=list(params),
            clients=list(clients),
            requests=headers,
            inputs=columns,
            query_shapes=[query.shape for query in queries.values()],
            grids=[(len(image.pixels), *image.grid, image.pixels.shape[1]) for image in images.values()],
            cancels=self.cancels,
            resets=self.resets,
        )
        return message, frame


def unpack_client_message(message: ClientMessage, frame: Frame) -> list[SubmitRequest]:
    """Returns the requests of a message. Arrays of inputs are views of the frame.

    Raises:
        ValueError: The frame does not contain the inputs of the requests.
    """
    values = np.frombuffer(frame, np.int32)
    columns = message.inputs
    num_tokens = sum(columns.num_tokens)
    num_values = num_tokens + sum(rows * width for rows, width in message.query_shapes)
    if len(values) != num_values + sum(_num_int32(count, width) for count, _, _, width in message.grids):
        raise ValueError(f"a frame of {len(values)} values does not contain the {num_tokens} tokens of its requests")
    queries: list[NDArray[np.float32] | None] = []
    end = num_tokens
    for num_rows, width in message.query_shapes:
        start, end = end, end + num_rows * width
        queries.append(values[start:end].view(np.float32).reshape(num_rows, width))
    queries.append(None)  # at index -1
    images: list[ImagePatches] = []
    for num_patches, num_rows, num_columns, num_bytes in message.grids:
        start, end = end, end + _num_int32(num_patches, num_bytes)
        pixels = values[start:end].view(np.uint8)[: num_patches * num_bytes].reshape(num_patches, num_bytes)
        images.append(ImagePatches(pixels, (num_rows, num_columns)))
    inputs = [
        TokenizedInput(values[end - length : end], boundary, num_skipped_tokens, num_masked, queries[query])
        for end, length, boundary, num_skipped_tokens, num_masked, query in zip(
            accumulate(columns.num_tokens),
            columns.num_tokens,
            columns.type_boundaries,
            columns.num_skipped_tokens,
            columns.num_masked,
            columns.queries,
            strict=True,
        )
    ]
    for index, image in zip(columns.image_inputs, columns.image_indices, strict=True):
        inputs[index].images += (images[image],)
    requests = []
    first = 0
    for header in message.requests:
        last = first + header.num_inputs
        client, namespace = message.clients[header.client]
        requests.append(
            SubmitRequest(
                header.request_id,
                message.params[header.params],
                inputs[first:last],
                header.priority,
                header.timeout_s,
                client,
                namespace,
            )
        )
        first = last
    return requests


def _num_int32(num_patches: int, num_bytes: int) -> int:
    """Returns the int32 values that hold the pixels of an image."""
    return -(-num_patches * num_bytes // 4)


def _as_int32(pixels: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Returns the bytes of an image as int32 values, with zeros at the end if they do not fill the last one."""
    flat = np.ascontiguousarray(pixels).ravel()
    return np.pad(flat, (0, -len(flat) % 4)).view(np.int32)
