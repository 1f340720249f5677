"""Tensors in, tensors out: the operations that the engine's layers and poolers call.

Knows torch, triton and the standard library; knows no engine type. Each folder is one operation: `__init__.py` is the
public function, `_reference.py` the float32 truth, `_triton.py` the CUDA kernels (the only place that imports
triton), `_torch.py` the path for every other device.

Shape letters, here for all folders:
    T  packed tokens of a batch          N  sequences of a batch        L  tokens of one sequence
    D  model width                       H  query heads                 Hkv  key and value heads
    K  head size                         S  state size (Mamba)          P  cache blocks
`cu_seqlens` is int32 [N+1]: sequence n owns rows cu_seqlens[n] to cu_seqlens[n+1] of every packed tensor.
"""
