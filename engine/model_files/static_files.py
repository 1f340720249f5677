"""Makes the config of static embeddings from the header of their weights: sizes, and the names of the tensors.

sentence-transformers saves a StaticEmbedding without a config.json. model2vec saves one without sizes; its folder may
also have a modules.json for sentence-transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from ..families.static import MODEL2VEC, SPARSE_STATIC, STATIC
from ..protocol.errors import ModelLoadError, UnsupportedModelError
from ..protocol.tasks import PoolingType
from .model_folder import read_object, safetensors_header
from .sentence_transformers_files import SentenceTransformersFiles

_WEIGHTS: Final = "model.safetensors"


def read_model2vec_modules(root: Path) -> SentenceTransformersFiles | None:
    """Returns the modules of a folder that model2vec saved without modules.json; None for other folders."""
    if read_object(root / "config.json").get("model_type") != MODEL2VEC:
        return None
    return SentenceTransformersFiles(pooling=(PoolingType.MEAN,), pooling_source="config.json", static_kind=STATIC)


def read_static_config(folder: Path, kind: str) -> dict[str, Any]:
    """Returns the config of a static embedding: model_type, sizes and `static_table`.

    A table with the name that model2vec gives it is a model of model2vec: it ignores unknown tokens.

    Args:
        folder: Folder of the weights.
        kind: STATIC, or SPARSE_STATIC for one weight per token.

    Raises:
        UnsupportedModelError: The weights are not in model.safetensors.
        ModelLoadError: The file is damaged, or a tensor is missing or has a wrong shape.
    """
    path = folder / _WEIGHTS
    try:
        header = json.loads(safetensors_header(path))
        shapes = {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    except FileNotFoundError:
        raise UnsupportedModelError(
            f"{folder} has no {_WEIGHTS}; penstock reads a static embedding from no other file. Load the model with "
            "sentence-transformers and save it with safe_serialization=True."
        ) from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelLoadError(f"{path} cannot be read; download the model again ({error}).") from error
    names = ("weight",) if kind == SPARSE_STATIC else ("embedding.weight", "embeddings")
    name = next((name for name in names if name in shapes), None)
    if name is None or len(shapes[name]) != (1 if kind == SPARSE_STATIC else 2):
        raise ModelLoadError(f"{path} has the tensors {shapes}; it needs {' or '.join(names)} for every token.")
    is_model2vec = name == "embeddings"
    num_tokens = next((shapes[n][0] for n in ("mapping", "weights") if is_model2vec and n in shapes), shapes[name][0])
    config = read_object(folder / "config.json") if is_model2vec else {}
    return {
        **config,
        "model_type": MODEL2VEC if is_model2vec else kind,
        "architectures": ["StaticModel" if is_model2vec else f"{'Sparse' * (kind == SPARSE_STATIC)}StaticEmbedding"],
        "hidden_size": (*shapes[name], 1)[1],
        "vocab_size": num_tokens,
        "static_table": {
            "name": name,
            "shape": list(shapes[name]),
            "has_mapping": is_model2vec and "mapping" in shapes,
            "has_weights": is_model2vec and "weights" in shapes,
        },
    }
