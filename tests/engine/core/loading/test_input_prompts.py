"""The prompts around texts and images follow the model's chat template or the files of its processor."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from penstock.engine.core.loading.input_prompts import input_prompts
from penstock.engine.protocol.errors import UnsupportedModelError
from penstock.engine.protocol.images import ImageResize, ImageSpec
from penstock.engine.protocol.model_info import PairChat
from penstock.engine.protocol.templates import ChatTemplate, TileTokens

from ....random_models import QWEN3_VL_TEMPLATE
from ....tables import table
from ...model_infos import make_info

SPEC = ImageSpec(
    patch_size=4, resize=ImageResize.AREA, size=(8, 8), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), max_patches=9
)
CHAT = PairChat(is_structured=True)


def tokenizer(*tokens: str) -> Tokenizer:
    backend = Tokenizer(WordLevel({"[UNK]": 0}, "[UNK]"))
    backend.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    return backend


def test_instruction_becomes_a_system_message_with_braces_kept() -> None:
    info = make_info(model_type="qwen3_vl", image_spec=SPEC, input_chat=CHAT, config={"image_token_id": 1})
    template = ChatTemplate(source="{{ '{a}' }}" + QWEN3_VL_TEMPLATE)
    prompts = input_prompts(info, tokenizer("<|image_pad|>"), template, {})
    assert prompts is not None
    assert prompts.text is prompts.image
    assert prompts.text.beginning("") == "{a}<|im_start|>user\n"
    assert prompts.text.beginning("{b}") == "{a}<|im_start|>system\n{b}<|im_end|>\n<|im_start|>user\n"
    assert prompts.text.after == "<|im_end|>\n"
    assert input_prompts(make_info(), tokenizer(), template, {}) is None


@pytest.mark.parametrize(
    ("source", "token_id", "message"),
    [
        *table(__file__, "test_model_without_a_usable_template_or_token_is_rejected"),
        (QWEN3_VL_TEMPLATE, 7, "image_token_id in config.json is 7"),
    ],
)
def test_model_without_a_usable_template_or_token_is_rejected(source: str | None, token_id: int, message: str) -> None:
    info = make_info(model_type="qwen3_vl", image_spec=SPEC, input_chat=CHAT, config={"image_token_id": token_id})
    template = None if source is None else ChatTemplate(source=source)
    with pytest.raises(UnsupportedModelError, match=message):
        input_prompts(info, tokenizer("<|image_pad|>"), template, {})


def test_tokens_of_images_are_found_by_the_ids_in_the_config() -> None:
    config = {"boi_token_id": 1, "image_token_id": 2, "eoi_token_id": 3}
    words = tokenizer("<begin>", "<image>", "<end>")
    info = make_info(model_type="embedding_gemma2", image_spec=SPEC, config=config)
    prompts = input_prompts(info, words, None, {})
    assert prompts is not None
    assert (prompts.image_text, prompts.placeholder, prompts.placeholder_id) == ("<begin><image><end>", "<image>", 2)
    assert (prompts.text.beginning("query: "), prompts.image.beginning("query: ")) == ("query: ", "")
    info = make_info(model_type="embedding_gemma2", image_spec=SPEC, config=config | {"eoi_token_id": 9})
    with pytest.raises(UnsupportedModelError, match="is 9, which is no token"):
        input_prompts(info, words, None, {})


def test_prefixes_of_pages_and_queries_come_from_the_processor(tmp_path: Path) -> None:
    info = make_info(model_type="colpali", image_spec=SPEC, path=str(tmp_path))
    words, special_tokens = tokenizer("<image>"), {"pad_token": "<pad>", "bos_token": "<bos>"}
    prompts = input_prompts(info, words, None, special_tokens)
    assert prompts is not None
    assert (prompts.text.before, prompts.text.after) == ("<bos>Question: ", "<pad>" * 10 + "\n")
    assert (prompts.image.before, prompts.image.after) == ("", "<bos>Describe the image.\n")
    assert (prompts.mixes, prompts.adds_special_tokens) == (False, False)
    settings = {"query_prefix": "Q: ", "visual_prompt_prefix": "Page."}
    (tmp_path / "processor_config.json").write_text(json.dumps(settings))
    own = input_prompts(info, words, None, special_tokens)
    assert own is not None
    assert (own.text.before, own.image.after) == ("<bos>Q: ", "<bos>Page.\n")
    with pytest.raises(UnsupportedModelError, match="has no pad_token"):
        input_prompts(info, words, None, {})


def test_tokens_between_tiles_name_rows_and_columns() -> None:
    tiles = TileTokens(
        num_rows=2, before=(1,), full_image=(2,), tags=(((3,), (4,)), ((5,), (6,))), row_end=(7,), end=(8,)
    )
    assert tiles.image_ids((0, 0), 9) == [1, 2, 9, 9, 1]
    assert tiles.image_ids((2, 1), 9) == [1, 3, 9, 9, 7, 1, 5, 9, 9, 8, 1, 2, 9, 9, 1]
