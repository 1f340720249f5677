"""Every architecture on a GPU gives what it gives in float32 on the CPU: the rows that a caller gets, by their cosine.

The same bodies run on the CPU in bfloat16, so that a test which cannot run here for want of a GPU still is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from penstock.engine.core.loading.weights_loader import load_model
from penstock.engine.executors.torch.base import PackedModel
from penstock.engine.model_files.resolve import with_device
from penstock.engine.protocol.model_info import ModelInfo
from penstock.kernels.pooling import pool

# Heads of a size that flash attention takes, and widths that are multiples of 16 bytes, as real models have.
SIZES = {
    "vocab_size": 200,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
DECODER = SIZES | {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
WIDE = DECODER | {"head_dim": 64}
GEMMA = WIDE | {"sliding_window": 24, "query_pre_attn_scalar": 64}
MODERNBERT = SIZES | {"local_attention": 16, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
DISTILBERT = {
    "vocab_size": 200,
    "dim": 128,
    "n_layers": 3,
    "n_heads": 4,
    "hidden_dim": 256,
    "max_position_embeddings": 512,
}
MAMBA = {"vocab_size": 200, "hidden_size": 128, "num_hidden_layers": 3, "state_size": 16, "pad_token_id": 0}
MAMBA2 = MAMBA | {"num_heads": 8, "head_dim": 32, "n_groups": 2, "chunk_size": 32}
HYBRID = DECODER | {"mamba_d_state": 16}
MAMBA2_PART = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 2}
ARCHITECTURES = {
    "bert": ("BertModel", SIZES),
    "roberta": ("RobertaModel", SIZES | {"type_vocab_size": 1, "max_position_embeddings": 514}),
    "electra": ("ElectraModel", SIZES | {"embedding_size": 64}),
    "distilbert": ("DistilBertModel", DISTILBERT),
    "mpnet": ("MPNetModel", SIZES | {"max_position_embeddings": 514}),
    "modernbert": ("ModernBertModel", MODERNBERT),
    "llama": ("LlamaModel", DECODER),
    "llama, both ways": ("LlamaModel", DECODER | {"is_causal": False}),
    "mistral": ("MistralModel", DECODER | {"sliding_window": 24}),
    "qwen2": ("Qwen2Model", DECODER),
    "qwen3": ("Qwen3Model", WIDE),
    "gemma": ("GemmaModel", WIDE),
    "gemma2": ("Gemma2Model", GEMMA),
    "gemma3": ("Gemma3TextModel", GEMMA),
    "phi3": ("Phi3Model", DECODER),
    "mamba": ("MambaModel", MAMBA),
    "falcon-mamba": ("FalconMambaModel", MAMBA | {"intermediate_size": 256}),
    "mamba2": ("Mamba2Model", MAMBA2),
    "jamba, experts": (
        "JambaModel",
        HYBRID | {"num_hidden_layers": 4, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4},
    ),
    "bamba": ("BambaModel", HYBRID | MAMBA2_PART | {"attn_layer_indices": [1]}),
    "granite, experts": (
        "GraniteMoeHybridModel",
        HYBRID
        | MAMBA2_PART
        | {"layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 64, "num_local_experts": 4},
    ),
    "albert, through transformers": ("AlbertModel", SIZES | {"embedding_size": 64}),
}
LENGTHS = (1, 2, 17, 64, 130, 300, 3)
# float32 on CUDA may sum in another order; 16 bits round, and float16 has three more of them.
LEAST_COSINE = {"float32": 0.999999, "bfloat16": 0.999, "float16": 0.9999}

on_devices = pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", "bfloat16", id="cpu-bfloat16"),
        *(pytest.param("cuda", dtype, id=f"cuda-{dtype}", marks=pytest.mark.gpu) for dtype in LEAST_COSINE),
    ],
)
on_cuda_too = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])

Made = Callable[..., ModelInfo]


@pytest.fixture
def made(tmp_path: Path, resolve: Callable[..., ModelInfo]) -> Made:
    """Saves a model with random weights of the usual scale; returns what is known of it, on the CPU in float32."""

    def make(class_name: str, config: dict[str, Any]) -> ModelInfo:
        torch.manual_seed(0)
        model_class = getattr(transformers, class_name)
        model = model_class(model_class.config_class(**config)).eval()
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "A_log" not in name:  # transformers starts biases at 0 and norms at 1
                parameter.add_(0.05 * torch.randn_like(parameter))
        model.save_pretrained(tmp_path / class_name)
        return resolve(tmp_path / class_name)

    return make


@pytest.fixture
def ids() -> list[list[int]]:
    numbers = np.random.default_rng(0)
    return [numbers.integers(3, 200, length).tolist() for length in LENGTHS]


def embed(model: PackedModel, batch: Any) -> Tensor:
    """Unit vectors, as an embedding model answers: [N, D] float32 on the CPU."""
    hidden = model.forward(batch).hidden_states
    return pool(hidden, batch.cu_seqlens, "mean", normalize=True, max_seqlen=batch.max_seqlen).cpu()


def assert_near(rows: Tensor, exact: Tensor, dtype: str) -> None:
    cosines = torch.cosine_similarity(rows.double(), exact.double(), dim=1)
    assert cosines.min() > LEAST_COSINE[dtype], cosines


@on_devices
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_rows_are_those_of_float32_on_the_cpu(
    name: str, device: str, dtype: str, made: Made, pack: Any, ids: list[list[int]]
) -> None:
    info = made(*ARCHITECTURES[name])
    exact = embed(load_model(info), pack(ids))
    model = load_model(with_device(info, device, dtype))
    together = embed(model, pack(ids, device=device))
    assert_near(together, exact, dtype)
    alone = torch.cat([embed(model, pack([sequence], device=device)) for sequence in ids])
    assert_near(alone, together, dtype)


@contextmanager
def no_waiting(device: str) -> Iterator[None]:
    """Raises where the host waits for the device meanwhile. On a CPU it never does."""
    if device == "cpu":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_cuda_too
@pytest.mark.parametrize("name", ["bert", "distilbert", "mpnet", "modernbert", "llama", "qwen3", "mamba", "mamba2"])
def test_the_host_does_not_wait_in_a_forward(
    name: str, device: str, made: Made, pack: Any, ids: list[list[int]]
) -> None:
    """The batch is on the device before, and one forward has compiled what there is to compile."""
    model = load_model(with_device(made(*ARCHITECTURES[name]), device, "bfloat16"))
    batch = pack(ids, device=device)
    expected = embed(model, batch)
    with no_waiting(device):
        hidden = model.forward(batch).hidden_states
        rows = pool(hidden, batch.cu_seqlens, "mean", normalize=True, max_seqlen=batch.max_seqlen)
    assert_near(rows.cpu(), expected, "float16")


@pytest.mark.parametrize(
    ("device", "num_tokens"),
    [
        ("cpu", 2_048),
        pytest.param("cuda", 65_536, marks=[pytest.mark.gpu, pytest.mark.large]),
        pytest.param("cuda", 65_537, marks=[pytest.mark.gpu, pytest.mark.large]),
    ],
)
@pytest.mark.parametrize("name", ["bert", "qwen3", "mamba2"])
def test_a_large_batch_gives_what_small_ones_give(
    name: str, device: str, num_tokens: int, made: Made, pack: Any
) -> None:
    numbers = np.random.default_rng(1)
    lengths = [512] * (num_tokens // 1024) + [7] * (num_tokens // 32)
    lengths += [1] * (num_tokens - sum(lengths))
    numbers.shuffle(lengths)
    sequences = [numbers.integers(3, 200, length).tolist() for length in lengths]
    model = load_model(with_device(made(*ARCHITECTURES[name]), device, "bfloat16"))
    rows = embed(model, pack(sequences, device=device))
    some = sorted({0, 1, len(lengths) // 2, len(lengths) - 2, len(lengths) - 1, lengths.index(512)})
    alone = torch.cat([embed(model, pack([sequences[i]], device=device)) for i in some])
    assert rows.isfinite().all()
    assert_near(rows[some], alone, "bfloat16")


@on_cuda_too
@pytest.mark.parametrize("class_name", ["BertForSequenceClassification", "BertForTokenClassification"])
def test_heads_give_the_classes_of_the_cpu(
    class_name: str, device: str, made: Made, pack: Any, ids: list[list[int]]
) -> None:
    info = made(class_name, SIZES | {"num_labels": 5})

    def logits(model: PackedModel, batch: Any) -> Tensor:
        hidden = model.forward(batch).hidden_states
        if "Token" in class_name:
            return model.classify_tokens(hidden).cpu()
        return model.classify(pool(hidden, batch.cu_seqlens, "cls")).cpu()

    exact = logits(load_model(info), pack(ids))
    found = logits(load_model(with_device(info, device, "float32")), pack(ids, device=device))
    assert found.shape == exact.shape == (sum(LENGTHS) if "Token" in class_name else len(LENGTHS), 5)
    assert (found - exact).abs().max() <= 1e-4 * max(1.0, exact.abs().max().item())
