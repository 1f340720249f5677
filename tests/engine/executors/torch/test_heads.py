"""Heads of decoders: a `score` map, or rows of the output embedding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engine.executors.torch.base import Head
from penstock.engine.executors.torch.heads import load_head
from penstock.engine.executors.torch.layers.weights import Weights
from penstock.engine.families.decoder import decoder_head
from penstock.engine.protocol.errors import WeightError
from penstock.engine.protocol.model_info import ClassifierMethod, ModelInfo, ModelKind
from penstock.engine.protocol.tasks import PoolingType

VOCAB_SIZE, SIZE = 20, 6
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
SHAPES = {
    EMBEDDING: (VOCAB_SIZE, SIZE),
    OUTPUT: (VOCAB_SIZE, SIZE),
    "lm_head.bias": (VOCAB_SIZE,),
    "score.weight": (2, SIZE),
    "score.bias": (2,),
}
ROWS = torch.randn(3, SIZE, generator=torch.Generator().manual_seed(1))


class Checkpoint(dict[str, Tensor]):
    """Random tensors with these names."""

    def __init__(self, *names: str) -> None:
        numbers = torch.Generator().manual_seed(0)
        super().__init__({name: torch.randn(SHAPES[name], generator=numbers) for name in names})

    def read(self, name: str) -> Tensor:
        return self[name]


def find_head(
    tensors: Checkpoint, kind: ModelKind = ModelKind.CROSS_ENCODER, dtype: torch.dtype = torch.float32, **fields: Any
) -> Head | None:
    required: dict[str, Any] = {
        "name": "model",
        "path": "/model",
        "architecture": "Qwen3ForCausalLM",
        "model_type": "qwen3",
        "packed": True,
        "kind": kind,
        "tasks": (),
        "hidden_size": SIZE,
        "vocab_size": VOCAB_SIZE,
        "max_model_len": 8,
        "embedding_size": 0,
        "sequence_pooling": (PoolingType.LAST,),
        "labels": ("LABEL_0",),
    }
    weights = Weights(tensors, dtype, torch.device("cpu"))
    spec = decoder_head(ModelInfo(**required | fields), SIZE)
    return load_head(weights, weights.scope("model"), spec, "embed_tokens.weight")


def head_of(tensors: Checkpoint, *args: Any, **fields: Any) -> Head:
    head = find_head(tensors, *args, **fields)
    assert head is not None
    return head


def test_two_answers_give_the_logit_of_their_softmax() -> None:
    tensors = Checkpoint(OUTPUT, EMBEDDING)
    head = head_of(tensors, dtype=torch.bfloat16, classifier_tokens=(7, 4))
    logits = ROWS @ tensors[OUTPUT].T
    assert head(ROWS).dtype == torch.float32
    torch.testing.assert_close(head(ROWS).sigmoid()[:, 0], logits[:, [7, 4]].softmax(-1)[:, 1])


@pytest.mark.parametrize(
    ("names", "tied", "expected"),
    [
        ((EMBEDDING,), None, EMBEDDING),
        ((EMBEDDING,), True, EMBEDDING),
        ((EMBEDDING, OUTPUT), None, OUTPUT),
        ((EMBEDDING, OUTPUT), False, OUTPUT),
        ((EMBEDDING, OUTPUT), True, EMBEDDING),
    ],
)
def test_tied_model_reads_the_input_embedding(names: tuple[str, ...], tied: bool | None, expected: str) -> None:
    tensors = Checkpoint(*names)
    config = {} if tied is None else {"tie_word_embeddings": tied}
    method = ClassifierMethod.NO_POST_PROCESSING
    head = head_of(tensors, classifier_tokens=(5,), classifier_method=method, config=config)
    torch.testing.assert_close(head(ROWS), ROWS @ tensors[expected][5:6].T)


def test_missing_output_embedding_is_named() -> None:
    with pytest.raises(WeightError, match=r"no weight 'lm_head\.weight'"):
        find_head(Checkpoint(EMBEDDING), classifier_tokens=(5,), config={"tie_word_embeddings": False})


@pytest.mark.parametrize("method", list(ClassifierMethod))
@pytest.mark.parametrize("nested", [False, True])
def test_logits_are_scaled_capped_and_shifted(method: ClassifierMethod, nested: bool) -> None:
    tensors = Checkpoint(OUTPUT, "lm_head.bias")
    config: dict[str, Any] = {"logit_scale": 0.5, "logits_scaling": 4.0, "final_logit_softcapping": 2.0}
    config = {"text_config": config} if nested else config
    head = head_of(tensors, classifier_tokens=(7, 4), classifier_method=method, config=config)
    logits = (ROWS @ tensors[OUTPUT].T + tensors["lm_head.bias"]) * 0.125
    logits = (2 * torch.tanh(logits / 2))[:, [7, 4]]
    is_difference = method is ClassifierMethod.FROM_2_WAY_SOFTMAX
    torch.testing.assert_close(head(ROWS), logits[:, 1:] - logits[:, :1] if is_difference else logits)


@pytest.mark.parametrize("names", [("score.weight",), ("score.weight", "score.bias")])
@pytest.mark.parametrize("kind", [ModelKind.SEQUENCE_CLASSIFIER, ModelKind.TOKEN_CLASSIFIER])
def test_score_map_with_and_without_bias(names: tuple[str, ...], kind: ModelKind) -> None:
    tensors = Checkpoint(*names)
    head = head_of(tensors, kind, labels=("a", "b"))
    torch.testing.assert_close(head(ROWS), ROWS @ tensors["score.weight"].T + tensors.get("score.bias", 0))


def test_embedding_model_has_no_head() -> None:
    assert find_head(Checkpoint(EMBEDDING), ModelKind.EMBEDDING) is None
