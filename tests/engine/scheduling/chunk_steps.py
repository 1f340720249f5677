"""Chunks of a ChunkedPrefillManager, a step at a time."""

from __future__ import annotations

from penstock.engine.scheduling import ChunkedPrefillManager, PrefillChunk


def schedule(manager: ChunkedPrefillManager, max_tokens: int | None = None) -> PrefillChunk:
    chunk = manager.schedule_chunk(max_tokens)
    assert chunk is not None
    return chunk


def run(manager: ChunkedPrefillManager, max_tokens: int | None = None, output: object = None) -> PrefillChunk:
    chunk = schedule(manager, max_tokens)
    manager.start_chunk(chunk.chunk_id)
    manager.complete_chunk(chunk.chunk_id, output)
    return chunk


def bounds(chunks: list[PrefillChunk]) -> list[tuple[int, int]]:
    return [(chunk.start, chunk.end) for chunk in chunks]
