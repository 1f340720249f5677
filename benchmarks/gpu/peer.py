"""sentence-transformers in bfloat16 with SDPA, in its best batch size, beside the engine on the same texts.

Both tokenize and embed texts with the lengths of user messages in ShareGPT. sentence-transformers gets all texts at
once and sorts them by length, which is its fastest case.
"""

from __future__ import annotations

import importlib.util
import random
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from loads import WORDS

from .engine import config_of, rate_row, sharegpt, started
from .made_models import model_folder
from .phases import Bench, Row, attempt
from .shapes import SHAPES, TINY_SHAPES, Shape

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

_BATCH_SIZES: Final = (128, 64, 256, 32, 512)
_TOKENS_AROUND: Final = 2


def measure(bench: Bench) -> Iterator[Row]:
    """Yields the rate of each batch size, and of the engine, for each shape."""
    if importlib.util.find_spec("sentence_transformers") is None:
        yield {"name": "sentence-transformers", "skipped": "needs sentence-transformers"}
        return
    for shape in bench.pick(SHAPES, TINY_SHAPES):
        lengths = sharegpt(shape, bench)
        texts = texts_of(lengths)
        row: Row = {"name": "penstock", "shape": shape.name}
        yield attempt(row, partial(penstock_rate, shape, texts, lengths, bench))
        model = load(shape, bench)
        for batch_size in bench.pick(_BATCH_SIZES, (4,)):
            row = {"name": "sentence-transformers", "shape": shape.name, "batch_size": batch_size}
            yield attempt(row, partial(peer_rate, model, shape, texts, batch_size, bench))
        del model
        if bench.is_cuda:
            torch.cuda.empty_cache()


def texts_of(lengths: list[int]) -> list[str]:
    """Returns texts that have so many tokens, those around them included."""
    numbers = random.Random("peer")
    return [" ".join(numbers.choices(WORDS, k=max(length - _TOKENS_AROUND, 1))) for length in lengths]


def penstock_rate(shape: Shape, texts: list[str], lengths: list[int], bench: Bench) -> Row:
    """Returns the rate of the engine in a process of its own, its tokenizer in this one."""
    with started(config_of(shape, bench)) as engine:
        return rate_row(shape, lengths, engine.ask(texts, bench.pick(3.0, 0.1), bench))


def load(shape: Shape, bench: Bench) -> SentenceTransformer:
    """Loads the model as its documents advise for speed."""
    from sentence_transformers import SentenceTransformer

    options: dict[str, Any] = {"dtype": bench.dtype, "attn_implementation": "sdpa"}
    return SentenceTransformer(str(model_folder(shape, bench)), device=bench.device.type, model_kwargs=options)


def peer_rate(model: SentenceTransformer, shape: Shape, texts: list[str], batch_size: int, bench: Bench) -> Row:
    """Returns the rate of its `encode`, which ends with the rows on the host; the better of two runs."""
    model.encode(texts[:batch_size], batch_size=batch_size, show_progress_bar=False)
    seconds = []
    for _ in range(2):
        began_s = time.perf_counter()
        rows = model.encode(texts, batch_size=batch_size, show_progress_bar=False)
        seconds.append(time.perf_counter() - began_s)
        if rows.shape != (len(texts), shape.width):
            raise RuntimeError(f"it gave {rows.shape}")
        if seconds[0] > bench.pick(6.0, 1.0):
            break  # too slow to be the best
    return {"texts_per_s": len(texts) / min(seconds)}
