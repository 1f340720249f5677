"""Requests to a CUDA device, with a tiny random model."""

import string
import warnings
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
TEXTS = ["a", "the gate holds back the water", "one two three " * 20, "dam", *(f"text {i} " * i for i in range(1, 9))]
# float32 on CUDA sums in another order; bfloat16 has eight bits of precision.
LEAST_COSINE = {"float32": 0.999999, "bfloat16": 0.999, "float16": 0.9999}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT with random weights and a tokenizer of letters."""
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("letters")
    letters = [*string.ascii_lowercase, *string.digits]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    transformers.BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256}
    transformers.BertModel(transformers.BertConfig(vocab_size=len(vocabulary), **sizes)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> np.ndarray:
    """Mean-pooled unit vectors of transformers, float32 on the CPU, one text at a time."""
    import torch
    import transformers

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = transformers.AutoModel.from_pretrained(folder).eval()
        rows = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0).numpy() for text in TEXTS]
    return np.stack([row / np.linalg.norm(row) for row in rows])


@pytest.mark.parametrize("dtype", LEAST_COSINE)
def test_embeddings_equal_transformers(launch, folder: Path, expected: np.ndarray, dtype: str) -> None:
    server = launch(str(folder), "--device", "cuda", "--dtype", dtype)
    answer = server.embed(TEXTS)
    assert answer.status_code == 200, answer.text
    vectors = np.array([row["embedding"] for row in answer.json()["data"]], np.float32)
    assert np.sum(vectors * expected, axis=1).min() > LEAST_COSINE[dtype]
    for i in (0, 2, 11):
        alone = server.embed(TEXTS[i]).json()["data"][0]["embedding"]
        assert np.dot(np.array(alone, np.float32), vectors[i]) > LEAST_COSINE[dtype]
    server.stop()


@pytest.mark.large
def test_batch_without_memory_runs_in_parts(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    import torch

    from penstock.engine.llm import LLM
    from penstock.engine.protocol.config import SchedulerConfig

    ids = [[5 + (i + t) % 26 for t in range(1 + i % 300)] for i in range(240)]  # 31,620 tokens
    limits = SchedulerConfig(max_num_batched_tokens=65_536, max_num_seqs=4096)
    settings = {"device": "cuda", "dtype": "float32", "in_process": True}
    with LLM(str(folder), scheduler=limits, **settings) as llm:
        expected = [output.outputs.embedding for output in llm.embed(ids, use_tqdm=False)]
        assert "out of memory" not in caplog.text
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (64 << 20)) / total)
        try:
            found = [output.outputs.embedding for output in llm.embed(ids, use_tqdm=False)]
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        again = [output.outputs.embedding for output in llm.embed(ids, use_tqdm=False)]
    assert "out of memory" in caplog.text
    assert "the budget is now" in caplog.text
    for rows in (found, again):
        assert np.abs(np.stack(rows) - np.stack(expected)).max() < 1e-5
