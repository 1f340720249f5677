"""maxsim equals its reference on every backend."""

import pytest
import torch
from torch import Tensor

from penstock.kernels.maxsim import maxsim

from ..tables import table
from .assertions import assert_close
from .parameters import TARGETS, Target, every_pair, tupled
from .references import maxsim_reference

TOLERANCE = 2e-6


def make(lengths: tuple[int, ...], width: int, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(sum(lengths), width, generator=generator)
    return torch.nn.functional.normalize(rows, dim=1).to(dtype).to(device)


# Rows of the queries and of the documents, and the query of each document.
BATCHES = tupled(table(__file__, "batches_of_maxsim"))


@every_pair(target=TARGETS, batch=list(BATCHES), width=[1, 72], dtype=[torch.float32, torch.bfloat16])
def test_backend_equals_reference(target: Target, batch: str, width: int, dtype: torch.dtype) -> None:
    backend, device = target
    query_lens, document_lens, query_of = BATCHES[batch]
    queries = make(query_lens, width, dtype, device)
    documents = make(document_lens, width, dtype, device, seed=1)
    lengths = {"query_lens": query_lens, "document_lens": document_lens, "query_of": query_of}
    expected = maxsim_reference(queries, documents, **lengths)
    actual = maxsim(queries, documents, **lengths, backend=backend)
    assert actual.dtype == torch.float32
    assert_close("maxsim", expected, actual, TOLERANCE, scale=1.0)
    for n, query in enumerate(query_of):
        assert not actual[n, query_lens[query] :].any()
        assert document_lens[n] or not actual[n].any()


def test_strided_rows_with_negative_maxima(target: Target) -> None:
    backend, device = target
    both = make((20,), 96, torch.float32, device).abs()
    queries, documents = both[:4, :48], -both[4:, 48:]
    lengths = {"query_lens": (4,), "document_lens": (9, 7), "query_of": (0, 0)}
    expected = torch.stack([(documents[a:b] @ queries.t()).amax(0) for a, b in ((0, 9), (9, 16))])
    assert expected.max() < 0
    assert_close("maxsim", expected, maxsim(queries, documents, **lengths, backend=backend), TOLERANCE, scale=1.0)


def test_nan_stays_with_its_document(target: Target) -> None:
    backend, device = target
    queries, documents = (make((n,), 40, torch.float32, device) for n in (3, 150))
    documents[70] = float("nan")
    lengths = {"query_lens": (3,), "document_lens": (70, 70, 10), "query_of": (0, 0, 0)}
    out = maxsim(queries, documents, **lengths, backend=backend)
    assert out.isnan().tolist() == [[False] * 3, [True] * 3, [False] * 3]


def test_blocks_of_torch_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, documents = (make((n,), 24, torch.float32, torch.device("cpu")) for n in (5, 61))
    lengths = {"query_lens": (5,), "document_lens": (9, 0, 30, 2, 20), "query_of": (0,) * 5}
    expected = maxsim_reference(queries, documents, **lengths)
    for limit in (1, 60, 5 * 32):
        monkeypatch.setattr("penstock.kernels.maxsim.MAX_SIMILARITIES", limit)
        assert_close("maxsim", expected, maxsim(queries, documents, **lengths, backend="torch"), TOLERANCE)


def test_no_documents_or_queries_give_no_scores() -> None:
    rows = make((4,), 8, torch.float32, torch.device("cpu"))
    assert maxsim(rows, rows[:0], query_lens=(4,), document_lens=(), query_of=()).shape == (0, 4)
    assert maxsim(rows[:0], rows, query_lens=(0,), document_lens=(4,), query_of=(0,)).shape == (1, 0)
