"""Quality of trained models in bfloat16 and int8, compared with float32.

`--dtype auto` selects bfloat16 on CPUs that run it faster, so it may lose at most 0.0005 of SciFact's nDCG@10 and of
Banking77's accuracy. One query with its first two documents exchanged changes nDCG@10 by 0.0012. `--dtype int8` is
explicit and may lose more.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from compare_types import measure
from numpy.typing import NDArray

from penstock.engine.llm import LLM
from penstock.kernels.cpu import CpuKernelError, CpuLibrary, Format
from penstock.server.quality.tasks import ClassificationTask, RetrievalTask

NEEDS = {"bfloat16": Format.DOT, "int8": Format.INT8}
MAX_LOSS = {"bfloat16": 0.0005, "int8": 0.0025}
LEAST_COSINE = {"bfloat16": 0.9999, "int8": 0.985}

types = pytest.mark.parametrize("dtype", NEEDS)


@pytest.fixture(autouse=True)
def _has_the_format(request: pytest.FixtureRequest) -> None:
    """Skips a type without products on this machine."""
    try:
        with CpuLibrary(1) as library:
            if NEEDS[request.getfixturevalue("dtype")] not in library.formats:
                pytest.skip(f"{library.isa} has no products of this type")
    except CpuKernelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def vectors(
    model_folder: Callable[[str], Path], data_folder: Callable[[str], Path]
) -> Callable[[str], NDArray[np.float32]]:
    """Vectors of real texts in a type."""
    task = RetrievalTask.read(data_folder("scifact"))
    texts = [*list(task.corpus.values())[:24], *list(task.queries.values())[:40]]

    @cache
    def embed(dtype: str) -> NDArray[np.float32]:
        with LLM(str(model_folder("minilm")), dtype=dtype) as llm:
            outputs = llm.embed(texts, truncate_prompt_tokens=-1, use_tqdm=False)
            return np.stack([output.outputs.embedding for output in outputs])

    return embed


@types
def test_vectors_are_close_to_float32(dtype: str, vectors: Callable[[str], NDArray[np.float32]]) -> None:
    assert (vectors("float32") * vectors(dtype)).sum(1).min() > LEAST_COSINE[dtype]


@pytest.fixture(scope="module")
def quality(
    model_folder: Callable[[str], Path], data_folder: Callable[[str], Path]
) -> Callable[[str, int, str], tuple[float, float]]:
    """nDCG@10 and accuracy of a model in a type. It keeps one in `keep_each` of the documents without judgement."""
    banking = ClassificationTask.read(data_folder("banking77"))

    @cache
    def find(model: str, keep_each: int, dtype: str) -> tuple[float, float]:
        task = RetrievalTask.read(data_folder("scifact"))
        judged = set[str]().union(*task.judgements.values())
        kept = {name: text for i, (name, text) in enumerate(task.corpus.items()) if name in judged or not i % keep_each}
        found = measure(str(model_folder(model)), dtype, replace(task, corpus=kept), banking)
        return float(found["ndcg_at_10"]), float(found["accuracy"])

    return find


@pytest.mark.slow
@pytest.mark.timeout(1800)
@types
@pytest.mark.parametrize(("model", "keep_each", "published"), [("minilm", 1, 0.6451), ("gte-small", 8, None)])
def test_quality_loss_is_bounded(
    model: str, keep_each: int, published: float | None, dtype: str, quality: Callable[..., tuple[float, float]]
) -> None:
    exact, reduced = quality(model, keep_each, "float32"), quality(model, keep_each, dtype)
    print(f"\n{model}: nDCG@10 and accuracy in float32 {exact}, in {dtype} {reduced}")
    if published is not None:
        assert exact[0] == pytest.approx(published, abs=0.0001)
    assert exact[0] - reduced[0] <= MAX_LOSS[dtype]
    assert exact[1] - reduced[1] <= MAX_LOSS[dtype]
