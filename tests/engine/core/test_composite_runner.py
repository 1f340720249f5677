"""A batch for several models is divided among their runners, and its results are put together."""

from unittest.mock import Mock

import numpy as np

from penstock.engine.core.composite_runner import CompositeRunner
from penstock.engine.protocol.images import ImagePatches
from penstock.engine.protocol.messages import TokenizedInput
from penstock.engine.scheduling import InputSequence, PrefillChunk, Request

from .fake_runner import PARAMS, ROWS, TOKENIZER, FakeRunner, QueueRunner, model

IMAGES = (ImagePatches(np.zeros((1, 12), np.uint8), (1, 1)),)


def make_chunk(kind: str, number: int) -> PrefillChunk:
    """Returns a sequence of `number` tokens: a document, a query, an image, or a document with rows."""
    tokens = TokenizedInput(np.ones(number, np.int32), images=IMAGES if kind == "image" else ())
    params = ROWS if kind == "rows" else PARAMS.clone(is_query=kind == "query")
    sequence = InputSequence(sequence_id=number, tokens=tokens, num_tokens=number, request=Request(number, params))
    return PrefillChunk(sequence, 0, number)


def test_batch_is_divided_and_its_results_are_put_together() -> None:
    documents, queries, images = QueueRunner(), FakeRunner(), QueueRunner()
    documents.result = lambda sequence, total: np.nan if total == 4 else total
    composite = CompositeRunner(documents, queries=queries, images=images)
    kinds = ("rows", "query", "image", "document", "image", "query", "document")
    chunks = [make_chunk(kind, number) for number, kind in enumerate(kinds, 1)]
    forward = composite.begin(chunks)
    for runner, numbers in ((documents, [1, 4, 7]), (queries, [2, 6]), (images, [3, 5])):
        assert [request for batch in runner.batches for request, *_ in batch] == numbers
    for device in (documents, images):
        assert not forward.is_done
        device.end()
    assert forward.is_done  # queries end at once
    outputs = forward.outputs()
    assert outputs.is_finite.tolist() == [number != 4 for number in range(1, 8)]
    for number, arrays in enumerate(outputs.split(), 1):
        assert arrays.keys() == {"rows" if number == 1 else "embedding"}
        assert all(number == 4 or array.ravel().tolist() == [number] for array in arrays.values())
    assert composite.begin([make_chunk("document", 9)]) is documents.queue[0]  # one model runs the whole batch


def test_documents_decide_about_capacity_and_memory() -> None:
    documents, queries, images = (
        Mock(info=model(length), tokenizer=TOKENIZER, max_forwards=3, is_ordered=False) for length in (10, 11, 12)
    )
    for number, runner in enumerate((queries, images, documents)):
        runner.take_times.return_value = [number]
    composite = CompositeRunner(documents, queries=queries, images=images)
    info = composite.info
    assert (info.max_model_len, info.query_model, info.image) == (10, queries.info, images.info)
    assert composite.tokenizer.query_tokenizer is TOKENIZER
    assert (composite.max_forwards, composite.is_ordered, composite.take_times()) == (3, False, [0, 1, 2])
    documents.limits = "measured"
    composite.warm_up()
    assert composite.limits == "measured"
    assert [each.warm_up.call_count for each in (documents, queries, images)] == [1, 1, 1]
    for method, arguments in (("set_wakeup_fd", (7,)), ("preempt", ("s", "a")), ("drop_states", ("s",))):
        getattr(composite, method)(*arguments)
        getattr(documents, method).assert_called_once_with(*arguments)
    assert composite.free_tokens() is documents.free_tokens()
    for name in ("has_capacity", "sequence_pool"):
        assert getattr(composite, name) is getattr(documents, name)
    alone = CompositeRunner(documents)
    assert (alone.info.query_model, alone.info.image, alone.tokenizer.query_tokenizer) == (None, None, None)
