"""vLLM's dialect on a small language model with a chat template, compared with transformers."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What holds back the <water>?"}]
KEY = "key-of-this-server"


@pytest.fixture(scope="module")
def folder(random_model: Callable[..., Path]) -> Path:
    """A random Qwen3 of one layer."""
    folder = random_model("Qwen3Model", head_dim=8, num_key_value_heads=2, max_position_embeddings=256)
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


@pytest.fixture(scope="module")
def http(launch: Any, folder: Path) -> Any:
    flags = ("--operator-routes", "--api-key", KEY, "--chunk-size", "64")
    server = launch(str(folder), "--dtype", "float32", "--served-model-name", "chat", *flags)
    with httpx.Client(base_url=server.url, timeout=60, headers={"authorization": f"Bearer {KEY}"}) as client:
        yield client
    server.stop()


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoTokenizer.from_pretrained(folder)


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("flag", [None, "add_generation_prompt", "continue_final_message"])
def test_chat_is_rendered_as_by_transformers(http: httpx.Client, reference: Any, flag: str | None) -> None:
    flags = {flag: True} if flag else {}
    ids = reference.apply_chat_template(CHAT, return_dict=False, **flags)
    expected = post(http, "/v1/embeddings", input=ids)
    for path in ("/v1/embeddings", "/pooling"):
        answer = post(http, path, messages=CHAT, **flags)
        row = answer["data"][0]
        np.testing.assert_allclose(row.get("embedding") or row["data"], expected["data"][0]["embedding"], atol=1e-6)
        assert answer["usage"]["prompt_tokens"] == len(ids)
    tokens = post(http, "/tokenize", messages=CHAT, **{"add_generation_prompt": False, **flags}, return_token_strs=True)
    assert tokens["tokens"] == ids
    assert tokens["token_strs"] == reference.convert_ids_to_tokens(ids)
    assert (tokens["count"], tokens["max_model_len"]) == (len(ids), 256)
