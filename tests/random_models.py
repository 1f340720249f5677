"""Tiny models of transformers with random weights."""

import importlib
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

SIZES = {
    "vocab_size": 30_522,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
TOWER_SIZES = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
TWO_TOWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "CLIP": ("clip", {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}),
    "Siglip": ("siglip", {"size": {"height": 28, "width": 28}}),
    "Siglip2": ("siglip2", {"patch_size": 14, "max_num_patches": 9}),
}
"""Model names of transformers to packages and options of the image processor."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json")


def save_random_model(folder: Path, class_name: str, tokenizer: Path, **config: Any) -> Path:
    """Save a random model of a class of transformers with the tokenizer of another model."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model_class = getattr(transformers, class_name)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model_class(model_class.config_class(**SIZES | config)).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copy(tokenizer / name, folder)
    return folder


def save_two_tower_model(folder: Path, kind: str, tokenizer: Path) -> tuple[Any, Any]:
    """Save a random model for texts and images with the tokenizer of another model.

    Args:
        kind: A key of TWO_TOWERS.

    Returns:
        The model and the image processor.
    """
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    package, options = TWO_TOWERS[kind]
    text = TOWER_SIZES | {"vocab_size": 30_600, "eos_token_id": 102}
    vision = TOWER_SIZES | ({"num_patches": 4} if kind == "Siglip2" else {"image_size": 28}) | {"patch_size": 14}
    extra = {"projection_dim": 40} if kind == "CLIP" else {}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision, **extra)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    module = importlib.import_module(f"transformers.models.{package}.image_processing_pil_{package}")
    processor = getattr(module, f"{kind}ImageProcessorPil")(**options)
    for part in (model, processor, transformers.AutoTokenizer.from_pretrained(tokenizer, model_max_length=64)):
        part.save_pretrained(folder)
    return model, processor


