"""The truth of kv_store: one row after the other."""

from torch import Tensor


def kv_store_reference(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Tensor | None, slots: Tensor
) -> None:
    """Same as `kv_store`."""
    block_size = k_cache.shape[1]
    for s, slot in enumerate(slots.tolist()):
        row = s if rows is None else int(rows[s])
        k_cache[slot // block_size, slot % block_size] = k[row]
        v_cache[slot // block_size, slot % block_size] = v[row]
