"""Typed messages between the frontend of an engine and its core.

A message is a small msgspec struct in the first frame; arrays follow as raw little-endian buffers (turns.py, rows.py).
Nothing is pickled. The same structs are passed by reference when the core runs in-process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from ..config import EngineConfig
from ..model_info import ModelInfo
from ..params import PoolingParams
from ..templates import ChatTemplate, ScoreTemplate
from ..vectors import TokenMarks
from .frontends import Attach

Frame = bytes | bytearray | memoryview

STUCK_EXIT_CODE: Final = 75
"""Exit code of an engine process that ended itself because a step exceeded its time limit."""


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


class Turn(msgspec.Struct, tag=True, frozen=True):
    """Frontend to core: all that one turn of its event loop has to say. Requests mostly share parameters and clients.

    The requests themselves are arrays in its frame; see turns.py.

    Attributes:
        frontend: The number of the sending frontend.
        params: The parameters of requests.
        clients: Client and namespace of requests.
        clears: Ids of demands to empty the prefix cache, each answered with PrefixesCleared. Requests that run go on.
    """

    frontend: int
    params: list[PoolingParams]
    clients: list[tuple[str, str]]
    clears: list[int]


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Frontend to core: finish the step that runs, then end."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Core to frontend: the model is loaded."""

    info: ModelInfo
    tokenizer: TokenizerSpec


class LoadFailed(msgspec.Struct, tag=True, frozen=True):
    """Core to frontend: the model cannot be served. `kind` is a class name of errors.py."""

    kind: str
    message: str


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


class RowBlock(msgspec.Struct, array_like=True, frozen=True):
    """Says what one frame of values is: output `name` of some inputs, all float32 with so many columns.

    An output that grows with the length of its input comes in parts, joined along their first axis.

    Attributes:
        name: As of ArrayBlock.
        num_seqs: Inputs that have some of it.
        width: Columns of the values.
        has_row_lens: Whether an input has rows for its tokens.
        has_widths: Whether inputs have fewer columns.
    """

    name: str
    num_seqs: int
    width: int
    has_row_lens: bool = False
    has_widths: bool = False


class Rows(msgspec.Struct, tag=True, frozen=True):
    """Core to frontend: results of one step. Frames: whose they are, as arrays, then the values of each block; rows.py.

    `num_tokens` and `step_s` tell what the step processed and how long it took; `cache_use` is None for models that
    run prompts whole; `num_ended` requests have their last rows here. A step that only brings long sequences on has no
    rows; a message without tokens is no step and only tells of the cache.
    """

    blocks: list[RowBlock]
    num_tokens: int
    step_s: float
    cache_use: CacheUse | None = None
    load: StepLoad | None = None
    num_ended: int = 0


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


ToCore = Start | Attach | Turn | Stop
FromCore = Ready | LoadFailed | Rows | PrefixesCleared | Failed

encode: Final[Callable[[ToCore | FromCore], bytes]] = msgspec.msgpack.Encoder().encode
"""Returns the first frame of a message."""
decode_to_core: Final[Callable[[Frame], ToCore]] = msgspec.msgpack.Decoder[ToCore](ToCore).decode
"""Parses the first frame of a message to the core. Raises msgspec.ValidationError on a foreign frame."""
decode_from_core: Final[Callable[[Frame], FromCore]] = msgspec.msgpack.Decoder[FromCore](FromCore).decode
"""Parses the first frame of a message from the core. Raises msgspec.ValidationError on a foreign frame."""
