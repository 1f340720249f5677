"""Every architecture in each dtype gives vectors close to float32 on a CPU. The CPU cases run without a GPU."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from penstock.engine.core.loading.weights_loader import load_model
from penstock.engine.executors.torch.packed_batch import PackedModel
from penstock.engine.model_files.resolve import with_device
from penstock.engine.protocol.model_info import ModelInfo
from penstock.engine.protocol.multi_vector import SparseKind, SparsePooling
from penstock.kernels.pooling import pool

from ..families import ENCODER_SIZES, chosen

ARCHITECTURES = chosen(
    *("bert", "roberta", "electra", "distilbert", "mpnet", "modernbert", "eurobert", "nomic-bert", "gte", "jina-v3"),
    *("llama", "llama-two-way", "mistral-window", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3"),
    *("mamba", "falcon-mamba", "mamba2", "jamba", "bamba", "granite"),
)
ARCHITECTURES.append(pytest.param("Albert", ENCODER_SIZES | {"embedding_size": 64}, id="albert-transformers"))
# Head sizes for flash attention. Widths are multiples of 16 bytes as in real models.
SIZES = {"hidden_size": 128, "dim": 128, "intermediate_size": 256, "hidden_dim": 256, "embedding_size": 64}
SIZES |= {"max_position_embeddings": 514, "head_dim": 64, "sliding_window": 24, "state_size": 16, "mamba_d_state": 16}
SIZES |= {"num_heads": 4, "mamba_n_heads": 4, "mamba_d_head": 64}
LENGTHS = (1, 2, 17, 64, 130, 300, 3)
MIN_COSINE = {"float32": 0.999999, "bfloat16": 0.999, "float16": 0.9999}

on_devices = pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", "bfloat16", id="cpu-bfloat16"),
        *(pytest.param("cuda", dtype, id=f"cuda-{dtype}", marks=pytest.mark.gpu) for dtype in MIN_COSINE),
    ],
)

Save = Callable[..., ModelInfo]


@pytest.fixture
def save(tmp_path: Path, resolve: Callable[..., ModelInfo]) -> Save:
    """Saves a wider model with random weights of the usual scale and resolves it for the CPU in float32."""

    def save_wide(class_name: str, config: dict[str, Any]) -> ModelInfo:
        config = config | {name: size for name, size in SIZES.items() if config.get(name) is not None}
        torch.manual_seed(0)
        model_class = getattr(transformers, class_name)
        model = model_class(model_class.config_class(**config)).eval()
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "A_log" not in name:  # transformers starts biases at 0 and norms at 1
                parameter.add_(0.05 * torch.randn_like(parameter))
        model.save_pretrained(tmp_path / class_name)
        return resolve(tmp_path / class_name)

    return save_wide


@pytest.fixture
def ids() -> list[list[int]]:
    numbers = np.random.default_rng(0)
    return [numbers.integers(3, 200, length).tolist() for length in LENGTHS]


def embed(model: PackedModel, batch: Any) -> Tensor:
    """Unit vectors of a batch: [N, D] float32 on the CPU."""
    hidden = model.forward(batch).hidden_states
    return pool(hidden, batch.cu_seqlens, "mean", normalize=True, max_seqlen=batch.max_seqlen).cpu()


def assert_near(rows: Tensor, exact: Tensor, dtype: str) -> None:
    cosines = torch.cosine_similarity(rows.double(), exact.double(), dim=1)
    assert cosines.min() > MIN_COSINE[dtype], cosines


@on_devices
@pytest.mark.parametrize(("family", "config"), ARCHITECTURES)
def test_vectors_equal_float32_on_a_cpu(
    family: str, config: dict[str, Any], device: str, dtype: str, save: Save, pack: Any, ids: list[list[int]]
) -> None:
    info = save(f"{family}Model", config)
    exact = embed(load_model(info), pack(ids))
    model = load_model(with_device(info, device, dtype))
    together = embed(model, pack(ids, device=device))
    assert_near(together, exact, dtype)
    alone = torch.cat([embed(model, pack([sequence], device=device)) for sequence in ids])
    assert_near(alone, together, dtype)


@pytest.mark.parametrize(
    ("device", "num_tokens"), [pytest.param("cuda", 65_537, marks=[pytest.mark.gpu, pytest.mark.large])]
)
@pytest.mark.parametrize(("family", "config"), chosen("bert", "qwen3", "mamba2"))
def test_large_batch_equals_small_batches(
    family: str, config: dict[str, Any], device: str, num_tokens: int, save: Save, pack: Any
) -> None:
    numbers = np.random.default_rng(1)
    lengths = [512] * (num_tokens // 1024) + [7] * (num_tokens // 32)
    lengths += [1] * (num_tokens - sum(lengths))
    numbers.shuffle(lengths)
    sequences = [numbers.integers(3, 200, length).tolist() for length in lengths]
    model = load_model(with_device(save(f"{family}Model", config), device, "bfloat16"))
    rows = embed(model, pack(sequences, device=device))
    some = sorted({0, 1, len(lengths) // 2, len(lengths) - 2, len(lengths) - 1, lengths.index(512)})
    alone = torch.cat([embed(model, pack([sequences[i]], device=device)) for i in some])
    assert rows.isfinite().all()
    assert_near(rows[some], alone, "bfloat16")


@pytest.mark.gpu
def test_vocabulary_head_in_bfloat16_is_close(save: Save, pack: Any, ids: list[list[int]]) -> None:
    sparse = SparsePooling(kind=SparseKind.VOCABULARY_LOGITS)
    info = replace(save("BertForMaskedLM", ENCODER_SIZES | {"vocab_size": 3001}), sparse=sparse)
    exact, model = load_model(info), load_model(with_device(info, "cuda", "bfloat16"))
    assert exact.vocabulary_head is not None
    assert model.vocabulary_head is not None
    rows = exact.forward(pack(ids[:3])).hidden_states
    logits = model.vocabulary_head(rows.cuda()).cpu()
    assert logits.shape == (len(rows), 3008)  # rows are aligned to 16 bytes
    assert not logits[:, 3001:].any()
    assert_near(logits[:, :3001], exact.vocabulary_head(rows)[:, :3001], "bfloat16")
