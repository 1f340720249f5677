"""Language-model rerankers give the scores of their publishers' code on transformers."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

from penstock.engine.async_engine import RequestOptions
from penstock.engine.protocol.errors import InvalidRequestError
from penstock.engine.protocol.model_info import ModelKind
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.tasks import PoolingType

from ...tables import table
from ..engines import running

QUERY = "What holds back the water?"
DOCUMENTS = [
    "A dam, said {query} or so.",
    "",
    " naïve café — 東京 🚀\n\nlast line ",
    "ends <|im_end|> early",
    "word and " * 60,
]
INSTRUCTION = "Find the sentence about water."
RAW = PoolingParams(use_activation=False)
SMALL = table(__file__, "sizes_of_decoders")
PROMPTS: dict[str, str] = json.loads(Path(__file__).with_name("published_prompts.json").read_text())
"""Prompts in the code of the publishers."""
CHAT = (
    PROMPTS["qwen3_before"]
    + "<Instruct>: {{ messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first "
    "| default('Given {a} search') }}\n<Query>: {{ (messages | selectattr('role', 'eq', 'query') | first).content }}\n"
    "<Document>: {{ (messages | selectattr('role', 'eq', 'document') | first).content }}" + PROMPTS["qwen3_after"]
)

Ids = Callable[[Any, str, str, str | None, int | None], list[int]]


def qwen3_ids(tokenizer: Any, query: str, document: str, instruction: str | None, limit: int | None) -> list[int]:
    before, after = (
        tokenizer.encode(text, add_special_tokens=False) for text in (PROMPTS["qwen3_before"], PROMPTS["qwen3_after"])
    )
    text = f"<Instruct>: {instruction or PROMPTS['qwen3_task']}\n<Query>: {query}\n<Document>: {document}"
    ids = tokenizer.encode(text, add_special_tokens=False)
    return before + ids[: limit - len(before) - len(after) if limit else None] + after


def mxbai_ids(tokenizer: Any, query: str, document: str, instruction: str | None, limit: int | None) -> list[int]:
    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    before, separator, task = encode(PROMPTS["mxbai_before"]), encode("\n"), encode(PROMPTS["mxbai_task"])
    after = encode("<|im_end|>\n<|im_start|>assistant\n")
    given = f"instruction: {instruction}\nquery: {query}" if instruction else f"query: {query}"
    pair = encode(given) + separator + encode(f"document: {document}")
    fixed = len(before) + len(separator) + len(task) + len(after)
    return before + pair[: limit - fixed if limit else None] + separator + task + after


def gemma_ids(tokenizer: Any, query: str, document: str, instruction: str | None, limit: int | None) -> list[int]:
    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    separator, task = encode("\n"), encode(instruction or PROMPTS["gemma_task"])
    pair = [tokenizer.bos_token_id, *encode(f"A: {query}"), *separator, *encode(f"B: {document}")]
    return pair[: limit - len(separator) - len(task) if limit else None] + separator + task


@dataclass
class Published:
    """A checkpoint in the form of its publisher, and the publisher's ids and logits."""

    folder: Path
    ids: Ids
    answers: tuple[str, ...]

    @cached_property
    def tokenizer(self) -> Any:
        return transformers.AutoTokenizer.from_pretrained(self.folder)

    @cached_property
    def model(self) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()

    def logits(self, documents: list[str], instruction: str | None, limit: int | None) -> np.ndarray:
        """The next-token logits of the answers, one row a document."""
        columns = [self.tokenizer.convert_tokens_to_ids(answer) for answer in self.answers]
        rows = []
        for document in documents:
            ids = self.ids(self.tokenizer, QUERY, document, instruction, limit)
            rows.append(self.model(torch.tensor([ids])).logits[0, -1, columns])
        return torch.stack(rows).numpy()


Publish = Callable[[str], Published]


