"""ModelPooler gives the same results for chunks as for whole sequences."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from penstock.engine.executors.torch.packed_batch import ModelOutput
from penstock.engine.pooling import ChunkedPoolingManager
from penstock.engine.pooling.tensor_ops import tensor_pooler
from penstock.engine.protocol.model_info import ModelInfo, ModelKind
from penstock.engine.protocol.tasks import PoolingTask, PoolingType

from .chunking import NUM_SEQS, Chunk, Sequences, in_chunks, mixed_params, run
from .conftest import (
    DENSE,
    HIDDEN_SIZE,
    LENGTHS,
    NUM_LABELS,
    SEQUENCE_TYPES,
    TinyModel,
    dense_chain,
    embedding_cases,
    make_info,
    make_metadata,
    resolved,
)

SKIP_TOKENS = torch.tensor([0, 1, 3, 40, 2, 0], dtype=torch.int32)


def embedding_sequences(*types: PoolingType, **changes: Any) -> Sequences:
    info = make_info(sequence_pooling=types or (PoolingType.MEAN,), **changes)
    return Sequences(tensor_pooler(info, TinyModel()), [resolved(info, PoolingTask.EMBED)] * NUM_SEQS)


def token_sequences(token_pooling: PoolingType = PoolingType.STEP, **fields: Any) -> Sequences:
    info = make_info(ModelKind.TOKEN_CLASSIFIER, sequence_pooling=(), token_pooling=token_pooling)
    params = [resolved(info, PoolingTask.TOKEN_CLASSIFY, **fields)] * NUM_SEQS
    return Sequences(tensor_pooler(info, TinyModel()), params)


def embedding_case(info: ModelInfo, dense: list[torch.nn.Module], **options: Any) -> Sequences:
    if options.get("device") == "cuda":
        dense = [deepcopy(module).cuda() for module in dense]
    return Sequences(tensor_pooler(info, TinyModel(), dense), mixed_params(info), **options)


def class_case(pooling_type: PoolingType) -> Sequences:
    info = make_info(ModelKind.CROSS_ENCODER, sequence_pooling=(pooling_type,))
    tasks = (PoolingTask.CLASSIFY, PoolingTask.SCORE)
    params = [resolved(info, tasks[i % 2], use_activation=i % 3 == 0) for i in range(NUM_SEQS)]
    return Sequences(tensor_pooler(info, TinyModel()), params)


def step_case() -> Sequences:
    sequences = token_sequences()
    sequences.params = [
        resolved(sequences.pooler._info, PoolingTask.TOKEN_CLASSIFY, step_tag_id=tag, returned_token_ids=columns)
        for tag, columns in zip((1, None, 2, 1, 0, 99), (None, (1, 2)) * 3, strict=True)
    ]
    return sequences


MODELS = [
    *embedding_cases(),
    (make_info(sequence_pooling=(PoolingType.MEAN, PoolingType.ATTENTION)), []),
    (make_info(sequence_pooling=(PoolingType.LAST,), dense=DENSE), [dense_chain()]),
]
EMBEDDINGS = {f"{'+'.join(info.sequence_pooling)}{len(dense)}": (info, dense) for info, dense in MODELS}
CASES: dict[str, Callable[[], Sequences]] = {
    **{name: partial(embedding_case, *model) for name, model in EMBEDDINGS.items()},
    **{f"{name}_skip": partial(embedding_case, *model, skip_tokens=SKIP_TOKENS) for name, model in EMBEDDINGS.items()},
    **{f"{name}_bf16": partial(embedding_case, *m, dtype=torch.bfloat16) for name, m in list(EMBEDDINGS.items())[:7]},
    **{f"classes_{pooling_type}": partial(class_case, pooling_type) for pooling_type in SEQUENCE_TYPES},
    "tokens": partial(token_sequences, token_pooling=PoolingType.ALL),
    "steps": step_case,
}


@pytest.mark.parametrize("name", CASES)
def test_chunks_give_the_results_of_whole_sequences(name: str) -> None:
    for chunk_size in (1, 7, 64):
        run(CASES[name](), in_chunks(chunk_size))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", EMBEDDINGS)
def test_chunks_on_cuda_give_the_results_of_whole_sequences(name: str, dtype: torch.dtype) -> None:
    sequences = embedding_case(*EMBEDDINGS[name], skip_tokens=SKIP_TOKENS, dtype=dtype, device="cuda")
    run(sequences, in_chunks(7))


@st.composite
def schedules(draw: st.DrawFn) -> list[list[Chunk]]:
    """Draws batches of random chunks. A preempted sequence starts again at an earlier token."""
    computed = [0] * NUM_SEQS
    batches = []
    preemptions = draw(st.integers(0, 6))
    while any(done < length for done, length in zip(computed, LENGTHS, strict=True)):
        running = [i for i in range(NUM_SEQS) if computed[i] < LENGTHS[i]]
        picked = draw(st.lists(st.sampled_from(running), min_size=1, unique=True))
        batch = []
        for i in picked:
            if preemptions and computed[i] and draw(st.booleans()):
                preemptions -= 1
                computed[i] = draw(st.integers(0, computed[i]))
            size = draw(st.integers(1, LENGTHS[i] - computed[i]))
            batch.append(Chunk(i, computed[i], computed[i] + size))
            computed[i] += size
        batches.append(batch)
    return batches


@settings(max_examples=35, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schedule=schedules(), name=st.sampled_from([name for name in CASES if "bf16" not in name]))
def test_random_chunks_with_preemption_equal_whole_sequences(schedule: list[list[Chunk]], name: str) -> None:
    run(CASES[name](), schedule)


# The results of one chunk ----------------------------------------------------------------------------------------


def test_rows_computed_again_are_not_sent_again() -> None:
    sequences = token_sequences()
    batches = [[Chunk(3, 0, 20)], [Chunk(3, 0, 12)], [Chunk(3, 12, 30)], [Chunk(3, 25, 63)]]
    shapes = [sequences.step(batch)[0]["token_scores"].shape for batch in batches]
    assert shapes == [(20, NUM_LABELS), (0, NUM_LABELS), (10, NUM_LABELS), (33, NUM_LABELS)]


def test_incomplete_embedding_has_no_array() -> None:
    info = make_info()
    sequences = Sequences(tensor_pooler(info, TinyModel()), mixed_params(info))
    arrays = sequences.step([Chunk(0, 0, 1), Chunk(3, 0, 20), Chunk(5, 0, 4)])
    assert [sorted(a) for a in arrays] == [["embedding"], [], ["token_embeddings"]]
    batch = [Chunk(3, 20, 30)]
    output = sequences.pooler.pool(sequences.output(batch), sequences.metadata(batch), sequences.manager)
    with pytest.raises(KeyError, match="sequence 0 has no embedding; it has no results yet"):
        output.get_embedding(0)


# Prefix-cache hits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_skip", [False, True], ids=["", "skip"])
def test_last_pools_chunks_after_a_cached_prefix(with_skip: bool) -> None:
    info = make_info(sequence_pooling=(PoolingType.LAST,))
    params = [resolved(info, PoolingTask.EMBED, dimensions=d) for d in (None, 5, 3, None, 2, None)]
    skip = torch.tensor([0, 1, 6, 50, 5, 29], dtype=torch.int32) if with_skip else None
    sequences = Sequences(tensor_pooler(info, TinyModel()), params, skip)
    first = [Chunk(0, 0, 1), Chunk(2, 4, 7), Chunk(4, 3, 5), Chunk(3, 16, 40), Chunk(5, 20, 25)]
    run(sequences, [first, [Chunk(3, 48, 63), Chunk(1, 0, 2), Chunk(5, 25, 30)]])


@pytest.mark.parametrize(
    "types", [*((t,) for t in SEQUENCE_TYPES if t is not PoolingType.LAST), (PoolingType.LAST, PoolingType.MEAN)]
)
@pytest.mark.parametrize("end", [50, 63])
def test_other_types_reject_a_gap_before_a_chunk(types: tuple[PoolingType, ...], end: int) -> None:
    with pytest.raises(ValueError, match=rf"{'.'.join(types)} pooling needs every row, but a chunk starts at 16 and 0"):
        embedding_sequences(*types).step([Chunk(2, 0, 7), Chunk(3, 16, end)])


# Whole sequences beside chunks -----------------------------------------------------------------------------------


def test_whole_sequence_after_a_chunk_ignores_its_state() -> None:
    sequences = embedding_sequences()
    sequences.manager.start_sequence(3, 63)
    sequences.manager.process_chunk(3, torch.full((20, HIDDEN_SIZE), float("nan")))
    sequences.step([Chunk(3, 0, 63)])
    np.testing.assert_allclose(sequences.parts[3][0]["embedding"], sequences.whole()[3]["embedding"], atol=1e-6)


@pytest.mark.parametrize("types", [(PoolingType.ATTENTION,), (PoolingType.MEAN, PoolingType.ATTENTION)])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_whole_sequences_beside_a_later_chunk_take_their_own_weights(
    types: tuple[PoolingType, ...], place: int
) -> None:
    """The attention weights of a later chunk start with those of earlier tokens, which have no rows in the batch."""
    info = make_info(sequence_pooling=types)
    sequences = Sequences(tensor_pooler(info, TinyModel()), mixed_params(info))
    sequences.step([Chunk(3, 0, 20), Chunk(4, 0, 5)])
    whole = [Chunk(i, 0, LENGTHS[i]) for i in (1, 2, 5, 0)]
    run(sequences, [[*whole[:place], Chunk(3, 20, 63), *whole[place:]]])


# Errors ----------------------------------------------------------------------------------------------------------


def test_batch_that_is_not_committed_can_run_again() -> None:
    sequences = embedding_sequences(PoolingType.MEAN, PoolingType.ATTENTION)
    sequences.step([Chunk(3, 0, 20)])
    batch, sequence = [Chunk(3, 20, 63)], sequences.manager._running[3]
    for _ in range(2):
        metadata = sequences.metadata(batch)
        output = sequences.pooler.pool(sequences.output(batch), metadata, sequences.manager).get_embedding(0)
        np.testing.assert_allclose(output, sequences.whole()[3]["embedding"], atol=1e-5)
        assert sequences.manager._running[3] is sequence
        assert sequence.states is not None
        assert (sequence.cursor.num_pooled, sequence.states.num_tokens, len(sequence.states.rows)) == (20, 20, 1)


def test_model_that_pools_by_itself_takes_no_chunks() -> None:
    info = make_info(ModelKind.SEQUENCE_CLASSIFIER, sequence_pooling=(PoolingType.CLS,))
    metadata = make_metadata([9], [resolved(info, PoolingTask.CLASSIFY)], chunk_sizes=[4])
    output = ModelOutput(hidden_states=torch.zeros(4, HIDDEN_SIZE), logits=torch.zeros(1, 5))
    manager = ChunkedPoolingManager(HIDDEN_SIZE, strategy="cls")
    with pytest.raises(ValueError, match="a model that does not pool by itself"):
        tensor_pooler(info, TinyModel()).pool(output, metadata, manager)
    with pytest.raises(ValueError, match="chunks of sequences need a manager"):
        tensor_pooler(info, TinyModel()).pool(ModelOutput(hidden_states=output.hidden_states), metadata)


def test_attention_weights_must_cover_earlier_chunks() -> None:
    sequences = embedding_sequences(PoolingType.ATTENTION)
    sequences.step([Chunk(3, 0, 20)])
    batch = [Chunk(3, 20, 63)]
    for weights, message in ((None, "needs the attention weights"), (sequences.attention[:43], "have 43 rows for 63")):
        output = ModelOutput(hidden_states=sequences.output(batch).hidden_states, attention_weights=weights)
        with pytest.raises(ValueError, match=message):
            sequences.pooler.pool(output, sequences.metadata(batch), sequences.manager)
