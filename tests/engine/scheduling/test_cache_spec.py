"""Memory of a model, divided into KV blocks and state slots."""

import pytest
from hypothesis import given, strategies as st

from penstock.engine.protocol.config import SchedulerConfig
from penstock.engine.protocol.errors import ModelLoadError
from penstock.engine.scheduling import (
    CacheSpec,
    KvCachePool,
    KvLayerSpec,
    PoolSize,
    SequencePool,
    SsmLayerSpec,
    size_pool,
)
from penstock.engine.scheduling.cache_spec import describe_sequence_pool

KV = KvLayerSpec(num_kv_heads=2, head_size=4)
SSM = SsmLayerSpec(conv_shape=(8, 3), ssm_shape=(2, 4, 4))
BLOCK_BYTES = 2 * 2 * 4 * 2 * 16
SLOT_BYTES = 8 * 3 * 2 + 2 * 4 * 4 * 4


def plan(spec: CacheSpec, memory_bytes: int, max_num_seqs: int = 8) -> PoolSize:
    return size_pool(spec, memory_bytes, block_size=16, itemsize=2, max_num_seqs=max_num_seqs)


def test_model_of_one_kind_gets_all_memory() -> None:
    assert plan(CacheSpec(kv_layers=(KV,)), 10 * BLOCK_BYTES + 1) == PoolSize(10, 0, 10 * BLOCK_BYTES)
    assert plan(CacheSpec(ssm_layers=(SSM,)), 5 * SLOT_BYTES + 1) == PoolSize(0, 5, 5 * SLOT_BYTES)
    assert plan(CacheSpec(ssm_layers=(SSM,)), 50 * SLOT_BYTES) == PoolSize(0, 8, 8 * SLOT_BYTES)


def test_slots_of_a_hybrid_take_a_quarter_at_most() -> None:
    hybrid = CacheSpec(kv_layers=(KV,), ssm_layers=(SSM,))
    assert plan(hybrid, BLOCK_BYTES + SLOT_BYTES) == PoolSize(1, 1, BLOCK_BYTES + SLOT_BYTES)
    assert plan(hybrid, 16 * SLOT_BYTES) == PoolSize(
        12 * SLOT_BYTES // BLOCK_BYTES, 4, 4 * SLOT_BYTES + 4 * BLOCK_BYTES
    )
    large = CacheSpec(kv_layers=(KV,) * 8, ssm_layers=(SSM,))
    assert plan(large, 8 * BLOCK_BYTES + 2 * SLOT_BYTES) == PoolSize(1, 2, 8 * BLOCK_BYTES + 2 * SLOT_BYTES)
    assert CacheSpec().shares_prefixes


@given(memory_bytes=st.integers(0, 100_000), block_size=st.integers(1, 64), max_num_seqs=st.integers(1, 64))
def test_hybrid_gets_blocks_and_slots_within_its_memory(memory_bytes: int, block_size: int, max_num_seqs: int) -> None:
    spec = CacheSpec(kv_layers=(KV, KV), ssm_layers=(SSM,))
    block_bytes = spec.kv_bytes_per_token(2) * block_size
    if memory_bytes < block_bytes + SLOT_BYTES:
        with pytest.raises(ModelLoadError, match=f"at least {block_bytes + SLOT_BYTES:,} "):
            size_pool(spec, memory_bytes, block_size=block_size, itemsize=2, max_num_seqs=max_num_seqs)
        return
    sizes = size_pool(spec, memory_bytes, block_size=block_size, itemsize=2, max_num_seqs=max_num_seqs)
    assert sizes.num_blocks >= 1
    assert 1 <= sizes.num_slots <= max_num_seqs
    assert sizes.num_slots == 1 or sizes.num_slots * SLOT_BYTES <= memory_bytes / 4
    assert memory_bytes - block_bytes < sizes.num_bytes <= memory_bytes


def test_impossible_plan_is_rejected() -> None:
    with pytest.raises(ModelLoadError, match=r"1,000 bytes.* at least 1,024 .*per block of 16 .*--kv-cache-memory"):
        plan(CacheSpec(kv_layers=(KV, KV)), 1000)
    with pytest.raises(ValueError, match="keeps nothing"):
        plan(CacheSpec(), 1000)
    with pytest.raises(ValueError, match="max_num_seqs is 0"):
        plan(CacheSpec(kv_layers=(KV,)), 1000, max_num_seqs=0)


@pytest.mark.parametrize(("is_reserved", "memory"), [(True, "in 5,120 MiB"), (False, "in up to 5,120 MiB, used only")])
def test_log_states_whether_the_memory_of_the_pool_is_reserved(is_reserved: bool, memory: str) -> None:
    pool = SequencePool(KvCachePool(64, 16), None, enable_prefix_caching=False)
    line = describe_sequence_pool(pool, SchedulerConfig(), 5 << 30, is_reserved=is_reserved)
    assert line.startswith(f"the pool holds 1,024 tokens (64 blocks of 16) {memory}")
    assert line.endswith("chunks: of adaptive size; prefix cache: off")
    pool = SequencePool(KvCachePool(64, 16), None, enable_prefix_caching=True)
    line = describe_sequence_pool(pool, SchedulerConfig(chunk_size=1024), 5 << 30, is_reserved=is_reserved)
    assert line.endswith("chunks: of 1,024 tokens; prefix cache: on")
    line = describe_sequence_pool(pool, SchedulerConfig(enable_chunked_prefill=False), 5 << 20, is_reserved=is_reserved)
    assert "5 MiB" in line
    assert "chunks: off" in line
