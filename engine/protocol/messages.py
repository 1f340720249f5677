"""Typed messages between the frontend of an engine and its core.

A message is a small msgspec struct in the first frame; arrays follow as raw little-endian buffers, one frame for
a message. Nothing is pickled. The same structs are passed by reference when the core runs in-process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from .config import EngineConfig
from .frontends import Attach, Detach
from .model_info import ModelInfo
from .params import PoolingParams
from .request import TokenizedInput
from .templates import ChatTemplate, ScoreTemplate
from .vectors import TokenMarks

Frame = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSpec:
    """A tokenizer that has been resolved in the engine process, for the frontend, which must not load transformers.

    Attributes:
        json: Serialised tokenizer of the `tokenizers` library, without truncation and padding.
        truncation_side: "left" or "right".
        uses_token_types: The model reads token type ids.
        sample_ids: Token ids of a short text, special tokens included.
        score_template: The prompt around a pair; None joins pairs with the tokenizer's own special tokens.
        chat_template: Turns the messages of a chat into text; None where the model comes with none.
        marks: The tokens of a multi-vector model's recipe.
        end_id: The token that ends a text, or pads or begins one; stands for a text without tokens. None: it has none.
        config: The class that transformers loaded and what it was made of, as in tokenizer_config.json.
    """

    json: str
    truncation_side: str
    uses_token_types: bool
    sample_ids: tuple[int, ...] = ()
    score_template: ScoreTemplate | None = None
    chat_template: ChatTemplate | None = None
    marks: TokenMarks = field(default_factory=TokenMarks)
    end_id: int | None = None
    config: dict[str, Any] = field(default_factory=dict)


class Start(msgspec.Struct, tag=True, frozen=True):
    """Frontend to core, first: load this model, and log as the client does (logs.py)."""

    config: EngineConfig
    log_level: str = "INFO"
    log_format: str = "console"


class Submit(msgspec.Struct, tag=True, frozen=True):
    """One request, with the next `num_inputs` inputs of its Turn. `params`: which of the Turn's it has."""

    request_id: int
    params: int
    num_inputs: int
    priority: int = 0
    timeout_s: float | None = None
    client: str = ""


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """Nobody waits for this request any more."""

    request_id: int


class ClearPrefixes(msgspec.Struct, tag=True, frozen=True):
    """Empty the prefix cache; answered with PrefixesCleared. Requests that run go on."""

    request_id: int


Command = Submit | Cancel | ClearPrefixes
"""What a running core is told."""


class Turn(msgspec.Struct, tag=True, frozen=True):
    """Frontend to core: all that one turn of its event loop has to say, in order. Requests mostly share parameters.

    Frame, of the inputs of all requests, int32: the numbers of inputs and of queries that they are compared with;
    length, type_boundary, num_prompt_tokens, num_hidden and number of the query (-1: none) of each input; rows and
    columns of each query; the token ids of all; the vectors of the queries, float32.
    """

    commands: list[Command]
    params: list[PoolingParams]


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Frontend to core: finish the step that runs, then end."""


class Ping(msgspec.Struct, tag=True, frozen=True):
    """Frontend to core: answer with Pong at once, whatever runs."""


class Pong(msgspec.Struct, tag=True, frozen=True):
    """Core to frontend: the process lives."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Core to frontend: the model is loaded."""

    info: ModelInfo
    tokenizer: TokenizerSpec


class LoadFailed(msgspec.Struct, tag=True, frozen=True):
    """Core to frontend: the model cannot be served. `kind` is a class name of errors.py."""

    kind: str
    message: str


class RowHeader(msgspec.Struct, array_like=True, frozen=True):
    """Says what one array of a Rows message is: output `name` of input `index` of a request.

    An output that grows with the length of its input comes in parts, joined along their first axis; `is_last` marks the
    last one.
    """

    request_id: int
    index: int
    name: str
    shape: tuple[int, ...]
    is_last: bool = True


class ChunkMetrics(msgspec.Struct, array_like=True):
    """What was done of prompts that run in chunks, counted from the start, and what is there now.

    Attributes:
        num_requests: Prompts that are being read.
        num_running_chunks: Chunks that are scheduled or run.
        completed_requests: Prompts whose every token was done.
        failed_requests: Prompts that failed too often.
        cancelled_requests: Prompts that were cancelled before that.
        completed_chunks: Chunks that were completed.
        completed_tokens: Tokens of those chunks.
        cached_tokens: Tokens that did not run because they were found in a cache.
        failed_chunks: Failures of chunks.
        preemptions: Times that a prompt was set back.
        run_s: Seconds that completed chunks ran, summed.
    """

    num_requests: int = 0
    num_running_chunks: int = 0
    completed_requests: int = 0
    failed_requests: int = 0
    cancelled_requests: int = 0
    completed_chunks: int = 0
    completed_tokens: int = 0
    cached_tokens: int = 0
    failed_chunks: int = 0
    preemptions: int = 0
    run_s: float = 0.0

    @property
    def mean_chunk_tokens(self) -> float:
        """Tokens of a completed chunk, on average; 0 where none is."""
        return self.completed_tokens / self.completed_chunks if self.completed_chunks else 0.0


