"""kv_store through torch's indexed copies: the CPU, and devices without triton."""

from torch import Tensor


def kv_store_torch(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Tensor | None, slots: Tensor) -> None:
    """Same as `kv_store`."""
    for x_THK, cache in ((k, k_cache), (v, v_cache)):
        x_SHK = x_THK if rows is None else x_THK.index_select(0, rows)
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, x_SHK)
