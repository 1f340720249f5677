"""Typed messages between an engine client and the engine core.

A message is a small msgspec struct in the first frame; arrays follow as raw little-endian buffers (frames.py). Nothing
is pickled. The same structs are passed by reference when the core runs in-process.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from .chat_template import ChatTemplate
from .config import EngineConfig
from .model_info import ModelInfo
from .multi_vector import TokenMarks
from .params import PoolingParams
from .score_template import ScoreTemplate

Frame = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSpec:
    """A tokenizer that has been resolved in the engine process, for clients that must not load transformers.

    Attributes:
        json: Serialised tokenizer of the `tokenizers` library, without truncation and padding.
        truncation_side: "left" or "right".
        uses_token_types: The model reads token type ids.
        sample_ids: Token ids of a short text, special tokens included.
        score_template: The prompt around a pair; None joins pairs with the tokenizer's own special tokens.
        chat_template: Turns the messages of a chat into text; None where the model comes with none.
        marks: The tokens of a multi-vector model's recipe.
    """

    json: str
    truncation_side: str
    uses_token_types: bool
    sample_ids: tuple[int, ...] = ()
    score_template: ScoreTemplate | None = None
    chat_template: ChatTemplate | None = None
    marks: TokenMarks = field(default_factory=TokenMarks)


class Start(msgspec.Struct, tag=True, frozen=True):
    """Client to core, first: load this model, and log as the client does (logs.py)."""

    config: EngineConfig
    log_level: str = "INFO"
    log_format: str = "console"


class Submit(msgspec.Struct, tag=True, frozen=True):
    """Client to core: one request.

    Frame, int32: the numbers of inputs and of queries that they are compared with; length, type_boundary,
    num_prompt_tokens, num_hidden and number of the query (-1: none) of each input; rows and columns of each query; the
    token ids of all; the vectors of the queries, float32.
    """

    request_id: int
    params: PoolingParams
    priority: int = 0
    timeout_s: float | None = None
    client: str = ""


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """Client to core: nobody waits for this request any more."""

    request_id: int


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Client to core: finish the step that runs, then end."""


class Ping(msgspec.Struct, tag=True, frozen=True):
    """Client to core: answer with Pong at once, whatever runs."""


class Pong(msgspec.Struct, tag=True, frozen=True):
    """Core to client: the process lives."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Core to client: the model is loaded."""

    info: ModelInfo
    tokenizer: TokenizerSpec


class LoadFailed(msgspec.Struct, tag=True, frozen=True):
    """Core to client: the model cannot be served. `kind` is a class name of errors.py."""

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


class CacheUse(msgspec.Struct, array_like=True, frozen=True):
    """How the memory of sliced sequences is used: `usage` is a share from 0 to 1, the others count from the start."""

    usage: float
    prefix_queried_tokens_total: int
    prefix_hit_tokens_total: int
    num_preemptions_total: int
    num_chunks_total: int
    num_evicted_blocks_total: int


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
    """Core to client: results of one step. Frame: all arrays, flattened and concatenated, float32.

    `num_tokens` and `step_s` tell what the step processed and how long it took; `cache_use` is None for models that
    cannot be sliced; `ended` times the requests whose last rows these are. A step that only brings long sequences on
    has no rows; a message without tokens is no step and only tells of the cache.
    """

    rows: list[RowHeader]
    num_tokens: int
    step_s: float
    cache_use: CacheUse | None = None
    load: StepLoad | None = None
    ended: list[RequestTime] = []


class Failed(msgspec.Struct, tag=True, frozen=True):
    """Core to client: a request failed as a whole. `kind` is a class name of errors.py."""

    request_id: int
    kind: str
    message: str


ToCore = Start | Submit | Cancel | Stop | Ping
FromCore = Ready | LoadFailed | Rows | Failed | Pong

_encoder = msgspec.msgpack.Encoder()
_to_core: msgspec.msgpack.Decoder[ToCore] = msgspec.msgpack.Decoder(ToCore)
_from_core: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)


def encode(message: ToCore | FromCore) -> bytes:
    """Returns the first frame of `message`."""
    return _encoder.encode(message)


def decode_to_core(frame: Frame) -> ToCore:
    """Parses the first frame of a message to the core. Raises msgspec.ValidationError on a foreign frame."""
    return _to_core.decode(frame)


def decode_from_core(frame: Frame) -> FromCore:
    """Parses the first frame of a message from the core. Raises msgspec.ValidationError on a foreign frame."""
    return _from_core.decode(frame)