class CacheUse(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The memory of sequences that run in chunks, and their chunks.

    `usage` of the pool and `memory_pressure` are shares from 0 to 1; `chunk_tokens` are those of the largest chunk of
    the step. The others count from the start.
    """

    usage: float = 0.0
    memory_pressure: float = 0.0
    chunk_tokens: int = 0
    prefix_queried_tokens_total: int = 0
    prefix_hit_tokens_total: int = 0
    num_evicted_blocks_total: int = 0
    chunks: ChunkMetrics = msgspec.field(default_factory=ChunkMetrics)


class StepLoad(msgspec.Struct, array_like=True, frozen=True):
    """What a step ran, and what waits at its end: sequences and tokens; `token_budget` is the most that it could run.

    `num_left` counts those that waited when it began and found no place in it.
    """

    num_seqs: int
    token_budget: int
    num_waiting: int
    num_waiting_tokens: int
    num_left: int


class RequestTime(msgspec.Struct, array_like=True, frozen=True):
    """Seconds that a request waited for its first forward, and from there to the end of its last."""

    request_id: int
    queue_s: float
    inference_s: float


class Rows(msgspec.Struct, tag=True, frozen=True):
    """Core to frontend: results of one step. Frame: all arrays, flattened and concatenated, float32.

    `num_tokens` and `step_s` tell what the step processed and how long it took; `cache_use` is None for models that
    run prompts whole; `ended` times the requests whose last rows these are. A step that only brings long sequences on
    has no rows; a message without tokens is no step and only tells of the cache.
    """

    rows: list[RowHeader]
    num_tokens: int
    step_s: float
    cache_use: CacheUse | None = None
    load: StepLoad | None = None
    ended: list[RequestTime] = []


class PrefixesCleared(msgspec.Struct, tag=True, frozen=True):
    """Core to frontend: no request that is sent from now on finds a prefix that was kept before.

    `num_blocks` were kept; None: this model keeps none, or prefix caching is off.
    """

    request_id: int
    num_blocks: int | None


class Failed(msgspec.Struct, tag=True, frozen=True):
    """Core to frontend: a request failed as a whole. `kind` is a class name of errors.py."""

    request_id: int
    kind: str
    message: str


ToCore = Start | Attach | Detach | Turn | Stop | Ping
FromCore = Ready | LoadFailed | Rows | PrefixesCleared | Failed | Pong

encode: Final[Callable[[ToCore | FromCore], bytes]] = msgspec.msgpack.Encoder().encode
"""Returns the first frame of a message."""
decode_to_core: Final[Callable[[Frame], ToCore]] = msgspec.msgpack.Decoder[ToCore](ToCore).decode
"""Parses the first frame of a message to the core. Raises msgspec.ValidationError on a foreign frame."""
decode_from_core: Final[Callable[[Frame], FromCore]] = msgspec.msgpack.Decoder[FromCore](FromCore).decode
"""Parses the first frame of a message from the core. Raises msgspec.ValidationError on a foreign frame."""


def pack_inputs(inputs: Sequence[TokenizedInput]) -> Frame:
    """Returns the frame of a Turn with these inputs."""
    queries = {id(i.query): i.query for i in inputs if i.query is not None}
    places = {key: place for place, key in enumerate(queries)}
    head = [len(inputs), len(queries)]
    for i in inputs:
        head += (len(i), i.type_boundary, i.num_prompt_tokens, i.num_hidden, places.get(id(i.query), -1))
    for query in queries.values():
        head += query.shape
    parts = [np.array(head, np.int32), *(i.token_ids for i in inputs)]
    parts += [np.ascontiguousarray(query, np.float32).view(np.int32).ravel() for query in queries.values()]
    return memoryview(np.concatenate(parts, dtype=np.int32)).cast("B")


def unpack_inputs(frame: Frame) -> list[TokenizedInput]:
    """Returns the inputs of a Turn; their arrays are views of its frame."""
    values = np.frombuffer(frame, np.int32)
    num_inputs, num_queries = values[:2].tolist()
    ends = 2 + 5 * num_inputs, 2 + 5 * num_inputs + 2 * num_queries
    heads = values[2 : ends[0]].reshape(-1, 5).tolist()
    queries: list[NDArray[np.float32]] = []
    query_start = ends[1] + sum(head[0] for head in heads)
    for num_rows, width in values[ends[0] : ends[1]].reshape(-1, 2).tolist():
        end = query_start + num_rows * width
        queries.append(values[query_start:end].view(np.float32).reshape(num_rows, width))
        query_start = end
    start = ends[1]
    inputs = []
    for length, boundary, num_prompt_tokens, num_hidden, query in heads:
        rows = queries[query] if query >= 0 else None
        inputs.append(TokenizedInput(values[start : start + length], boundary, num_prompt_tokens, num_hidden, rows))
        start += length
    return inputs


def pack_rows(arrays: Sequence[NDArray[Any]]) -> Frame:
    """Returns the frame of a Rows message: `arrays` flattened, concatenated, float32."""
    if not any(array.size for array in arrays):
        return b""
    if len(arrays) == 1:
        return memoryview(np.ascontiguousarray(arrays[0], np.float32)).cast("B")
    return memoryview(np.concatenate([a.ravel() for a in arrays], dtype=np.float32)).cast("B")


def unpack_rows(headers: Sequence[RowHeader], frame: Frame) -> list[NDArray[np.float32]]:
    """Returns the arrays of a Rows message as views of `frame`."""
    values = np.frombuffer(frame, np.float32)
    arrays, start = [], 0
    for header in headers:
        size = math.prod(header.shape)
        arrays.append(values[start : start + size].reshape(header.shape))
        start += size
    return arrays
