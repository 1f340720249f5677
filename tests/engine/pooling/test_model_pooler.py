"""The pooler of a model: every task, mixed batches. Chunks are in test_chunks.py."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.executors.torch.base import ModelOutput
from penstock.engine.pooling import ChunkedPoolingManager, tensor_ops
from penstock.engine.pooling.tensor_ops import tensor_pooler
from penstock.engine.protocol.errors import UnsupportedTaskError
from penstock.engine.protocol.model_info import DenseSpec, ModelInfo, ModelKind
from penstock.engine.protocol.tasks import PoolingTask, PoolingType

from .conftest import (
    ATTENTION_HEAD,
    DENSE,
    HIDDEN_SIZE,
    LENGTHS,
    NUM_HEADS,
    SEQUENCE_TYPES,
    PoolAll,
    TinyModel,
    assert_same,
    dense_chain,
    describe,
    embedding_cases,
    make_info,
    resolved,
)

# One task --------------------------------------------------------------------------------------------------------


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the pooling kernel was called with."""
    calls: list[dict[str, Any]] = []
    real = tensor_ops.pool

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(kwargs)
        return real(*args, **kwargs)

    monkeypatch.setattr(tensor_ops, "pool", counted)
    return calls


@pytest.mark.parametrize("pooling_type", SEQUENCE_TYPES)
def test_one_kernel_call_embeds_a_batch_of_mixed_params(
    pooling_type: PoolingType, pool_all: PoolAll, kernel_calls: list[dict[str, Any]]
) -> None:
    info = make_info(sequence_pooling=(pooling_type,))
    params = [resolved(info, PoolingTask.EMBED, dimensions=d, normalize=n) for d, n in MIXED_EMBED]
    output = pool_all(tensor_pooler(info, TinyModel()), params)
    assert len(kernel_calls) == 1
    assert kernel_calls[0]["max_seqlen"] == max(LENGTHS)  # the kernel need not share out more
    for p, arrays in zip(params, output.to_numpy(), strict=True):
        vector = arrays["embedding"]
        assert vector.shape == (p.dimensions or HIDDEN_SIZE,)
        if p.normalize:
            assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)
    assert output.batch_size == len(LENGTHS)
    np.testing.assert_array_equal(output.get_embedding(3), output.to_numpy()[3]["embedding"])


MIXED_EMBED = [(None, True), (8, True), (None, False), (3, False), (24, True), (1, True)]


def test_uniform_params_reach_the_kernel_as_scalars(pool_all: PoolAll, kernel_calls: list[dict[str, Any]]) -> None:
    info = make_info()
    params = [resolved(info, PoolingTask.EMBED, dimensions=8) for _ in LENGTHS]
    pool_all(tensor_pooler(info, TinyModel()), params)
    assert (kernel_calls[0]["dimensions"], kernel_calls[0]["normalize"]) == (8, True)


@pytest.mark.parametrize("head", [None, 0, ATTENTION_HEAD])
def test_attention_pooling(
    head: int | None, pool_all: PoolAll, hidden_states: Tensor, attention_weights: Tensor
) -> None:
    info = make_info(sequence_pooling=(PoolingType.ATTENTION,), attention_head=head, normalize=False)
    output = pool_all(tensor_pooler(info, TinyModel()), [resolved(info, PoolingTask.EMBED)] * len(LENGTHS))
    weights = attention_weights.mean(1) if head is None else attention_weights[:, head]
    parts = zip(hidden_states.split(LENGTHS), weights.split(LENGTHS), output.to_numpy(), strict=True)
    for rows, w, arrays in parts:
        np.testing.assert_allclose(arrays["embedding"], (w[:, None] * rows).sum(0) / w.sum(), atol=1e-6)


def test_needs_attention() -> None:
    plain, attentive = make_info(), make_info(sequence_pooling=(PoolingType.MEAN, PoolingType.ATTENTION))
    embed, tokens = (resolved(plain, task) for task in (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED))
    assert not tensor_pooler(plain, TinyModel()).needs_attention([embed])
    pooler = tensor_pooler(attentive, TinyModel())
    assert pooler.needs_attention([tokens, embed])
    assert not pooler.needs_attention([tokens, tokens])


def test_attention_head_is_checked_at_construction() -> None:
    info = make_info(sequence_pooling=(PoolingType.ATTENTION,), attention_head=NUM_HEADS)
    with pytest.raises(ValueError, match="attention_head is 4; the model has 4 heads"):
        tensor_pooler(info, TinyModel())


def test_a_head_that_the_weights_lack_is_an_error(hidden_states: Tensor, attention_weights: Tensor) -> None:
    info = make_info(sequence_pooling=(PoolingType.ATTENTION,), attention_head=NUM_HEADS - 1)
    metadata = describe(LENGTHS, [resolved(info, PoolingTask.EMBED)] * len(LENGTHS))
    output = ModelOutput(hidden_states=hidden_states, attention_weights=attention_weights[:, :2])
    with pytest.raises(ValueError, match="attention_head is 3; the model has 2 heads"):
        tensor_pooler(info, TinyModel()).pool(output, metadata)


