"""Tensors in, tensors out: the operations that the engine's layers and poolers call.

Imports torch, triton and the standard library, but nothing of the engine. Each folder is one operation: `__init__.py`
has the public function, `_triton.py` the CUDA kernels (only such files import triton), `_torch.py` the path for every
other device, `_reference.py` the formula in float32. `cpu/` is the C library.

Shape letters, here for all folders:
    T  packed tokens of a batch          N  sequences of a batch        L  tokens of one sequence
    D  model width                       H  query heads                 Hkv  key and value heads
    K  head size                         S  state size (Mamba)          P  cache blocks
`cu_seqlens` is int32 [N+1]: sequence n owns rows cu_seqlens[n] to cu_seqlens[n+1] of every packed tensor.
"""
