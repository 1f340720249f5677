"""Saved random models of transformers, their packed batches, and runs in chunks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from penstock.engine.core.loading import weights_loader
from penstock.engine.executors.torch.base import PackedModel
from penstock.engine.executors.torch.packed_batch import BatchCache, KvCache, PackedBatch, SsmStates
from penstock.engine.model_files.resolve import resolve_model, with_device
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.model_info import ModelInfo
from penstock.engine.protocol.request import TokenizedInput
from penstock.kernels.cpu import Format, Machine

from .array_model import ArrayModel, load_model
from .families import ENCODER_SIZES

LENGTHS = (1, 2, 7, 63, 130)

Save = Callable[..., tuple[Path, transformers.PreTrainedModel]]
Load = Callable[..., PackedModel]


@pytest.fixture(autouse=True)
def _quick_torch() -> Iterator[None]:
    """Disables gradients and uses one thread, because more threads slow tiny models down."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def save_model(tmp_path: Path) -> Save:
    """Builds a transformers class with random weights, saves it and returns (folder, model in eval mode)."""
    numbers = itertools.count()

    def save(class_name: str, save_options: dict[str, object] | None = None, **config: object):
        torch.manual_seed(0)
        model_class = getattr(transformers, class_name)
        model = model_class(model_class.config_class(**config)).eval()
        for name, parameter in model.named_parameters():
            # transformers starts biases at 0 and norms at 1, which would hide their absence.
            noise = torch.randn_like(parameter)
            parameter.copy_(parameter + 0.3 * noise if parameter.dim() == 1 or "position" in name else 4 * parameter)
        folder = tmp_path / f"{class_name}-{next(numbers)}"
        model.save_pretrained(folder, **(save_options or {}))
        return folder, model

    return save


@pytest.fixture
def save_config(tmp_path: Path) -> Callable[..., Path]:
    """Saves the config of a transformers class without weights."""

    def save(class_name: str, **config: object) -> Path:
        config_class = getattr(transformers, class_name).config_class
        config_class(**config, architectures=[class_name]).save_pretrained(tmp_path)
        return tmp_path

    return save


@pytest.fixture
def save_recurrent(save_model: Save) -> Save:
    """As `save_model`, with smaller weights: recurrences neither forget within a token nor explode."""

    def save(class_name: str, **config: object):
        folder, model = save_model(class_name, **config)
        matrix_scale = 1.0 if "num_attention_heads" in config else 1 / 3
        for name, parameter in model.named_parameters():
            if name.endswith(("A_log", "dt_bias", "dt_proj.bias")):
                parameter.sub_(2)
            elif parameter.dim() > 1:
                parameter.mul_(matrix_scale)
        model.save_pretrained(folder)
        return folder, model

    return save


@pytest.fixture
def load(executor: str, request: pytest.FixtureRequest) -> Load:
    """Loads a model on the executor of the test's parameter, `torch` or `cpu`."""
    if executor == "torch":
        return weights_loader.load_model
    machine: Machine = request.getfixturevalue("three_lane_machine")

    def load_on_cpu(info: ModelInfo, **options: object) -> PackedModel:
        model = load_model(info, machine=machine, **options)
        assert isinstance(model, ArrayModel)
        return model

    return load_on_cpu


@pytest.fixture(scope="session")
def load_on_torch() -> Load:
    return weights_loader.load_model


@pytest.fixture
def needs_formats(three_lane_machine: Machine) -> Callable[[str, str | None], None]:
    """Skips the test if the processor lacks products in this dtype or arithmetic."""

    def check(dtype: str, arithmetic: str | None) -> None:
        needed = {Format.INT8} if dtype == "int8" else set()
        if arithmetic == "bfloat16":
            needed.add(Format.DOT)
        if not needed <= three_lane_machine.formats:
            pytest.skip(f"this processor has no products in {needed - three_lane_machine.formats}")

    return check


@pytest.fixture(scope="session")
def resolve() -> Callable[..., ModelInfo]:
    """Resolves a folder for the CPU."""

    def resolve_folder(folder: Path, dtype: str = "float32", **config: object) -> ModelInfo:
        return with_device(resolve_model(EngineConfig(model=str(folder), **config)), "cpu", dtype)

    return resolve_folder


@pytest.fixture(scope="session")
def pack() -> Callable[..., PackedBatch]:
    """Packs token ids; `boundaries` has the first token of type 1 of each sequence, 0 for none."""

    def pack_tokens(
        sequences: Sequence[Sequence[int]], boundaries: Sequence[int] | None = None, device: str = "cpu"
    ) -> PackedBatch:
        boundaries = boundaries or [0] * len(sequences)
        inputs = [TokenizedInput(np.asarray(s, np.int32), b) for s, b in zip(sequences, boundaries, strict=True)]
        return PackedBatch.build(inputs, torch.device(device))

    return pack_tokens


@pytest.fixture
def sequences() -> list[list[int]]:
    """Token ids of odd lengths."""
    numbers = np.random.default_rng(0)
    return [numbers.integers(3, ENCODER_SIZES["vocab_size"], length).tolist() for length in LENGTHS]


BLOCK_SIZE = 16


