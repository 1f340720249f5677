"""The example of docs/long-inputs.md: a decoder of transformers, run chunk by chunk."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaModel

DOCUMENT = Path(__file__).parents[3] / "docs" / "long-inputs.md"


@pytest.mark.parametrize("chunk_size", [16, 30, 512])
def test_documented_example_equals_one_forward(chunk_size: int) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(example, str(DOCUMENT), "exec"), names)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaModel(LlamaConfig(vocab_size=120, max_position_embeddings=256, **sizes)).eval()
    prompts = {name: torch.randint(0, 120, (length,)).tolist() for name, length in (("a", 100), ("b", 7), ("c", 41))}
    vectors = names["embed"](model, prompts, chunk_size)
    assert sorted(vectors) == sorted(prompts)
    for name, ids in prompts.items():
        with torch.inference_mode():
            rows = model(torch.tensor([ids])).last_hidden_state[0]
        torch.testing.assert_close(vectors[name], rows.mean(0), atol=1e-5, rtol=1e-5)
