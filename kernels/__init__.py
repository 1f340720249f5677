"""Kernels: functions from tensors to tensors that the engine's layers and poolers call.

Imports torch, triton and the standard library, and nothing from the engine. Each folder is one operation:
`__init__.py` has the public function and its torch path for every device; the float32 reference is in `tests/kernels`.
`_triton.py` has the CUDA kernels; only modules named `*_triton.py` import triton. Attention and pooling have their
torch path in `_torch.py`. `cpu/` is the C library.

Shape letters of all folders:
    T  packed tokens of a batch          N  sequences of a batch        L  tokens of one sequence
    D  model width                       H  query heads                 Hkv  key and value heads
    K  head size                         S  state size (Mamba)          P  cache blocks
`cu_seqlens` is int32 [N+1]: sequence n owns rows cu_seqlens[n] to cu_seqlens[n+1] of every packed tensor.
"""
