"""Finds out how a model makes sparse vectors, and which heads for single tokens lie beside its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from ..protocol.errors import UnsupportedModelError
from ..protocol.model_info import ModelKind
from ..protocol.tasks import PoolingTask
from ..protocol.vectors import SparseKind, SparsePooling, TokenHeads
from .draft import ModelDraft
from .json_files import read_object
from .sentence_transformers_files import MODULES_FILE, SETTINGS_FILE

# As bge-m3 is published, beside the weights of its encoder.
_WEIGHTS_FILE: Final = "sparse_linear.pt"
_VECTORS_FILE: Final = "colbert_linear.pt"


def resolve_sparse(draft: ModelDraft, root: Path) -> None:
    """Fills in `sparse` and `token_heads`, and the tasks that they add.

    Args:
        draft: Resolved but for these.
        root: Folder of the model.

    Raises:
        UnsupportedModelError: penstock has no code for a setting.
    """
    draft.set("sparse", None, "default")
    draft.set("token_heads", None, "default")
    files = draft.files
    if draft.fields["kind"] is not ModelKind.EMBEDDING:
        return
    if files is not None and files.splade_folder is not None:
        _resolve_splade(draft, root / files.splade_folder / "config.json", read_object(root / SETTINGS_FILE))
        return
    folder = Path(draft.fields["path"])
    found = [name if (folder / name).is_file() else None for name in (_WEIGHTS_FILE, _VECTORS_FILE)]
    if not any(found) or not draft.fields["sequence_pooling"] or draft.fields["dense"] or draft.fields["is_causal"]:
        return
    source = next(name for name in found if name)
    draft.set("token_heads", TokenHeads(weights_file=found[0], vectors_file=found[1]), source)
    if found[0]:
        draft.set("sparse", SparsePooling(kind=SparseKind.TOKEN_WEIGHTS), _WEIGHTS_FILE)
        draft.set("tasks", (*draft.fields["tasks"], PoolingTask.SPARSE_EMBED), f"{draft.sources['tasks']}, {source}")


def _resolve_splade(draft: ModelDraft, path: Path, settings: dict[str, Any]) -> None:
    """Fills in what the config of a SpladePooling module says."""
    config = read_object(path)
    pooling, activation = config.get("pooling_strategy", "max"), config.get("activation_function", "relu")
    if pooling not in ("max", "sum") or activation not in ("relu", "log1p_relu"):
        raise UnsupportedModelError(
            f"{path} has pooling_strategy {pooling!r} and activation_function {activation!r}; penstock knows 'max' and "
            "'sum', 'relu' and 'log1p_relu'."
        )
    similarity = settings.get("similarity_fn_name") or "dot"
    if similarity not in ("dot", "cosine"):
        raise UnsupportedModelError(f"{path.parent.parent / SETTINGS_FILE} has similarity_fn_name {similarity!r}.")
    if not draft.fields["native"] or draft.fields["is_causal"]:
        raise UnsupportedModelError(
            f"{draft.name} makes sparse vectors with a masked language model of the family "
            f"{draft.fields['model_type']!r}, for which penstock has no code."
        )
    recipe = SparsePooling(
        kind=SparseKind.VOCABULARY_LOGITS,
        is_sum=pooling == "sum",
        log_twice=activation == "log1p_relu",
        is_cosine=similarity == "cosine",
    )
    draft.set("sparse", recipe, str(path.relative_to(path.parent.parent)))
    draft.set("tasks", (PoolingTask.SPARSE_EMBED, PoolingTask.SCORE), f"{MODULES_FILE}: SpladePooling")
    draft.set("embedding_size", draft.fields["vocab_size"], draft.sources["vocab_size"])
