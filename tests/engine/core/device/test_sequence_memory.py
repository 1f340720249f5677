import pytest

from penstock.engine.core.device.sequence_memory import describe_pool
from penstock.engine.protocol.config import SchedulerConfig
from penstock.engine.scheduling import KvCachePool, SequencePool


@pytest.mark.parametrize(("is_reserved", "memory"), [(True, "in 5,120 MiB"), (False, "in up to 5,120 MiB, used only")])
def test_log_states_whether_the_memory_of_the_pool_is_reserved(is_reserved: bool, memory: str) -> None:
    pool = SequencePool(KvCachePool(64, 16), None, enable_prefix_caching=False)
    line = describe_pool(pool, SchedulerConfig(), 5 << 30, is_reserved=is_reserved)
    assert line.startswith(f"the pool holds 1,024 tokens (64 blocks of 16) {memory}")