class ChunkedRun:
    """Runs sequences in chunks, with keys, values and states in random blocks and slots of pools full of NaN."""

    def __init__(
        self,
        model: PackedModel,
        sequences: Sequence[Sequence[int]],
        dtype: torch.dtype = torch.float32,
        block_size: int = BLOCK_SIZE,
        device: torch.device | str = "cpu",
    ):
        assert model.cache_spec is not None
        self.device = torch.device(device)
        self.model, self.sequences, self.block_size = model, sequences, block_size
        self.rows: list[list[torch.Tensor]] = [[] for _ in sequences]
        self.weights: dict[tuple[int, int], torch.Tensor] = {}
        numbers = np.random.default_rng(1)
        counts = [-(-len(s) // self.block_size) for s in sequences]
        blocks = numbers.permutation(sum(counts) + 3)
        self.blocks = [
            blocks[end - count : end] for end, count in zip(itertools.accumulate(counts), counts, strict=True)
        ]
        self.slots = numbers.permutation(len(sequences) + 3)
        self.kv = KvCache.allocate(model.cache_spec, len(blocks), self.block_size, dtype, self.device)
        self.states = SsmStates.allocate(model.cache_spec, len(self.slots), dtype, self.device)
        for pool in (*self.kv.k, *self.kv.v, *self.states.conv, *self.states.ssm):
            pool.fill_(float("nan"))

    def pack(self, chunks: Sequence[tuple[int, int, int]]) -> PackedBatch:
        """Packs chunks (sequence, start, end) on the device; chunks that start at 0 must come first."""
        starts = [start for _, start, _ in chunks]
        inputs = [TokenizedInput(np.asarray(self.sequences[n], np.int32))[a:b] for n, a, b in chunks]
        lengths = [len(i) for i in inputs]
        new = starts.count(0)
        cache = self._cache(chunks, new, sum(lengths[:new]))
        return PackedBatch.build(inputs, self.device, starts=starts, cache=cache)

    def step(self, chunks: Sequence[tuple[int, int, int]], *, need_attention: bool = False) -> None:
        """Runs one batch of (sequence, start, end); attention weights go to `weights[sequence, end]`."""
        chunks = sorted(chunks, key=lambda s: s[1] > 0)
        batch = self.pack(chunks)
        output = self.model.forward(batch, need_attention=need_attention)
        for (n, _, _), part in zip(chunks, output.hidden_states.split(batch.seq_lens), strict=True):
            self.rows[n].append(part)
        if output.attention_weights is not None:
            parts = output.attention_weights.split([end for _, _, end in chunks])
            self.weights |= {(n, end): part for (n, _, end), part in zip(chunks, parts, strict=True)}

    def _cache(self, chunks: Sequence[tuple[int, int, int]], num_new_seqs: int, num_new_tokens: int) -> BatchCache:
        past, size = chunks[num_new_seqs:], self.block_size
        rows, store_rows, store_slots = 0, [], []
        for n, start, end in chunks:
            if end < len(self.sequences[n]) or start > 0:  # nothing of a whole sequence is stored
                store_rows += range(rows, rows + end - start)
                store_slots += [self.blocks[n][t // size] * size + t % size for t in range(start, end)]
            rows += end - start
        tables = torch.zeros(len(past), max((-(-end // size) for *_, end in past), default=0), dtype=torch.int32)
        for row, (n, _, end) in zip(tables, past, strict=True):
            used = -(-end // size)
            row[:used] = torch.from_numpy(self.blocks[n][:used])
        saved = [i for i, (n, _, end) in enumerate(chunks) if end < len(self.sequences[n])]
        spec = self.model.cache_spec
        placed = {
            "store_rows": torch.tensor(store_rows, dtype=torch.int64),
            "store_slots": torch.tensor(store_slots, dtype=torch.int64),
            "load_indices": torch.arange(num_new_seqs, len(chunks)),
            "load_slots": torch.tensor([int(self.slots[n]) for n, *_ in past], dtype=torch.int64),
            "save_indices": torch.tensor(saved, dtype=torch.int64),
            "save_slots": torch.tensor([int(self.slots[chunks[i][0]]) for i in saved], dtype=torch.int64),
        }
        if self.device.type == "cuda":
            placed["past_lens_on_device"] = torch.tensor([start for _, start, _ in past], dtype=torch.int32)
        return BatchCache(
            num_new_seqs=num_new_seqs,
            num_new_tokens=num_new_tokens,
            context_lens=tuple(start for _, start, _ in chunks),
            prompt_lens=tuple(len(self.sequences[n]) for n, _, _ in chunks),
            kv=self.kv if spec.kv_layers else None,
            block_tables=tables.to(self.device) if past else None,
            ssm=self.states if spec.ssm_layers else None,
            **{name: tensor.to(self.device) for name, tensor in placed.items()},
        )


@pytest.fixture(scope="session")
def chunked_run() -> type[ChunkedRun]:
    """The class, for tests that choose the chunks of a batch."""
    return ChunkedRun


@pytest.fixture(scope="session")
def run_chunked() -> Callable[..., list[torch.Tensor]]:
    """Runs sequences in chunks of `size` tokens; sequence n starts in step n."""

    def run(
        model: PackedModel,
        sequences: Sequence[Sequence[int]],
        size: int,
        dtype: torch.dtype = torch.float32,
        block_size: int = BLOCK_SIZE,
    ) -> list[torch.Tensor]:
        chunked = ChunkedRun(model, sequences, dtype, block_size)
        done = [0] * len(sequences)
        for step in itertools.count():
            ends = [min(at + size, len(s)) for at, s in zip(done, sequences, strict=True)]
            chunks = [(n, done[n], ends[n]) for n in range(min(step + 1, len(done))) if done[n] < ends[n]]
            if not chunks and step >= len(done):
                return [torch.cat(rows) for rows in chunked.rows]
            if chunks:
                chunked.step(chunks)
            for n, _, end in chunks:
                done[n] = end
        raise AssertionError

    return run