QWEN3_VL_TEMPLATE = Path(__file__).with_name("qwen3_vl_template.jinja").read_text()
VISION_LANGUAGE_CASES = ("qwen3vl", "embeddinggemma2", "colqwen2", "colpali", "colmodernvbert")
"""Families that are compared with transformers, without underscores."""
QWEN_TOKENS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def save_qwen3_vl_model(folder: Path, tokenizer: Path) -> tuple[Any, Any]:
    """Save a random Qwen3-VL model with the tokenizer of another model, to which its special tokens are added.

    Returns:
        The model, and a function of a prompt and its images that returns the arguments of transformers' processor.
    """
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    words = transformers.AutoTokenizer.from_pretrained(tokenizer, model_max_length=512)
    words.add_special_tokens({"additional_special_tokens": list(QWEN_TOKENS)})
    words.chat_template = QWEN3_VL_TEMPLATE
    ids = dict(zip(QWEN_TOKENS, words.convert_tokens_to_ids(list(QWEN_TOKENS)), strict=True))
    text = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 30_600, "max_position_embeddings": 512}
    text |= {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1e4}}
    vision = {"hidden_size": 32, "intermediate_size": 48, "depth": 3, "num_heads": 4, "patch_size": 4}
    vision |= {"out_hidden_size": 48, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 36}
    config = transformers.Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3VLForConditionalGeneration(config).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.2 if parameter.dim() > 1 else 0.1, mean=float("norm.weight" in name))
    processor = Qwen2VLImageProcessorPil(
        patch_size=4, size={"shortest_edge": 256, "longest_edge": 2048}, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    for part in (model, processor, words):
        part.save_pretrained(folder)

    def arguments(prompt: str, images: list[Any], **options: Any) -> dict[str, Any]:
        pixels = processor(images, return_tensors="pt") if images else {}
        for rows in pixels["image_grid_thw"].prod(1).tolist() if images else ():
            prompt = prompt.replace("<|image_pad|>", "<pad>" * (rows // 4), 1)
        options |= {"return_tensors": "pt", "return_token_type_ids": False}
        encoded = words(prompt.replace("<pad>", "<|image_pad|>"), **options)
        return {**encoded, **pixels, "mm_token_type_ids": (encoded.input_ids == config.image_token_id).int()}

    return model, arguments


PAGE_MODELS = ("ColQwen2", "ColQwen2.5", "ColPali", "ColModernVBert")


def save_page_model(folder: Path, kind: str, tokenizer: Path) -> tuple[Any, Any]:
    """Save a random model with one vector per token for pages, with the tokenizer of another model.

    Args:
        kind: Of PAGE_MODELS.

    Returns:
        The model and its processor.
    """
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    words = transformers.AutoTokenizer.from_pretrained(tokenizer, model_max_length=512)
    added = [*QWEN_TOKENS, "<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]
    added += [f"<row_{row + 1}_col_{column + 1}>" for row in range(6) for column in range(6)]
    words.add_special_tokens({"additional_special_tokens": added, "bos_token": "<bos>"})
    text = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"vocab_size": 31_000, "max_position_embeddings": 512, "pad_token_id": 0}
    if kind == "ColPali":
        words.backend_tokenizer.post_processor = None  # its processor adds no special tokens
    image_id = words.convert_tokens_to_ids("<|image_pad|>" if "Qwen" in kind else "<image>")
    colours = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    if "Qwen" in kind:
        name = "Qwen2_5_VL" if kind == "ColQwen2.5" else "Qwen2VL"
        vision = {"depth": 2, "num_heads": 4, "patch_size": 4, "intermediate_size": 40}
        vision |= {"hidden_size": 32, "out_hidden_size": 48, "window_size": 16, "fullatt_block_indexes": [1]}
        if kind == "ColQwen2":
            vision = {"depth": 2, "num_heads": 4, "patch_size": 4, "embed_dim": 32, "hidden_size": 48, "mlp_ratio": 2}
        text |= {"num_key_value_heads": 2}
        text |= {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 1e4}}
        options = {"patch_size": 4, "size": {"shortest_edge": 256, "longest_edge": 2048}, **colours}
        package, own = "qwen2_vl", {}
    elif kind == "ColPali":
        name = "PaliGemma"
        vision = TOWER_SIZES | {
            "image_size": 28,
            "patch_size": 14,
            "projection_dim": 48,
            "model_type": "siglip_vision_model",
        }
        vision["vision_use_head"] = False
        text |= {"num_key_value_heads": 2, "head_dim": 12, "model_type": "gemma"}
        options = {"size": {"height": 28, "width": 28}, **colours}
        package, own = "siglip", {"projection_dim": 48}
    else:
        name = "ModernVBert"
        vision = TOWER_SIZES | {"image_size": 28, "patch_size": 7, "model_type": "siglip_vision_model"}
        text |= {"model_type": "modernbert", "local_attention": 16}
        options = {"size": {"longest_edge": 84}, "max_image_size": {"longest_edge": 28}, **colours}
        package, own = "idefics3", {"pixel_shuffle_factor": 2}
    vlm = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision, image_token_id=image_id, **own)
    kind = "ColQwen2" if "Qwen" in kind else kind
    config = getattr(transformers, f"{kind}Config")(vlm_config=vlm, embedding_dim=24)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForRetrieval")(config).eval()
    for parameter_name, parameter in model.named_parameters():
        is_norm = "norm" in parameter_name and parameter_name.endswith("weight") and kind != "ColPali"
        torch.nn.init.normal_(parameter, std=0.2 if parameter.dim() > 1 else 0.1, mean=float(is_norm))
    module = importlib.import_module(f"transformers.models.{package}.image_processing_pil_{package}")
    prefix = {"qwen2_vl": "Qwen2VL", "siglip": "Siglip", "idefics3": "Idefics3"}[package]
    images = getattr(module, f"{prefix}ImageProcessorPil")(**options)
    if kind == "ColPali":
        images.image_seq_length = 4
    rows = {"image_seq_len": 4} if kind == "ColModernVBert" else {}
    processor = getattr(transformers, f"{kind}Processor")(image_processor=images, tokenizer=words, **rows)
    for part in (model, images, words):
        part.save_pretrained(folder)
    return model, processor


GEMMA_IMAGE = ("<|image>", "<|image|>", "<image|>")


def save_embedding_gemma2_model(folder: Path, tokenizer: Path) -> tuple[Any, Any]:
    """Save a random EmbeddingGemma 2 without audio, with the tokenizer of another model.

    Returns:
        The model, and a function of a prompt with "[image]" for each image, and of the images, which returns the
        arguments of transformers' processor.
    """
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    words = transformers.AutoTokenizer.from_pretrained(tokenizer, model_max_length=512)
    words.add_special_tokens({"additional_special_tokens": [*GEMMA_IMAGE, "<|video|>", "<|audio|>"]})
    ids = words.convert_tokens_to_ids([*GEMMA_IMAGE, "<|video|>", "<|audio|>"])
    names = ("boi_token_id", "image_token_id", "eoi_token_id", "video_token_id", "audio_token_id")
    text = {"vocab_size": 31_000, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16}
    text |= {"max_position_embeddings": 512, "sliding_window": 8, "sliding_window_pattern": 3}
    text |= {"hidden_size_per_layer_input": 8, "embedding_dim": 24}
    vision = {"model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "patch_size": 4}
    vision |= {"pooling_kernel_size": 2, "position_embedding_size": 256}
    config = transformers.EmbeddingGemma2Config(
        text_config=text, vision_config=vision, audio_config=None, **dict(zip(names, ids, strict=True))
    )
    torch.manual_seed(0)
    model = transformers.EmbeddingGemma2Model(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    processor = Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
    for part in (model, words, processor):
        part.save_pretrained(folder)

    def arguments(prompt: str, images: list[Any]) -> dict[str, Any]:
        pixels: dict[str, Any] = dict(processor(images=images, return_tensors="pt")) if images else {}
        before, image, after = GEMMA_IMAGE
        for number in pixels.pop("num_soft_tokens_per_image", ()):
            prompt = prompt.replace("[image]", before + image * int(number) + after, 1)
        return {"input_ids": words(prompt, return_tensors="pt").input_ids, **pixels}

    return model, arguments
