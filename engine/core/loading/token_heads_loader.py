"""Reads the heads for single tokens that lie in files of their own beside a model's weights (bge-m3)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ...checkpoint.files import Checkpoint
from ...executors.torch.layers.linear import Linear
from ...executors.torch.layers.weights import Weights
from ...families.spec import linear
from ...pooling import TokenMaps
from ...protocol.model_info import ModelInfo, TokenizerSpec
from .weights_loader import open_tensors


def load_token_maps(info: ModelInfo, tokenizer: TokenizerSpec) -> TokenMaps[Tensor]:
    """Returns the heads for single tokens, float32, and the tokens that have no part in answers for tokens.

    Raises:
        WeightError: A file cannot be read, or a tensor is missing or has the wrong shape.
    """
    recipe_tokens, heads = tokenizer.recipe_tokens, info.token_heads
    if heads is None:
        return TokenMaps(skip_ids=recipe_tokens.skip_ids)
    return TokenMaps(
        vectors=_load(info, heads.vectors_file, info.hidden_size),
        weights=_load(info, heads.weights_file, 1),
        unweighted_ids=recipe_tokens.unweighted_ids,
    )


def _load(info: ModelInfo, file: str | None, out_features: int) -> Linear | None:
    if file is None:
        return None
    checkpoint = Checkpoint(dict.fromkeys(("weight", "bias"), Path(info.path) / file), open_tensors)
    with torch.no_grad():
        weights = Weights(checkpoint, torch.float32, torch.device(info.device))
        maps = Linear.load(weights, linear("", info.hidden_size, out_features), is_head=True)
    checkpoint.close()
    return maps
