"""Tensors in, tensors out: the operations that the engine's layers and poolers call.

Imports torch, triton and the standard library, but nothing of the engine. Each folder is one operation: `__init__.py`
has the public function, the path for every device in torch, and the float32 reference of the tests; `_triton.py` has
the CUDA kernels (only modules whose names end so import triton). The torch paths of attention and pooling are long and
have a `_torch.py`. `cpu/` is the C library.

Shape letters, here for all folders:
    T  packed tokens of a batch          N  sequences of a batch        L  tokens of one sequence
    D  model width                       H  query heads                 Hkv  key and value heads
    K  head size                         S  state size (Mamba)          P  cache blocks
`cu_seqlens` is int32 [N+1]: sequence n owns rows cu_seqlens[n] to cu_seqlens[n+1] of every packed tensor.
"""