@pytest.fixture(scope="module", autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def small_tokenizer() -> Any:
    """A byte-level tokenizer, trained on the prompts."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<pad>", "<bos>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        [PROMPTS["qwen3_before"], PROMPTS["mxbai_task"], PROMPTS["gemma_task"], *DOCUMENTS] * 4, trainer
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", pad_token="<pad>", model_max_length=640
    )


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Saves a transformers model with random weights, and a tokenizer, in a folder of the given name."""

    def save(name: str, class_name: str, tokenizer: Any, **config: object) -> Path:
        folder = tmp_path_factory.mktemp("models") / name
        torch.manual_seed(5)
        model_class = getattr(transformers, class_name)
        options = SMALL | {"vocab_size": len(tokenizer) + 3} | config
        model_class(model_class.config_class(**options)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="module")
def published(save: Callable[..., Path], small_tokenizer: Any) -> Publish:
    """Makes the published checkpoint of a name."""

    def publish(name: str) -> Published:
        if name == "qwen3":
            folder = save("Qwen3-Reranker-0.6B", "Qwen3ForCausalLM", small_tokenizer, tie_word_embeddings=True)
            return Published(folder, qwen3_ids, ("no", "yes"))
        if name == "mxbai":
            folder = save("mxbai-rerank-base-v2", "Qwen2ForCausalLM", small_tokenizer, tie_word_embeddings=False)
            return Published(folder, mxbai_ids, ("0", "1"))
        if name == "gemma":
            return Published(save("bge-reranker-v2-gemma", "GemmaForCausalLM", small_tokenizer), gemma_ids, ("Yes",))
        # transformers runs Helium, because penstock has no family for it.
        return Published(save("helium", "HeliumForCausalLM", small_tokenizer), gemma_ids, ("Yes",))

    return cache(publish)


@pytest.mark.parametrize("name", ["qwen3", "mxbai", "gemma"])
async def test_published_checkpoint_scores_as_its_publisher(name: str, published: Publish) -> None:
    model = published(name)
    room = len(model.ids(model.tokenizer, QUERY, "", INSTRUCTION, None))
    async with running(model.folder) as engine:
        assert engine.info.kind is ModelKind.CROSS_ENCODER
        assert engine.info.sequence_pooling == (PoolingType.LAST,)
        assert engine.info.labels == model.answers[-1:]
        for limit, instruction in ((None, None), (None, INSTRUCTION), (room + 25, None), (room + 40, INSTRUCTION)):
            expected = model.logits(DOCUMENTS, instruction, limit)
            options = RequestOptions(instruction=instruction)
            cut = PoolingParams(truncate_prompt_tokens=limit)
            raw = await engine.score([QUERY], DOCUMENTS, cut.clone(use_activation=False), options)
            scored = await engine.score([QUERY], DOCUMENTS, cut, options)
            assert max(raw.num_tokens) == limit or limit is None
            if len(model.answers) == 2:
                assert np.abs(raw.scores - (expected[:, 1] - expected[:, 0])).max() < 1e-4
                softmax = np.exp(expected[:, 1]) / np.exp(expected).sum(axis=1)
                assert np.abs(scored.scores - softmax).max() < 1e-4
            else:
                assert np.abs(raw.scores - expected[:, 0]).max() < 1e-4
                assert np.abs(scored.scores - 1 / (1 + np.exp(-expected[:, 0]))).max() < 1e-4
        assert np.ptp(scored.scores) > 1e-3  # the document and the query reach the model


async def test_overrides_make_a_reranker_of_any_language_model(published: Publish) -> None:
    helium = published("helium")
    overrides = {
        "architectures": ["HeliumForSequenceClassification"],
        "classifier_from_token": ["Yes"],
        "method": "no_post_processing",
        "score_template": {"parts": ["<bos>", "A: {query}", "\n", "B: {document}", "\n", PROMPTS["gemma_task"]]},
    }
    async with running(helium.folder, hf_overrides=overrides) as engine:
        assert not engine.info.packed
        result = await engine.score([QUERY], DOCUMENTS, RAW)
        assert np.abs(result.scores - helium.logits(DOCUMENTS, None, None)[:, 0]).max() < 1e-4
        with pytest.raises(InvalidRequestError, match="does not accept an instruction"):
            await engine.score([QUERY], DOCUMENTS, PoolingParams(), RequestOptions(instruction=INSTRUCTION))
    async with running(helium.folder) as engine:
        assert engine.info.kind is ModelKind.EMBEDDING


@pytest.mark.parametrize("prompt", [None, "Find {it}."])
async def test_chat_template_reranker_equals_sentence_transformers(
    prompt: str | None, save: Callable[..., Path], small_tokenizer: Any, tmp_path: Path
) -> None:
    from sentence_transformers import CrossEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore

    base = save("base", "Qwen3ForCausalLM", small_tokenizer, tie_word_embeddings=True)
    module = Transformer(str(base), transformer_task="text-generation", processor_kwargs={"chat_template": CHAT})
    head = LogitScore(true_token_id=300, false_token_id=None if prompt else 301)
    prompts = {"prompts": {"task": prompt}, "default_prompt_name": "task"} if prompt else {}
    reference = CrossEncoder(modules=[module, head], device="cpu", **prompts)
    reference.save_pretrained(str(tmp_path))
    documents = [document for document in DOCUMENTS if "im_end" not in document]
    async with running(tmp_path) as engine:
        assert engine.info.kind is ModelKind.CROSS_ENCODER
        for instruction in (None, INSTRUCTION):
            options = RequestOptions(instruction=instruction)
            result = await engine.score([QUERY], documents, PoolingParams(), options)
            expected = reference.predict([(QUERY, document) for document in documents], prompt=instruction)
            assert np.abs(result.scores - expected).max() < 1e-4
        reference.max_seq_length = 120
        cut = await engine.score([QUERY], ["word and " * 60], PoolingParams(truncate_prompt_tokens=120))
        assert np.abs(cut.scores - reference.predict([(QUERY, "word and " * 60)])).max() < 1e-4
