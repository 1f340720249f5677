"""Random LoRA adapters in the files of peft, and models of transformers with merged adapters."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from penstock.engine.model_files.adapters import PeftConfig


def save_adapter(folder: Path, model: nn.Module, pattern: str, seed: int = 0, **config: Any) -> nn.Module:
    """Saves an adapter of the modules that match `pattern`, and returns a copy of the model with merged weights.

    The formula is that of peft: W + scale B A, with B A transposed for embeddings.
    """
    folder.mkdir(parents=True)
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "bias": "none", "target_modules": pattern} | config
    (folder / "adapter_config.json").write_text(json.dumps(values))
    options, numbers = PeftConfig.read(folder), torch.Generator().manual_seed(seed)
    merged, tensors = copy.deepcopy(model), {}
    for name, module in merged.named_modules():
        if not isinstance(module, nn.Linear | nn.Embedding) or not re.fullmatch(pattern, name):
            continue
        rank, is_table = options.rank(name), isinstance(module, nn.Embedding)
        rows, columns = module.weight.shape[::-1] if is_table else module.weight.shape
        down = torch.randn(rank, columns, generator=numbers) / columns**0.5
        up = torch.randn(rows, rank, generator=numbers) * 0.3
        start = f"base_model.model.{name}.lora_"
        names = ("embedding_A", "embedding_B") if is_table else ("A.weight", "B.weight")
        tensors |= dict(zip((start + end for end in names), (down, up), strict=True))
        added = up @ down * options.scale(name)
        module.weight.data += added.T if is_table else added
    save_file(tensors, folder / "adapter_model.safetensors")
    return merged
