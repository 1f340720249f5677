"""ModelPooler runs every task, for batches of whole sequences that mix tasks and parameters."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling
from torch import Tensor

from penstock.engine.executors.torch.packed_batch import ModelOutput
from penstock.engine.pooling import ChunkedPoolingManager
from penstock.engine.pooling.tensor_ops import tensor_pooler
from penstock.engine.protocol.errors import UnsupportedTaskError
from penstock.engine.protocol.model_info import DenseSpec, ModelInfo, ModelKind
from penstock.engine.protocol.tasks import PoolingTask, PoolingType

from ...tables import table
from .conftest import (
    ATTENTION_HEAD,
    HIDDEN_SIZE,
    LENGTHS,
    NUM_HEADS,
    PoolAll,
    TinyModel,
    assert_same,
    dense_chain,
    embedding_cases,
    make_info,
    make_metadata,
    resolved,
)

MODES = {
    "cls": PoolingType.CLS,
    "max": PoolingType.MAX,
    "mean": PoolingType.MEAN,
    "mean_sqrt_len_tokens": PoolingType.MEAN_SQRT_LEN,
    "weightedmean": PoolingType.WEIGHTED_MEAN,
    "lasttoken": PoolingType.LAST,
}
MIXED_EMBED = [(None, True), (8, True), (None, False), (3, False), (24, True), (1, True)]


def stacked(arrays: Sequence[dict[str, Any]], name: str) -> np.ndarray:
    return np.stack([own[name] for own in arrays])


# Equal to sentence-transformers ----------------------------------------------------------------------------------


def padded(hidden_states: Tensor) -> dict[str, Tensor]:
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(n, dtype=torch.int64) for n in LENGTHS], batch_first=True)
    parts = list(hidden_states.split(LENGTHS))
    rows = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=1e6)
    return {"token_embeddings": rows, "attention_mask": mask}


@pytest.mark.parametrize("modes", [*((mode,) for mode in MODES), ("lasttoken", "mean"), tuple(MODES)], ids="+".join)
@pytest.mark.parametrize("normalize", [False, True], ids=["raw", "normalised"])
def test_embeddings_equal_sentence_transformers(
    modes: tuple[str, ...], normalize: bool, pool_all: PoolAll, hidden_states: Tensor
) -> None:
    features = Pooling(HIDDEN_SIZE, modes)(padded(hidden_states))
    expected = (Normalize()(features) if normalize else features)["sentence_embedding"]
    info = make_info(sequence_pooling=tuple(MODES[m] for m in modes), normalize=normalize)
    output = pool_all(tensor_pooler(info, TinyModel()), [resolved(info, PoolingTask.EMBED)] * len(LENGTHS))
    np.testing.assert_allclose(stacked(output.to_numpy(), "embedding"), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "lasttoken"])
def test_skipped_prompt_equals_sentence_transformers(mode: str, pool_all: PoolAll, hidden_states: Tensor) -> None:
    long = [i for i, length in enumerate(LENGTHS) if length > 4]
    features = {name: value[long] for name, value in padded(hidden_states).items()}
    features["prompt_length"] = torch.tensor([4])
    expected = Pooling(HIDDEN_SIZE, mode, include_prompt=False)(features)["sentence_embedding"]
    info = make_info(sequence_pooling=(MODES[mode],), normalize=False)
    params = [resolved(info, PoolingTask.EMBED)] * len(LENGTHS)
    skip_tokens = torch.full((len(LENGTHS),), 4, dtype=torch.int32)
    output = pool_all(tensor_pooler(info, TinyModel()), params, indices=long, skip_tokens=skip_tokens)
    np.testing.assert_allclose(stacked(output.to_numpy(), "embedding"), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("modes", "normalize"), [(("mean",), True), (("cls", "lasttoken"), False)])
def test_dense_modules_equal_sentence_transformers(
    modes: tuple[str, ...], normalize: bool, pool_all: PoolAll, hidden_states: Tensor
) -> None:
    torch.manual_seed(4)
    chain = [Dense(HIDDEN_SIZE * len(modes), 16, activation_function=torch.nn.GELU()), Dense(16, 8, bias=False)]
    features = Pooling(HIDDEN_SIZE, modes)(padded(hidden_states))
    with torch.no_grad():
        for module in [*chain, *([Normalize()] if normalize else [])]:
            features = module(features)
    specs = tuple(
        DenseSpec(folder="", in_features=d.in_features, out_features=d.out_features, bias=d.bias, activation="")
        for d in chain
    )
    info = make_info(sequence_pooling=tuple(MODES[m] for m in modes), dense=specs, normalize=normalize)
    maps = [lambda rows, d=d: d({"sentence_embedding": rows})["sentence_embedding"] for d in chain]
    with torch.inference_mode():
        output = pool_all(tensor_pooler(info, TinyModel(), maps), [resolved(info, PoolingTask.EMBED)] * len(LENGTHS))
    expected = features["sentence_embedding"]
    np.testing.assert_allclose(stacked(output.to_numpy(), "embedding"), expected, atol=1e-5, rtol=1e-5)


# One task --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", [None, 0, ATTENTION_HEAD])
def test_attention_pooling_weighs_rows_by_the_head(
    head: int | None, pool_all: PoolAll, hidden_states: Tensor, attention_weights: Tensor
) -> None:
    info = make_info(sequence_pooling=(PoolingType.ATTENTION,), attention_head=head, normalize=False)
    output = pool_all(tensor_pooler(info, TinyModel()), [resolved(info, PoolingTask.EMBED)] * len(LENGTHS))
    weights = attention_weights.mean(1) if head is None else attention_weights[:, head]
    parts = zip(hidden_states.split(LENGTHS), weights.split(LENGTHS), output.to_numpy(), strict=True)
    for rows, w, arrays in parts:
        np.testing.assert_allclose(arrays["embedding"], (w[:, None] * rows).sum(0) / w.sum(), atol=1e-6)


def test_only_attention_embeddings_need_attention_weights() -> None:
    plain, attentive = make_info(), make_info(sequence_pooling=(PoolingType.MEAN, PoolingType.ATTENTION))
    embed, tokens = (resolved(plain, task) for task in (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED))
    assert not tensor_pooler(plain, TinyModel()).needs_attention([embed])
    pooler = tensor_pooler(attentive, TinyModel())
    assert pooler.needs_attention([tokens, embed])
    assert not pooler.needs_attention([tokens, tokens])


def test_attention_head_that_does_not_exist_is_rejected(hidden_states: Tensor, attention_weights: Tensor) -> None:
    info = make_info(sequence_pooling=(PoolingType.ATTENTION,), attention_head=NUM_HEADS)
    with pytest.raises(ValueError, match="attention_head is 4; the model has 4 heads"):
        tensor_pooler(info, TinyModel())
    info = make_info(sequence_pooling=(PoolingType.ATTENTION,), attention_head=NUM_HEADS - 1)
    metadata = make_metadata(LENGTHS, [resolved(info, PoolingTask.EMBED)] * len(LENGTHS))
    output = ModelOutput(hidden_states=hidden_states, attention_weights=attention_weights[:, :2])
    with pytest.raises(ValueError, match="attention_head is 3; the model has 2 heads"):
        tensor_pooler(info, TinyModel()).pool(output, metadata)


@pytest.mark.parametrize("chunk_sizes", [[3, 9], [3, 5], [3, 2]])  # whole sequences, one beside a chunk, and chunks
def test_attention_pooling_without_weights_is_an_error(chunk_sizes: list[int], hidden_states: Tensor) -> None:
    info = make_info(sequence_pooling=(PoolingType.ATTENTION,))
    metadata = make_metadata([3, 9], [resolved(info, PoolingTask.EMBED)] * 2, chunk_sizes=chunk_sizes)
    output = ModelOutput(hidden_states=hidden_states[: sum(chunk_sizes)])
    manager = ChunkedPoolingManager(HIDDEN_SIZE, strategy=PoolingType.ATTENTION)
    with pytest.raises(ValueError, match="needs the attention weights"):
        tensor_pooler(info, TinyModel()).pool(output, metadata, manager)


def test_logits_of_the_model_are_only_activated(hidden_states: Tensor) -> None:
    info = make_info(ModelKind.SEQUENCE_CLASSIFIER, sequence_pooling=(PoolingType.CLS,))
    logits = torch.randn(len(LENGTHS), 5, generator=torch.Generator().manual_seed(0))
    params = [resolved(info, PoolingTask.CLASSIFY, use_activation=i % 2 == 0) for i in range(len(LENGTHS))]
    output = ModelOutput(hidden_states=hidden_states, logits=logits)
    result = tensor_pooler(info, TinyModel()).pool(output, make_metadata(LENGTHS, params)).to_numpy()
    for i, arrays in enumerate(result):
        np.testing.assert_allclose(arrays["scores"], logits[i].softmax(0) if i % 2 == 0 else logits[i], atol=1e-6)


def test_token_embeddings_are_cut_and_normalised(pool_all: PoolAll, hidden_states: Tensor) -> None:
    info = make_info()
    params = [resolved(info, PoolingTask.TOKEN_EMBED, dimensions=d, normalize=n) for d, n in MIXED_EMBED]
    output = pool_all(tensor_pooler(info, TinyModel()), params)
    for rows, p, arrays in zip(hidden_states.split(LENGTHS), params, output.to_numpy(), strict=True):
        expected = rows[:, : p.dimensions]
        expected = F.normalize(expected, dim=1) if p.normalize else expected
        np.testing.assert_allclose(arrays["token_embeddings"], expected, atol=1e-6)
    with pytest.raises(KeyError, match="sequence 2 has no embedding; it has token_embeddings"):
        output.get_embedding(2)


@pytest.mark.parametrize("num_types", [1, 2])
def test_dense_maps_tokens_if_it_takes_their_width(num_types: int, pool_all: PoolAll, hidden_states: Tensor) -> None:
    width = num_types * HIDDEN_SIZE
    spec = DenseSpec(folder="2_Dense", in_features=width, out_features=10, bias=True, activation="Tanh")
    types = (PoolingType.CLS, PoolingType.MEAN)[:num_types]
    info = make_info(dense=(spec,), sequence_pooling=types, normalize=False)
    chain = dense_chain(width)
    output = pool_all(tensor_pooler(info, TinyModel(), [chain]), [resolved(info, PoolingTask.TOKEN_EMBED)] * 6)
    actual = np.concatenate([arrays["token_embeddings"] for arrays in output.to_numpy()])
    np.testing.assert_allclose(actual, chain(hidden_states) if num_types == 1 else hidden_states, atol=1e-6)


@pytest.mark.parametrize("pooling_type", [PoolingType.ALL, PoolingType.STEP])
def test_step_returns_tagged_rows_and_chosen_columns(
    pooling_type: PoolingType, pool_all: PoolAll, hidden_states: Tensor, token_ids: Tensor
) -> None:
    model = TinyModel()
    info = make_info(ModelKind.TOKEN_CLASSIFIER, sequence_pooling=(), token_pooling=pooling_type)
    cases: list[dict[str, Any]] = [{}] * 6
    if pooling_type is PoolingType.STEP:
        rows = table(__file__, "test_step_returns_tagged_rows_and_chosen_columns")
        cases = [{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()} for row in rows]
    params = [resolved(info, PoolingTask.TOKEN_CLASSIFY, **case) for case in cases]
    output = pool_all(tensor_pooler(info, model), params)
    logits = (hidden_states @ model.weight.T).split(LENGTHS)
    for rows, ids, p, arrays in zip(logits, token_ids.split(LENGTHS), params, output.to_numpy(), strict=True):
        if p.step_tag_id is not None:
            rows = rows[ids == p.step_tag_id]
        if p.returned_token_ids is not None:
            rows = rows[:, list(p.returned_token_ids)]
        if p.use_activation:
            rows = rows.sigmoid() if rows.shape[1] == 1 else rows.softmax(dim=1)
        assert arrays["token_scores"].shape == rows.shape
        np.testing.assert_allclose(arrays["token_scores"], rows, atol=1e-6)


def test_missing_classification_head_is_named(pool_all: PoolAll) -> None:
    model = TinyModel()
    model.sequence_head = None
    info = make_info(ModelKind.SEQUENCE_CLASSIFIER, sequence_pooling=(PoolingType.CLS,))
    with pytest.raises(UnsupportedTaskError, match="no sequence classification head"):
        pool_all(tensor_pooler(info, model), [resolved(info, PoolingTask.CLASSIFY)] * 6)


# Mixed batches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("info", "dense"), list(embedding_cases()))
def test_results_do_not_depend_on_the_batch(info: ModelInfo, dense: list[torch.nn.Module], pool_all: PoolAll) -> None:
    params = [
        resolved(info, PoolingTask.EMBED),
        resolved(info, PoolingTask.TOKEN_EMBED, dimensions=3),
        resolved(info, PoolingTask.EMBED, dimensions=info.embedding_size // 2, normalize=False),
        resolved(info, PoolingTask.EMBED, dimensions=2),
        resolved(info, PoolingTask.TOKEN_EMBED, normalize=False),
        resolved(info, PoolingTask.EMBED, normalize=False),
    ]
    pooler = tensor_pooler(info, TinyModel(), dense)
    skip_tokens = torch.tensor([0, 1, 3, 0, 2, 29], dtype=torch.int32)
    together = pool_all(pooler, params, skip_tokens=skip_tokens).to_numpy()
    alone = [pool_all(pooler, params, indices=[i], skip_tokens=skip_tokens).to_numpy()[0] for i in range(len(LENGTHS))]
    assert_same(together, alone)
