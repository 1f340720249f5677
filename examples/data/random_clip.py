"""Writes a small CLIP with random weights, for image_search.py.

python examples/data/random_clip.py random-clip all-MiniLM-L6-v2   # local folders; the tokenizer is that of the second
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

WIDTH, FEATURES, VOCABULARY = 256, 128, 30_522
LINEAR = (*(f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")), "mlp.fc1", "mlp.fc2")
LAYERS = ("text_model.encoder.layers.0", "vision_model.encoder.layers.0")
SHAPES = {
    "text_model.embeddings.token_embedding": (VOCABULARY, WIDTH),
    "text_model.embeddings.position_embedding": (77, WIDTH),
    "text_projection": (FEATURES, WIDTH),
    "vision_model.embeddings.patch_embedding": (WIDTH, 3, 32, 32),
    "vision_model.embeddings.position_embedding": (50, WIDTH),
    "visual_projection": (FEATURES, WIDTH),
    **{f"{layer}.{name}": (WIDTH, WIDTH) for layer in LAYERS for name in LINEAR},
}
NORMS = (
    *("text_model.final_layer_norm", "vision_model.pre_layrnorm", "vision_model.post_layernorm"),
    *(f"{layer}.layer_norm{number}" for layer in LAYERS for number in (1, 2)),
)
BIASES = (*NORMS, *(f"{layer}.{name}" for layer in LAYERS for name in LINEAR))
SIZES = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_attention_heads": 4, "num_hidden_layers": 1}


def build(folder: Path, tokenizer_folder: Path) -> None:
    """Writes the model with the tokenizer of a BERT model."""
    rng = np.random.default_rng(0)
    weights = {f"{name}.weight": rng.normal(0, np.prod(shape[1:]) ** -0.5, shape) for name, shape in SHAPES.items()}
    weights |= {f"{name}.weight": np.ones(WIDTH) for name in NORMS} | {
        f"{name}.bias": np.zeros(WIDTH) for name in BIASES
    }
    weights["vision_model.embeddings.class_embedding"] = np.zeros(WIDTH)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: values.astype(np.float32) for name, values in weights.items()}, folder / "model.safetensors")
    text = {**SIZES, "vocab_size": VOCABULARY, "eos_token_id": 102}
    config = {"model_type": "clip", "projection_dim": FEATURES, "text_config": text, "vision_config": SIZES}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "CLIPImageProcessor"}')
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_folder / name, folder)


if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(sys.argv[2]))
