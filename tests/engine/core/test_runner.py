import pytest

from penstock.engine.core.runner import describe_pool
from penstock.engine.protocol.config import SchedulerConfig
from penstock.engine.scheduling import KvCachePool, SequencePool


@pytest.mark.parametrize(("is_reserved", "memory"), [(True, "in 5,120 MiB"), (False, "in up to 5,120 MiB, used only")])
def test_log_states_whether_the_memory_of_the_pool_is_reserved(is_reserved: bool, memory: str) -> None:
    pool = SequencePool(KvCachePool(64, 16), None, enable_prefix_caching=False)
    line = describe_pool(pool, SchedulerConfig(), 5 << 30, is_reserved=is_reserved)
    assert line.startswith(f"the pool holds 1,024 tokens (64 blocks of 16) {memory}")
    assert line.endswith("chunks: of adaptive size; prefix cache: off")
    pool = SequencePool(KvCachePool(64, 16), None, enable_prefix_caching=True)
    line = describe_pool(pool, SchedulerConfig(chunk_size=1024), 5 << 30, is_reserved=is_reserved)
    assert line.endswith("chunks: of 1,024 tokens; prefix cache: on")
    line = describe_pool(pool, SchedulerConfig(enable_chunked_prefill=False), 5 << 20, is_reserved=is_reserved)
    assert "5 MiB" in line
    assert "chunks: off" in line
