"""Writes keys and values of packed tokens into their places in a paged cache."""

from torch import Tensor

__all__ = ["kv_store"]


def kv_store(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *, rows: Tensor | None, slots: Tensor) -> None:
    """Writes row rows[s] of `k` and `v` to slot slots[s] of the caches, in place."""
    for x, cache in ((k, k_cache), (v, v_cache)):
        source = x if rows is None else x.index_select(0, rows)
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, source)
