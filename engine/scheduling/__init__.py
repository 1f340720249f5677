"""Which sequences run next, and in which chunks. Plain Python without torch."""

from .chunk_queue import ChunkStateError
from .chunked_prefill import ChunkedPrefillManager, chunk_prompt, create_prefill_manager
from .scheduler import Scheduler
from .sequence import Batch, Chunk, ChunkedRequest, ChunkState, PrefillChunk, QueuedSequence, Request, Status

__all__ = [
    "Batch",
    "Chunk",
    "ChunkState",
    "ChunkStateError",
    "ChunkedPrefillManager",
    "ChunkedRequest",
    "PrefillChunk",
    "QueuedSequence",
    "Request",
    "Scheduler",
    "Status",
    "chunk_prompt",
    "create_prefill_manager",
]
