"""Reads the config of one sentence-transformers module, as every version of the library has written it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from ..protocol.errors import ModelLoadError, UnsupportedModelError
from ..protocol.model_info import DenseSpec, PairChat
from ..protocol.tasks import PoolingType
from .json_files import read_object
from .sentence_transformers_files import LogitScoreFile, SentenceTransformersFiles

_TRANSFORMER_FILES: Final = tuple(
    f"sentence_{model}_config.json"
    for model in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# In the order in which sentence-transformers concatenates them.
_LEGACY_POOLING_KEYS: Final = {
    "pooling_mode_cls_token": PoolingType.CLS,
    "pooling_mode_max_tokens": PoolingType.MAX,
    "pooling_mode_mean_tokens": PoolingType.MEAN,
    "pooling_mode_mean_sqrt_len_tokens": PoolingType.MEAN_SQRT_LEN,
    "pooling_mode_weightedmean_tokens": PoolingType.WEIGHTED_MEAN,
    "pooling_mode_lasttoken": PoolingType.LAST,
}
_POOLING_MODES: Final = {
    "cls": PoolingType.CLS,
    "max": PoolingType.MAX,
    "mean": PoolingType.MEAN,
    "mean_sqrt_len_tokens": PoolingType.MEAN_SQRT_LEN,
    "weightedmean": PoolingType.WEIGHTED_MEAN,
    "lasttoken": PoolingType.LAST,
}


def read_transformer(root: Path, folder: str, files: SentenceTransformersFiles) -> None:
    """Fills in what the config of the Transformer module says.

    Args:
        root: Of the model.
        folder: Of the module, inside it.
        files: What is filled in.

    Raises:
        ModelLoadError: The config cannot be read.
    """
    files.transformer_folder = folder
    for name in _TRANSFORMER_FILES:
        config = read_object(root / folder / name)
        if config:
            tokenizer = config.get("processor_kwargs") or config.get("tokenizer_args") or {}
            files.transformer_source = str(Path(folder) / name)
            files.max_seq_length = config.get("max_seq_length")
            files.tokenizer_max_length = tokenizer.get("model_max_length")
            files.do_lower_case = bool(config.get("do_lower_case", False))
            files.pair_chat = _pair_chat(config)
            return


def read_logit_score(root: Path, folder: str) -> LogitScoreFile:
    """Returns what the config of a LogitScore module says.

    Raises:
        ModelLoadError: The config cannot be read, or has no ids.
    """
    path = root / folder / "config.json"
    config = read_object(path)
    ids = config.get("true_token_id"), config.get("false_token_id")
    if type(ids[0]) is not int or not (ids[1] is None or type(ids[1]) is int):
        raise ModelLoadError(f"{path} has true_token_id {ids[0]!r} and false_token_id {ids[1]!r}; they must be ids.")
    return LogitScoreFile(true_token_id=ids[0], false_token_id=ids[1], source=str(Path(folder) / "config.json"))


def read_pooling(root: Path, folder: str, files: SentenceTransformersFiles) -> None:
    """Fills in what the config of the Pooling module says; see `read_transformer`.

    Raises:
        UnsupportedModelError: It asks for a pooling mode that penstock does not know.
        ModelLoadError: It cannot be read.
    """
    config = read_object(root / folder / "config.json")
    files.pooling_source = str(Path(folder) / "config.json")
    files.include_prompt = bool(config.get("include_prompt", True))
    modes = config.get("pooling_mode")
    if modes is None:
        on = tuple(pooling for key, pooling in _LEGACY_POOLING_KEYS.items() if config.get(key, False))
        files.pooling = on or (PoolingType.MEAN,)
        return
    modes = [modes] if isinstance(modes, str) else list(modes)
    for mode in modes:
        if mode not in _POOLING_MODES:
            raise UnsupportedModelError(
                f"{root / files.pooling_source} asks for the pooling mode {mode!r}; "
                f"penstock knows {', '.join(_POOLING_MODES)}."
            )
    files.pooling = tuple(_POOLING_MODES[mode] for mode in modes)


def read_dense(root: Path, folder: str, type_name: str, transformer_folder: str) -> DenseSpec:
    """Returns what the config of one Dense module says; its weights are the loader's.

    Args:
        root: Of the model.
        folder: Of the module, inside it.
        type_name: Class path of the module.
        transformer_folder: Of the Transformer module, which the folder of the result is relative to.

    Raises:
        UnsupportedModelError: It asks for what penstock has no code for.
        ModelLoadError: It cannot be read, or lacks a width.
    """
    path = root / folder / "config.json"
    config = read_object(path)
    for key in ("in_features", "out_features"):
        if type(config.get(key)) is not int or config[key] < 1:
            raise ModelLoadError(f"{path} has {key} {config.get(key)!r}; it must be a positive integer.")
    if config.get("use_residual", False):
        raise UnsupportedModelError(f"{path} asks for use_residual, which penstock has no code for.")
    if config.get("module_output_name") == "scores":
        raise UnsupportedModelError(
            f"{path} writes scores: a cross-encoder head of modules, which penstock has no code for."
        )
    activation = config.get(
        "activation_function", "torch.nn.Identity" if type_name.startswith("pylate.") else "torch.nn.Tanh"
    )
    if not activation.startswith("torch.nn."):
        raise UnsupportedModelError(
            f"{path} asks for the activation {activation!r}; penstock takes those of torch.nn only."
        )
    up = "../" * len(Path(transformer_folder).parts)
    return DenseSpec(
        folder=up + folder,
        in_features=config["in_features"],
        out_features=config["out_features"],
        bias=bool(config.get("bias", True)),
        activation=activation.rsplit(".", 1)[-1],
    )


def _pair_chat(config: dict[str, Any]) -> PairChat | None:
    """Returns how the Transformer module puts pairs through a chat template; None where it does not."""
    chat = (config.get("modality_config") or {}).get("message")
    if chat is None:
        return None
    arguments = dict((config.get("processing_kwargs") or {}).get("chat_template") or {})
    for own in ("restore_suffix", "padding", "truncation", "max_length", "return_tensors"):
        arguments.pop(own, None)
    return PairChat(is_structured=chat.get("format") == "structured", arguments=arguments)
