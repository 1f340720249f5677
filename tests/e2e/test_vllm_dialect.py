"""vLLM's dialect on a small language model with a chat template, compared with transformers."""

from __future__ import annotations

import re
import warnings
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
OTHER_KEY = "key-of-another-client"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of one layer. Its tokenizer adds an end token."""
    torch = pytest.importorskip("torch")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3Model

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    end = ("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {end[0]}", special_tokens=[end])
    folder = tmp_path_factory.mktemp("chat-model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=260,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=256,
        )
        Qwen3Model(config).save_pretrained(folder)
        Qwen2Tokenizer(
            tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML
        ).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert (folder / "chat_template.jinja").exists()
    return folder


@pytest.fixture(scope="module")
def http(launch: Any, folder: Path) -> Any:
    flags = ("--operator-routes", "--api-key", f"{KEY},{OTHER_KEY}", "--chunk-size", "64")
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


def test_special_tokens_are_added_to_texts_unless_rejected(http: httpx.Client, reference: Any) -> None:
    text = "<|im_start|>user"
    for adds in (None, True, False):
        ids = reference(text, add_special_tokens=adds is not False)["input_ids"]
        assert post(http, "/tokenize", prompt=text, add_special_tokens=adds)["tokens"] == ids
        expected = post(http, "/pooling", input=ids)["data"][0]["data"]
        answer = post(http, "/pooling", input=text, add_special_tokens=adds)
        np.testing.assert_allclose(answer["data"][0]["data"], expected, atol=1e-6)
        assert answer["usage"]["prompt_tokens"] == len(ids)
        assert post(http, "/detokenize", tokens=ids)["prompt"] == text + "<|endoftext|>" * (adds is not False)


def hit_tokens(http: httpx.Client) -> int:
    """Prompt tokens taken from the prefix cache so far."""
    text = http.get("/metrics").text
    (value,) = re.findall(r"^penstock_engine_prefix_hit_tokens_total\{.*\} ([0-9.e+]+)$", text, re.MULTILINE)
    return int(float(value))


def cached_tokens(http: httpx.Client, text: str) -> int:
    before = hit_tokens(http)
    post(http, "/v1/embeddings", input=text)
    return hit_tokens(http) - before


def test_api_keys_share_no_prefixes(http: httpx.Client) -> None:
    text = "A weir holds back the river. " * 8
    assert cached_tokens(http, text) == 0
    num_cached = cached_tokens(http, text)
    assert num_cached > 64
    with httpx.Client(base_url=http.base_url, timeout=60, headers={"authorization": f"Bearer {OTHER_KEY}"}) as other:
        assert cached_tokens(other, text) == 0
        assert cached_tokens(other, text) == num_cached
