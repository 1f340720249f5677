"""ChunkedPoolingManager pools chunks to the row of the whole sequence."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaModel

from penstock.engine.pooling import ChunkedPoolingManager, PoolerFactory, PoolingStates
from penstock.engine.pooling.tensor_ops import TensorOps
from penstock.engine.protocol.tasks import PoolingType

from .conftest import SEQUENCE_TYPES, make_metadata

WIDTH = 12
DOCUMENT = Path(__file__).parents[3] / "docs" / "long-inputs.md"


def rows(num_rows: int = 65, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def whole(pooling_type: PoolingType, hidden: Tensor, weights: Tensor) -> Tensor:
    return PoolerFactory.create(pooling_type).pool(hidden, make_metadata([len(hidden)]), weights[:, None])[0]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


def manager_with(seq_len: int, strategy: Any = "mean", max_chunk_size: int | None = None) -> ChunkedPoolingManager[Any]:
    """Returns a manager and starts the sequence "a"."""
    manager = ChunkedPoolingManager(WIDTH, max_chunk_size, strategy)
    manager.start_sequence("a", seq_len)
    return manager


@pytest.mark.parametrize(("max_chunk_size", "as_numpy"), [(None, False), (1, True), (10, False), (10, True)])
@pytest.mark.parametrize("pooling_type", SEQUENCE_TYPES)
def test_interleaved_chunks_equal_whole_sequences(
    pooling_type: PoolingType, as_numpy: bool, max_chunk_size: int | None
) -> None:
    sequences = {name: rows(n, n) for name, n in {"a": 65, "b": 40, "c": 1}.items()}
    weights = torch.rand(65)
    manager = ChunkedPoolingManager(WIDTH, max_chunk_size, pooling_type)
    for name, hidden in sequences.items():
        manager.start_sequence(name, len(hidden))
    assert manager.get_pending_count() == 3
    for start in range(0, 65, 25):
        for name, hidden in sequences.items():
            if start >= len(hidden):
                continue
            chunk: Any = hidden[start : start + 25]
            end = start + len(chunk)
            needs_weights = pooling_type is PoolingType.ATTENTION and end == len(hidden)
            chunk_weights = weights[:end] if needs_weights else None
            is_complete = manager.process_chunk(name, chunk.numpy() if as_numpy else chunk, chunk_weights)
            assert is_complete is (end == len(hidden))
    for left, (name, hidden) in zip((2, 1, 0), sequences.items(), strict=True):
        assert_close(manager.finalize(name), whole(pooling_type, hidden, weights[: len(hidden)]))
        assert manager.get_pending_count() == left


def test_cursor_has_the_rows_of_its_chunk_in_the_batch() -> None:
    manager: ChunkedPoolingManager[Any] = ChunkedPoolingManager(WIDTH)
    batch = make_metadata([5, 9, 8], chunk_sizes=[5, 4, 3], chunk_starts=[0, 0, 5], seq_ids=["a", "b", "c"])
    batch = manager.with_cursors(batch)
    assert {i: (c.global_start, c.global_end, c.remaining) for i, c in batch.cursors.items()} == {
        1: (5, 9, 9),
        2: (9, 12, 8),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_float_dtype_is_pooled_as_float32(dtype: torch.dtype) -> None:
    hidden = rows().to(dtype)
    manager = manager_with(65, max_chunk_size=8)
    for part in hidden.requires_grad_().split(30):
        manager.process_chunk("a", part)
    pooled = manager.finalize("a")
    assert (pooled.dtype, pooled.requires_grad) == (torch.float32, False)
    assert_close(pooled, hidden.detach().float().mean(0))


@pytest.mark.parametrize("tag", [None, 1, 99])
@pytest.mark.parametrize("pooling_type", [PoolingType.ALL, PoolingType.STEP])
def test_token_rows_are_returned_with_their_chunk(pooling_type: PoolingType, tag: int | None) -> None:
    hidden, ids = rows(), np.arange(65) % 3
    manager = ChunkedPoolingManager(WIDTH, 10, pooling_type, step_tag_id=tag)
    manager.start_sequence("a", 65)
    parts = []
    for start in range(0, 65, 30):
        buffer = hidden[start : start + 30].clone()
        part = manager.process_chunk("a", buffer, token_ids=ids[start : start + 30])
        assert isinstance(part, Tensor)
        buffer.fill_(float("nan"))
        parts.append(part)
    parts.append(manager.finalize("a"))
    expected = hidden if pooling_type is PoolingType.ALL or tag is None else hidden[torch.from_numpy(ids == tag)]
    assert torch.equal(torch.cat(parts), expected)
    assert manager.get_pending_count() == 0


def test_wrong_chunks_are_rejected_and_change_nothing() -> None:
    manager = manager_with(20)
    manager.process_chunk("a", rows(20)[:5])
    with pytest.raises(ValueError, match="sequence 'a' is running already"):
        manager.start_sequence("a", 3)
    with pytest.raises(ValueError, match="sequence 'b' has 0 tokens"):
        manager.start_sequence("b", 0)
    with pytest.raises(ValueError, match="a chunk of 16 rows, but 15 of 20 tokens remain"):
        manager.process_chunk("a", rows(16))
    with pytest.raises(ValueError, match=r"a chunk must be \[L, 12\] of a float type, got torch.float32 \[2, 3\]"):
        manager.process_chunk("a", np.zeros((2, 3), np.float32))
    with pytest.raises(ValueError, match=r"float type, got torch\.int64"):
        manager.process_chunk("a", np.zeros((2, WIDTH), np.int64))
    with pytest.raises(ValueError, match=r"attention weights must be \[15\], one for each token so far, got \[10\]"):
        manager.process_chunk("a", rows(10), torch.ones(10))
    with pytest.raises(ValueError, match="'a' is incomplete: 15 of 20 tokens remain"):
        manager.finalize("a")
    assert manager.process_chunk("a", rows(20)[5:]) is True
    torch.testing.assert_close(manager.finalize("a"), rows(20).mean(0))
    for call in (manager.finalize, lambda name: manager.process_chunk(name, rows(1))):
        with pytest.raises(KeyError, match="no sequence 'a' is running: never started, or finalized or cancelled"):
            call("a")


def test_wrong_arguments_are_rejected() -> None:
    with pytest.raises(ValueError, match="max_chunk_size is 0"):
        ChunkedPoolingManager(WIDTH, 0)
    with pytest.raises(ValueError, match="hidden_dim is 0"):
        ChunkedPoolingManager(0)
    steps = ChunkedPoolingManager(1, 1, strategy=PoolingType.STEP, step_tag_id=1)
    steps.start_sequence("a", 1)
    with pytest.raises(ValueError, match="STEP pooling needs the token ids"):
        steps.process_chunk("a", rows(1)[:, :1])
    with pytest.raises(ValueError, match=r"token_ids must be \[1\]"):
        steps.process_chunk("a", rows(1)[:, :1], token_ids=np.ones(2, np.int64))


def test_failed_chunk_can_be_processed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = manager_with(20, max_chunk_size=4)
    manager.process_chunk("a", rows(20)[:5])
    real = PoolingStates.update
    calls: list[int] = []

    def failing(self: PoolingStates, *args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError("out of memory")
        real(self, *args, **kwargs)

    monkeypatch.setattr(PoolingStates, "update", failing)
    with pytest.raises(MemoryError):
        manager.process_chunk("a", rows(20)[5:])
    assert manager.process_chunk("a", rows(20)[5:]) is True
    assert_close(manager.finalize("a"), rows(20).mean(0))


def test_attention_can_be_finalized_once_its_weights_came() -> None:
    manager = manager_with(20, PoolingType.ATTENTION)
    manager.process_chunk("a", rows(20))
    with pytest.raises(ValueError, match="needs the attention weights"):
        manager.finalize("a")
    manager.process_chunk("a", rows(0), torch.full((20,), 0.05))
    assert_close(manager.finalize("a"), rows(20).mean(0))


@pytest.mark.parametrize("strategy", ["mean", "Max", "first"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("form", ["numpy", "torch", "on the device"])
def test_prefetched_chunks_are_pooled(strategy: str, device: str, form: str) -> None:
    sequences = {"a": rows(3000, 1), "b": rows(2000, 2)}
    manager = ChunkedPoolingManager(WIDTH, 300, strategy, device=device)
    parts: dict[str, list[Any]] = {}
    for name, hidden in sequences.items():
        manager.start_sequence(name, len(hidden))
        chunks = [part.clone() for part in hidden.split(500)]
        parts[name] = [c.numpy() if form == "numpy" else c.to(device) if form != "torch" else c for c in chunks]
    for step in range(6):
        for name, chunks in parts.items():
            if step + 1 < len(chunks) and step % 3 != 1:
                manager.prefetch(name, chunks[step + 1])
            if step < len(chunks):
                assert manager.process_chunk(name, chunks[step]) is (step + 1 == len(chunks))
    for name, hidden in sequences.items():
        pooled = manager.finalize(name)
        assert pooled.device.type == device
        assert_close(pooled.cpu(), whole(PoolingType(strategy), hidden, torch.ones(len(hidden))))


def test_copies_of_two_chunks_are_stored() -> None:
    chunks = rows(20).split(5)
    copied: list[int] = []

    class RecordingOps(TensorOps):
        def rows_of(self, source: Any) -> Tensor:
            copied.extend(index for index, chunk in enumerate(chunks) if chunk is source)
            return super().rows_of(source)

    manager = ChunkedPoolingManager(WIDTH, ops=RecordingOps())
    manager.start_sequence("a", 20)
    for index in (0, 0, 1, 2):
        manager.prefetch("a", chunks[index])
    for chunk in chunks:
        manager.process_chunk("a", chunk)
    assert copied == [0, 1, 2, 0, 3]  # the third call dropped the copy of chunk 0
    assert_close(manager.finalize("a"), rows(20).mean(0))


def test_prefetched_chunk_that_is_not_processed_is_ignored() -> None:
    manager = manager_with(20)
    manager.prefetch("a", torch.full((20, WIDTH), float("nan")))
    wrong = rows(20)[:, :3]
    manager.prefetch("a", wrong)
    with pytest.raises(ValueError, match=r"a chunk must be \[L, 12\]"):
        manager.process_chunk("a", wrong)
    assert manager.process_chunk("a", rows(20)) is True
    assert_close(manager.finalize("a"), rows(20).mean(0))
    with pytest.raises(KeyError, match="no sequence 'a' is running"):
        manager.prefetch("a", rows(20))


def test_cancelled_sequence_can_be_started_again() -> None:
    manager = manager_with(20)
    assert [manager.cancel("a"), manager.cancel("a"), manager.get_pending_count()] == [True, False, 0]
    manager.start_sequence("a", 3)


def test_threads_may_pool_sequences_at_the_same_time() -> None:
    manager = ChunkedPoolingManager(WIDTH, 3)

    def pool_one(seq: int) -> Tensor:
        manager.start_sequence(seq, 40)
        for part in rows(40, seq).split(7):
            manager.process_chunk(seq, part)
        return manager.finalize(seq)

    with ThreadPoolExecutor(8) as threads:
        for seq, pooled in enumerate(threads.map(pool_one, range(32))):
            assert_close(pooled, rows(40, seq).mean(0))
    assert manager.get_pending_count() == 0


@pytest.mark.parametrize("chunk_size", [16, 512])
def test_documented_decoder_loop_equals_one_forward(chunk_size: int) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(example, str(DOCUMENT), "exec"), names)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaModel(LlamaConfig(vocab_size=120, max_position_embeddings=256, **sizes)).eval()
    prompts = {name: torch.randint(0, 120, (length,)).tolist() for name, length in (("a", 100), ("b", 7), ("c", 41))}
    vectors = names["embed"](model, prompts, chunk_size)
    assert sorted(vectors) == sorted(prompts)
    for name, ids in prompts.items():
        with torch.inference_mode():
            hidden = model(torch.tensor([ids])).last_hidden_state[0]
        torch.testing.assert_close(vectors[name], hidden.mean(0), atol=1e-5, rtol=1e-5)
