"""One line for the log: what a model that runs in chunks was given to run with."""

from __future__ import annotations

from ...protocol.config import SchedulerConfig
from ...scheduling import SequencePool


def describe_pool(sequence_pool: SequencePool, limits: SchedulerConfig, num_bytes: int) -> str:
    """Returns the size of the pool, whether inputs run in chunks, and whether prefixes are kept.

    Args:
        sequence_pool: Memory of sequences that run in chunks.
        limits: What the operator asked for.
        num_bytes: Bytes that the pool takes; see PoolPlan.
    """
    kv, ssm = sequence_pool.kv, sequence_pool.ssm
    sizes = []
    if kv is not None:
        sizes.append(f"{kv.num_blocks * kv.block_size:,} tokens ({kv.num_blocks:,} blocks of {kv.block_size})")
    if ssm is not None:
        sizes.append(f"{ssm.num_slots:,} state slot{'s' * (ssm.num_slots != 1)}")
    chunks = "off"
    if limits.enable_chunked_prefill:
        chunks = "of adaptive size" if limits.chunk_size is None else f"of {limits.chunk_size:,} tokens"
    prefixes = "off" if sequence_pool.prefixes is None else "on"
    return f"the pool holds {' and '.join(sizes)} in {_mib(num_bytes)}; chunks: {chunks}; prefix cache: {prefixes}"


def _mib(num_bytes: int) -> str:
    mib = num_bytes / 2**20
    return f"{mib:,.0f} MiB" if mib >= 10 else f"{mib:.2g} MiB"