def test_missing_attention_weights_are_an_error(hidden_states: Tensor) -> None:
    info = make_info(sequence_pooling=(PoolingType.ATTENTION,))
    metadata = describe(LENGTHS, [resolved(info, PoolingTask.EMBED)] * len(LENGTHS))
    with pytest.raises(ValueError, match="needs the attention weights"):
        tensor_pooler(info, TinyModel()).pool(ModelOutput(hidden_states=hidden_states), metadata)
    params = [resolved(info, PoolingTask.EMBED)] * 2
    for chunk_sizes in ([3, 5], [3, 2]):  # whole sequences beside a chunk, and chunks alone
        metadata = describe([3, 9], params, chunk_sizes=chunk_sizes)
        rows = hidden_states[: sum(chunk_sizes)]
        manager = ChunkedPoolingManager(HIDDEN_SIZE, strategy=PoolingType.ATTENTION)
        with pytest.raises(ValueError, match="needs the attention weights"):
            tensor_pooler(info, TinyModel()).pool(ModelOutput(hidden_states=rows), metadata, manager)


@pytest.mark.parametrize("kind", [ModelKind.SEQUENCE_CLASSIFIER, ModelKind.CROSS_ENCODER])
def test_classifier(kind: ModelKind, pool_all: PoolAll, hidden_states: Tensor) -> None:
    model = TinyModel()
    info = make_info(kind, sequence_pooling=(PoolingType.CLS,))
    output = pool_all(tensor_pooler(info, model), [resolved(info, info.tasks[-1])] * len(LENGTHS))
    first_rows = torch.stack([rows[0] for rows in hidden_states.split(LENGTHS)])
    expected = (first_rows @ model.weight.T).softmax(dim=1)
    actual = np.stack([arrays["scores"] for arrays in output.to_numpy()])
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_logits_of_the_model_are_taken_as_they_are(hidden_states: Tensor) -> None:
    info = make_info(ModelKind.SEQUENCE_CLASSIFIER, sequence_pooling=(PoolingType.CLS,))
    torch.manual_seed(0)
    logits = torch.randn(len(LENGTHS), 5)
    params = [resolved(info, PoolingTask.CLASSIFY, use_activation=i % 2 == 0) for i in range(len(LENGTHS))]
    metadata = describe(LENGTHS, params)
    output = tensor_pooler(info, TinyModel()).pool(ModelOutput(hidden_states=hidden_states, logits=logits), metadata)
    for i, arrays in enumerate(output.to_numpy()):
        np.testing.assert_allclose(arrays["scores"], logits[i].softmax(0) if i % 2 == 0 else logits[i], atol=1e-6)


def test_token_embeddings(pool_all: PoolAll, hidden_states: Tensor) -> None:
    info = make_info()
    params = [resolved(info, PoolingTask.TOKEN_EMBED, dimensions=d, normalize=n) for d, n in MIXED_EMBED]
    output = pool_all(tensor_pooler(info, TinyModel()), params)
    for rows, p, arrays in zip(hidden_states.split(LENGTHS), params, output.to_numpy(), strict=True):
        expected = rows[:, : p.dimensions]
        expected = F.normalize(expected, dim=1) if p.normalize else expected
        np.testing.assert_allclose(arrays["token_embeddings"], expected, atol=1e-6)


def test_dense_projects_tokens_where_it_fits(pool_all: PoolAll, hidden_states: Tensor) -> None:
    info = make_info(dense=DENSE)
    chain = dense_chain()
    output = pool_all(tensor_pooler(info, TinyModel(), [chain]), [resolved(info, PoolingTask.TOKEN_EMBED)] * 6)
    expected = F.normalize(chain(hidden_states), dim=1)
    actual = np.concatenate([arrays["token_embeddings"] for arrays in output.to_numpy()])
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_dense_for_concatenated_rows_leaves_tokens_alone(pool_all: PoolAll, hidden_states: Tensor) -> None:
    spec = DenseSpec(folder="2_Dense", in_features=2 * HIDDEN_SIZE, out_features=10, bias=True, activation="Tanh")
    info = make_info(dense=(spec,), sequence_pooling=(PoolingType.CLS, PoolingType.MEAN), normalize=False)
    pooler = tensor_pooler(info, TinyModel(), [dense_chain(2 * HIDDEN_SIZE)])
    output = pool_all(pooler, [resolved(info, PoolingTask.TOKEN_EMBED)] * 6)
    actual = np.concatenate([arrays["token_embeddings"] for arrays in output.to_numpy()])
    np.testing.assert_allclose(actual, hidden_states, atol=0)


