"""Reads the LoRA adapters of a model: folders of the peft library, and the stacked weights of jina-embeddings-v3.

An adapter adds scale * B A to the weight of some maps (Hu et al., arXiv 2106.09685). The scale is alpha / r, or
alpha / sqrt(r) with `use_rslora` (Kalajdzievski, arXiv 2312.03732). Both executors add the terms to the products of the
rows that select the adapter. The base weights are shared.

Shape letters: D input width, N output width, R rank, V vocabulary, E embedding width, C adapters of a checkpoint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from penstock.kernels.cpu import ADAPTED_LINEARS, AdapterWeights, LowRankWeights

from ..checkpoint.files import Checkpoint, check_file, quoted_names
from ..checkpoint.views import ArrayFile, ArrayWeights, Floats, as_floats
from ..families.spec import LayerSpec, LinearSpec, ModelSpec
from ..model_files.adapters import PeftConfig
from ..protocol.errors import ModelLoadError, UnsupportedModelError, WeightError
from ..protocol.model_info import AdapterSpec, ModelInfo, ModelKind

_WEIGHT_FILE: Final = "adapter_model.safetensors"
_TENSOR: Final = re.compile(r"(base_model\.model\.(.+)\.lora_)(?:embedding_[AB]|[AB]\.weight)")
_STACKED: Final = "parametrizations.weight.0.lora_"
_WITHOUT_EFFECT: Final = re.compile(r"(?:.*\.)?(?:pooler\.dense|lm_head)")
"""Maps that an embedding model does not run."""
_MAX_NAMED: Final = 3


def read_adapters(info: ModelInfo, spec: ModelSpec, weights: ArrayWeights) -> tuple[AdapterWeights, ...]:
    """Reads the adapters that requests may select, in the order of `info.served_adapters`.

    Args:
        info: The resolved model.
        spec: Spec of the model, with the names of the family.
        weights: View of the whole checkpoint.

    Raises:
        ModelLoadError: The adapter is not for this model, is incomplete, or has an option that penstock does not
            support. The message names the adapter.
    """
    adapters = []
    for adapter in info.served_adapters:
        try:
            if adapter.folder is None:
                adapters.append(_read_stacked(info, spec.with_stored_names(weights.has), weights, adapter))
            else:
                adapters.append(_read_folder(info, spec, Path(adapter.folder)))
        except ModelLoadError as error:
            raise type(error)(f"The LoRA adapter {adapter.name!r} cannot be served: {error.message}") from error
    return tuple(adapters)


class _Map(NamedTuple):
    """A map that an adapter may change, or a part of one.

    Attributes:
        layer: Index of the layer.
        name: Name in ADAPTED_LINEARS.
        linear: The whole map.
        first_row: First row of the part.
        num_rows: Number of rows of the part.
    """

    layer: int
    name: str
    linear: LinearSpec
    first_row: int
    num_rows: int


class _Table(NamedTuple):
    num_rows: int
    is_words: bool


@dataclass(slots=True)
class _Terms:
    spec: ModelSpec
    parts: dict[tuple[int, str], list[tuple[_Map, Floats, Floats]]] = field(default_factory=dict)
    tables: list[tuple[Floats, Floats]] = field(default_factory=list)

    def add(self, part: _Map, down_RD: Floats, up_NR: Floats) -> None:
        self.parts.setdefault((part.layer, part.name), []).append((part, down_RD, up_NR))

    def add_table(self, table: _Table, down_RV: Floats, up_ER: Floats) -> None:
        """Adds the term of an embedding table. The only row of token types is added to every word."""
        embedding = self.spec.embedding
        if table.is_words:
            factor = embedding.scale * (math.sqrt(embedding.size) if embedding.is_scaled else 1.0)
            self.tables.append((down_RV, up_ER * np.float32(factor)))
        else:
            self.tables.append((np.ones((1, embedding.vocab_size), np.float32), up_ER @ down_RV))

    def joined(self) -> AdapterWeights:
        layers: list[dict[str, LowRankWeights]] = [{} for _ in self.spec.layers]
        for (layer, name), parts in self.parts.items():
            layers[layer][name] = _joined(parts)
        if not self.tables:
            return AdapterWeights(layers)
        downs, ups = zip(*self.tables, strict=True)
        return AdapterWeights(layers, LowRankWeights(np.concatenate(downs), np.concatenate(ups, axis=1)))


def _joined(parts: Sequence[tuple[_Map, Floats, Floats]]) -> LowRankWeights:
    """Joins the terms of the parts of a map, such as q, k and v: A on top of each other, B as blocks."""
    linear = parts[0][0].linear
    down_RD = np.concatenate([down for _, down, _ in parts])
    up_NR = np.zeros((linear.out_features, len(down_RD)), np.float32)
    column = 0
    for part, down, up in parts:
        up_NR[part.first_row : part.first_row + part.num_rows, column : column + len(down)] = up
        column += len(down)
    return LowRankWeights(down_RD, np.roll(up_NR, linear.out_features // 2, 0) if linear.is_gate_below else up_NR)


# ---- folders of peft -------------------------------------------------------------------------------------------------


def _read_folder(info: ModelInfo, spec: ModelSpec, folder: Path) -> AdapterWeights:
    config = PeftConfig.read(folder)
    file = folder / _WEIGHT_FILE
    if not file.is_file():
        raise WeightError(f"{folder} has no {_WEIGHT_FILE}; save the adapter again in safetensors.")
    check_file(file)
    names = dict.fromkeys(ArrayFile(file).keys(), file)
    view = ArrayWeights(Checkpoint(names, ArrayFile))
    modules = _modules(names, info)
    terms = _Terms(spec)
    known = max(_namings(spec), key=lambda naming: len(naming.keys() & modules.keys()))
    if unknown := sorted(modules.keys() - known.keys()):
        raise UnsupportedModelError(
            f"{file} has weights of {quoted_names(unknown, _MAX_NAMED)}, which {info.architecture} does not have or "
            f"penstock cannot adapt; it can adapt {quoted_names(list(known), _MAX_NAMED)}. Serve the model that the "
            "adapter was trained with."
        )
    missing = sorted(
        module
        for module, part in known.items()
        if isinstance(part, _Map) and module not in modules and config.targets(module, part.layer)
    )
    if missing or not modules:
        what = f"of {quoted_names(missing, _MAX_NAMED)}, which target_modules names" if missing else "of any map"
        raise WeightError(f"{file} has no weights {what}; save the adapter again.")
    for module, prefix in modules.items():
        part = known[module]
        rank = config.rank(module)
        scale = np.float32(config.scale(module))
        if isinstance(part, _Table):
            down_RV = view.floats(f"{prefix}embedding_A", rank, part.num_rows)
            terms.add_table(part, down_RV, view.floats(f"{prefix}embedding_B", spec.embedding.size, rank) * scale)
        else:
            down_RD = view.floats(f"{prefix}A.weight", rank, part.linear.in_features)
            terms.add(part, down_RD, view.floats(f"{prefix}B.weight", part.num_rows, rank) * scale)
    return terms.joined()


def _modules(names: Iterable[str], info: ModelInfo) -> dict[str, str]:
    """Returns the adapted modules of a file with the beginnings of their tensor names."""
    modules, unknown = {}, []
    for name in names:
        match = _TENSOR.fullmatch(name)
        if match is None:
            unknown.append(name)
        elif info.kind is not ModelKind.EMBEDDING or not _WITHOUT_EFFECT.fullmatch(match[2]):
            modules[match[2]] = match[1]
    if unknown:
        raise UnsupportedModelError(
            f"its file has the tensors {quoted_names(sorted(unknown), _MAX_NAMED)}, which are no LoRA weights."
        )
    return modules


def _namings(spec: ModelSpec) -> Iterator[dict[str, _Map | _Table]]:
    """Yields the maps and tables that an adapter may change, by their names in its file.

    The names differ between versions of a family, and by their prefix between models with and without a head.
    """
    for names in filter(None, (spec, spec.other_names)):
        embedding = names.embedding
        for prefix in names.prefixes:
            start = f"{prefix}." if prefix else ""
            known: dict[str, _Map | _Table] = {}
            for index, layer in enumerate(names.layers):
                for part_name, part in _parts(index, layer):
                    known[f"{start}{layer.prefix}.{part_name}"] = part
            known[start + _module(embedding.word_embeddings)] = _Table(embedding.vocab_size, is_words=True)
            if embedding.token_types is not None and embedding.num_token_types == 1:
                known[start + _module(embedding.token_types)] = _Table(1, is_words=False)
            yield known


def _parts(index: int, layer: LayerSpec) -> Iterator[tuple[str, _Map]]:
    for name in ADAPTED_LINEARS:
        linear: LinearSpec | None = getattr(layer, name)
        if linear is not None:
            first_rows = accumulate(linear.rows, initial=0)
            for part, num_rows, first_row in zip(linear.names, linear.rows, first_rows, strict=False):
                yield part, _Map(index, name, linear, first_row, num_rows)


def _module(table: str) -> str:
    return table.removesuffix(".weight")


# ---- stacked weights of jina-embeddings-v3 ---------------------------------------------------------------------------


def _read_stacked(info: ModelInfo, spec: ModelSpec, weights: ArrayWeights, adapter: AdapterSpec) -> AdapterWeights:
    """Reads an adapter of a checkpoint with torch's parametrizations: A [C, R, D], B [C, N, R] of each map.

    The tensors of an embedding table are A [C, V, R] and B [C, R, E].
    """
    rank, alpha = info.config.get("lora_rank", 4), info.config.get("lora_alpha", 1)
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float):
        raise ModelLoadError(f"config.json: lora_rank is {rank!r} and lora_alpha is {alpha!r}; they must be numbers.")
    scale = np.float32(alpha / rank)
    index = adapter.index
    terms = _Terms(spec)
    count = sum(other.index is not None for other in info.adapters)
    base = weights.scope_of(spec.embedding.word_embeddings, spec.prefixes)

    def read(view: ArrayWeights, name: str, *shape: int) -> Floats:
        stacked = view.stored(name, (count, *shape))
        view.check_finite(name, stacked)
        return as_floats(stacked[index])

    for number, layer in enumerate(spec.layers):
        for name, part in _parts(number, layer):
            view = base.scope(layer.prefix).scope(name)
            down_RD = read(view, f"{_STACKED}A", rank, part.linear.in_features)
            terms.add(part, down_RD, read(view, f"{_STACKED}B", part.num_rows, rank) * scale)
    embedding = spec.embedding
    tables = [(embedding.word_embeddings, _Table(embedding.vocab_size, is_words=True))]
    if embedding.token_types is not None:
        tables.append((embedding.token_types, _Table(embedding.num_token_types, is_words=False)))
    for table_name, table in tables:
        view = base.scope(_module(table_name))
        if not view.has(f"{_STACKED}A"):
            continue
        if not table.is_words and table.num_rows > 1:
            raise UnsupportedModelError(
                f"it adapts {table_name} with {table.num_rows} rows; penstock supports one row."
            )
        down_RV = read(view, f"{_STACKED}A", table.num_rows, rank).T
        terms.add_table(table, down_RV, read(view, f"{_STACKED}B", rank, embedding.size).T * scale)
    return terms.joined()
