"""The heads of decoders: a `score` map, or some rows of the output embedding."""

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
EMBEDDING = "model.embed_tokens.weight"


class Tensors:
    """A checkpoint in memory."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def read(self, name: str) -> Tensor:
        return self.tensors[name]


def make(*names: str) -> Tensors:
    numbers = torch.Generator().manual_seed(0)
    shapes = {EMBEDDING: (VOCAB_SIZE, SIZE), "lm_head.weight": (VOCAB_SIZE, SIZE), "lm_head.bias": (VOCAB_SIZE,)}
    shapes |= {"score.weight": (2, SIZE), "score.bias": (2,)}
    return Tensors({name: torch.randn(shapes[name], generator=numbers) for name in names})


def weights(tensors: Tensors, dtype: torch.dtype = torch.float32) -> Weights:
    return Weights(tensors, dtype, torch.device("cpu"))


def info(kind: ModelKind = ModelKind.CROSS_ENCODER, **fields: Any) -> ModelInfo:
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
    return ModelInfo(**required | fields)


def head_of(view: Weights, model: ModelInfo) -> Head | None:
    return load_head(view, view.scope("model"), decoder_head(model, SIZE), "embed_tokens.weight")


def test_two_answers_are_one_logit_whose_sigmoid_is_the_softmax() -> None:
    tensors, rows = make("lm_head.weight", EMBEDDING), torch.randn(3, SIZE)
    head = head_of(weights(tensors, torch.bfloat16), info(classifier_tokens=(7, 4)))
    assert head is not None
    logits = rows @ tensors.read("lm_head.weight").T
    assert head(rows).dtype == torch.float32
    torch.testing.assert_close(head(rows).sigmoid()[:, 0], logits[:, [7, 4]].softmax(-1)[:, 1])


@pytest.mark.parametrize(
    ("names", "tied", "expected"),
    [
        ((EMBEDDING,), None, EMBEDDING),
        ((EMBEDDING,), True, EMBEDDING),
        ((EMBEDDING, "lm_head.weight"), None, "lm_head.weight"),
        ((EMBEDDING, "lm_head.weight"), False, "lm_head.weight"),
        ((EMBEDDING, "lm_head.weight"), True, EMBEDDING),
    ],
)
def test_the_output_embedding_may_be_the_input_embedding(
    names: tuple[str, ...], tied: bool | None, expected: str
) -> None:
    tensors, rows = make(*names), torch.randn(3, SIZE)
    config = {} if tied is None else {"tie_word_embeddings": tied}
    fields = {"classifier_tokens": (5,), "classifier_method": ClassifierMethod.NO_POST_PROCESSING, "config": config}
    head = head_of(weights(tensors), info(**fields))
    assert head is not None
    torch.testing.assert_close(head(rows), rows @ tensors.read(expected)[5:6].T)


def test_a_missing_output_embedding_is_named() -> None:
    fields = {"classifier_tokens": (5,), "config": {"tie_word_embeddings": False}}
    with pytest.raises(WeightError, match=r"no weight 'lm_head\.weight'"):
        head_of(weights(make(EMBEDDING)), info(**fields))


@pytest.mark.parametrize("method", list(ClassifierMethod))
@pytest.mark.parametrize("nested", [False, True])
def test_families_scale_cap_and_shift_their_logits(method: ClassifierMethod, nested: bool) -> None:
    tensors, rows = make("lm_head.weight", "lm_head.bias"), torch.randn(3, SIZE)
    config: dict[str, Any] = {"logit_scale": 0.5, "logits_scaling": 4.0, "final_logit_softcapping": 2.0}
    config = {"text_config": config} if nested else config
    fields = {"classifier_tokens": (7, 4), "classifier_method": method, "config": config}
    head = head_of(weights(tensors), info(**fields))
    assert head is not None
    logits = (rows @ tensors.read("lm_head.weight").T + tensors.read("lm_head.bias")) * 0.125
    logits = (2 * torch.tanh(logits / 2))[:, [7, 4]]
    is_difference = method is ClassifierMethod.FROM_2_WAY_SOFTMAX
    torch.testing.assert_close(head(rows), logits[:, 1:] - logits[:, :1] if is_difference else logits)


@pytest.mark.parametrize("names", [("score.weight",), ("score.weight", "score.bias")])
def test_a_score_map_with_and_without_bias(names: tuple[str, ...]) -> None:
    tensors, rows = make(*names), torch.randn(3, SIZE)
    for kind in (ModelKind.SEQUENCE_CLASSIFIER, ModelKind.TOKEN_CLASSIFIER):
        head = head_of(weights(tensors), info(kind, labels=("a", "b")))
        assert head is not None
        torch.testing.assert_close(
            head(rows), rows @ tensors.read("score.weight").T + tensors.tensors.get("score.bias", 0)
        )


def test_embedding_models_have_none() -> None:
    assert head_of(weights(make(EMBEDDING)), info(ModelKind.EMBEDDING)) is None
