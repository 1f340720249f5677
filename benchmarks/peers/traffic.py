"""The loads beside the four of loads.py: texts of real lengths, real texts, and sweeps over concurrency and length."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path

from loads import WORDS, Load

from .model import Model

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = (8, 16, 32, 64, 128, 200)
NUM_SHAREGPT_TEXTS = 2048
TOKENS_AROUND = 2
"""[CLS] and [SEP]."""


@dataclass(frozen=True, slots=True)
class CorpusLoad(Load):
    """A load that samples from given texts.

    Attributes:
        texts: The texts to sample.
        about: Description of the texts.
    """

    texts: tuple[str, ...] = field(repr=False, default=())
    about: str = ""

    def _text(self, rng: random.Random) -> str:
        return rng.choice(self.texts)


def describe(load: Load) -> str:
    """Returns the description of a load."""
    words = f"{load.min_words} to {load.max_words}" if load.min_words < load.max_words else str(load.min_words)
    kind = f"{load.about}, {words} words" if isinstance(load, CorpusLoad) else f"{words} words"
    return f"{kind}, {load.texts_per_request} a request, {load.concurrency} at once"


def corpus_loads(data: Path, model: Model) -> tuple[dict[str, Load], dict[str, str]]:
    """Returns the loads with a folder in `data`, and the reason for each missing load.

    Texts are within the model's limit, so that every side reads the same tokens.
    """
    found: dict[str, Load] = {}
    missing: dict[str, str] = {}
    for name, file, load in (
        ("sharegpt", data / "sharegpt-lengths" / "bert_tokens_per_human_turn.txt", sharegpt_load),
        ("scifact", data / "scifact" / "corpus.jsonl", scifact_load),
    ):
        if file.is_file():
            found[name] = load(file, model)
        else:
            missing[name] = f"{file.parent.name}/{file.name} is not in {data}; name its folder with --data"
    return found, missing


def sharegpt_load(lengths: Path, model: Model) -> Load:
    """Words at random, as many as people's turns in conversations have tokens: mostly short, a few very long."""
    rng = random.Random("sharegpt")
    drawn = rng.choices([int(line) for line in lengths.read_text().split()], k=NUM_SHAREGPT_TEXTS)
    words = [word for word, tokens in zip(WORDS, model.num_tokens(WORDS), strict=True) if tokens == 1 + TOKENS_AROUND]
    counts = [min(max(length, 1 + TOKENS_AROUND), model.max_tokens) - TOKENS_AROUND for length in drawn]
    texts = tuple(" ".join(rng.choices(words, k=count)) for count in counts)
    return CorpusLoad("sharegpt", min(counts), max(counts), 1, 16, texts, "lengths of ShareGPT's human turns")


def scifact_load(corpus: Path, model: Model) -> Load:
    """Titles and abstracts of SciFact, cut to the model's limit."""
    rows = [json.loads(line) for line in corpus.read_text("utf-8").splitlines()]
    texts = tuple(cut(f"{row['title']} {row['text']}".strip(), model) for row in rows)
    counts = [len(text.split()) for text in texts]
    return CorpusLoad("scifact", min(counts), max(counts), 32, 4, texts, "SciFact's abstracts")


def cut(text: str, model: Model) -> str:
    """Returns as much of a text as fits the model's limit."""
    encoding = model.tokenizer.encode(text)
    if len(encoding.ids) <= model.max_tokens:
        return text
    last = encoding.offsets[model.max_tokens - TOKENS_AROUND]
    return text[: last[1]]


def concurrency_loads() -> dict[str, Load]:
    """Queries of 5 to 15 words, one a request, with more and more requests under way."""
    return {str(number): Load(f"concurrency-{number}", 5, 15, 1, number) for number in CONCURRENCIES}


def length_loads() -> dict[str, Load]:
    """8 texts a request, 4 requests under way, with longer and longer texts."""
    return {str(words): Load(f"length-{words}", words, words, 8, 4) for words in LENGTHS}
