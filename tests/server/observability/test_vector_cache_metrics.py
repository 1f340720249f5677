"""Metrics of the vector cache."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest

from penstock.engine.client.stats import CacheStats, DispatcherStats
from penstock.engine.client.vector_cache.cache import VectorCache
from penstock.server.observability.metrics import VectorCacheMetrics


def lines(cache: VectorCache, *stats: CacheStats | None) -> set[str]:
    registry = CollectorRegistry()
    all_stats = [DispatcherStats(vectors=vectors) for vectors in stats]
    named = [(SimpleNamespace(stats=lambda each=each: each), f"m{i}") for i, each in enumerate(all_stats)]
    registry.register(VectorCacheMetrics(cache, lambda: named))
    return set(generate_latest(registry).decode().splitlines())


def test_hits_of_models_and_sizes_of_tiers_are_counted(tmp_path: Path) -> None:
    cache = VectorCache(2**20, tmp_path, 2**20)
    row = {"embedding": np.zeros(100, np.float32)}

    async def use() -> None:
        cache.keep(bytes(32), row)
        await cache.find([bytes(32), bytes([1] * 32)])

    asyncio.run(use())
    cache.close()
    cache = VectorCache(2**20, tmp_path, 2**20)
    cache.keep(bytes(32), row)
    shown = lines(cache, CacheStats(True, 3, 2, 5), None)
    assert {
        'penstock_vector_cache_open{model="m0"} 1.0',
        'penstock_vector_cache_memory_hits_total{model="m0"} 3.0',
        'penstock_vector_cache_disk_hits_total{model="m0"} 2.0',
        'penstock_vector_cache_misses_total{model="m0"} 5.0',
        'penstock_vector_cache_working{tier="memory"} 1.0',
        'penstock_vector_cache_working{tier="disk"} 1.0',
        'penstock_vector_cache_evictions_total{tier="memory"} 0.0',
        'penstock_vector_cache_damaged_total{tier="disk"} 0.0',
        'penstock_vector_cache_dropped_total{tier="disk"} 0.0',
    } <= shown
    sizes = {line.split(" ")[0]: float(line.split(" ")[1]) for line in shown if "_bytes{" in line}
    assert sizes['penstock_vector_cache_bytes{tier="memory"}'] > 400
    assert sizes['penstock_vector_cache_bytes{tier="disk"}'] >= 4096
    assert not any("m1" in line for line in shown)
    cache.close()