def test_token_scores(pool_all: PoolAll, hidden_states: Tensor) -> None:
    model = TinyModel()
    info = make_info(ModelKind.TOKEN_CLASSIFIER, sequence_pooling=())
    output = pool_all(tensor_pooler(info, model), [resolved(info, PoolingTask.TOKEN_CLASSIFY)] * 6)
    expected = (hidden_states @ model.weight.T).softmax(dim=1)
    actual = [arrays["token_scores"] for arrays in output.to_numpy()]
    assert [len(rows) for rows in actual] == list(LENGTHS)
    np.testing.assert_allclose(np.concatenate(actual), expected, atol=1e-6)


def test_step_keeps_tagged_rows_and_columns(pool_all: PoolAll, hidden_states: Tensor, token_ids: Tensor) -> None:
    model = TinyModel()
    info = make_info(ModelKind.TOKEN_CLASSIFIER, sequence_pooling=(), token_pooling=PoolingType.STEP)
    cases: list[dict[str, Any]] = [
        {"step_tag_id": 3, "returned_token_ids": (4, 1)},
        {"step_tag_id": 3},
        {"returned_token_ids": (0,)},
        {"step_tag_id": 3, "returned_token_ids": (4, 1), "use_activation": False},
        {"step_tag_id": 99},
        {},
    ]
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


def test_a_task_without_head_names_it(pool_all: PoolAll) -> None:
    model = TinyModel()
    model.sequence_head = None
    info = make_info(ModelKind.SEQUENCE_CLASSIFIER, sequence_pooling=(PoolingType.CLS,))
    with pytest.raises(UnsupportedTaskError, match="no sequence classification head"):
        pool_all(tensor_pooler(info, model), [resolved(info, PoolingTask.CLASSIFY)] * 6)


def test_no_embedding_is_an_error(pool_all: PoolAll) -> None:
    info = make_info()
    output = pool_all(tensor_pooler(info, TinyModel()), [resolved(info, PoolingTask.TOKEN_EMBED)] * 6)
    with pytest.raises(KeyError, match="sequence 2 has no embedding; it has token_embeddings"):
        output.get_embedding(2)


# A result never depends on its batch -----------------------------------------------------------------------------


@pytest.mark.parametrize(("info", "dense"), list(embedding_cases()))
def test_mixed_tasks_and_params_equal_alone(info: ModelInfo, dense: list[torch.nn.Module], pool_all: PoolAll) -> None:
    width = info.embedding_size
    params = [
        resolved(info, PoolingTask.EMBED),
        resolved(info, PoolingTask.TOKEN_EMBED, dimensions=3),
        resolved(info, PoolingTask.EMBED, dimensions=width // 2, normalize=False),
        resolved(info, PoolingTask.EMBED, dimensions=2),
        resolved(info, PoolingTask.TOKEN_EMBED, normalize=False),
        resolved(info, PoolingTask.EMBED, normalize=False),
    ]
    pooler = tensor_pooler(info, TinyModel(), dense)
    skip_tokens = torch.tensor([0, 1, 3, 0, 2, 29], dtype=torch.int32)
    together = pool_all(pooler, params, skip_tokens=skip_tokens).to_numpy()
    for i in range(len(LENGTHS)):
        alone = pool_all(pooler, params, indices=[i], skip_tokens=skip_tokens).to_numpy()[0]
        assert alone.keys() == together[i].keys()
        for name, array in alone.items():
            np.testing.assert_allclose(together[i][name], array, atol=1e-6)


# Off the device --------------------------------------------------------------------------------------------------


def test_what_lies_on_the_host_is_not_copied(pool_all: PoolAll) -> None:
    info = make_info()
    tasks = [PoolingTask.EMBED, PoolingTask.TOKEN_EMBED] * 3
    for params in ([resolved(info, task) for task in tasks], [resolved(info, PoolingTask.EMBED)] * len(LENGTHS)):
        output = pool_all(tensor_pooler(info, TinyModel()), params)
        blocks = {block.name: block.values.numpy() for block in output.blocks}
        for arrays in output.to_numpy():
            assert all(np.shares_memory(array, blocks[name]) for name, array in arrays.items())


@pytest.mark.gpu
def test_a_mixed_batch_on_the_device(hidden_states: Tensor, token_ids: Tensor, pool_all: PoolAll) -> None:
    info = make_info()
    tasks = [PoolingTask.EMBED, PoolingTask.TOKEN_EMBED, PoolingTask.EMBED] * 2
    params = [resolved(info, task, dimensions=d) for task, d in zip(tasks, (None, 5, 3, None, 2, 7), strict=True)]
    pooler = tensor_pooler(info, TinyModel())
    metadata = describe(LENGTHS, params, token_ids=token_ids.cuda(), device="cuda")
    output = pooler.pool(ModelOutput(hidden_states=hidden_states.cuda()), metadata)
    assert_same(output, pool_all(pooler, params), atol=1e-5)
