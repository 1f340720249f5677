"""Saved random models of transformers, their packed batches, and runs in chunks."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from penstock.engine.core.device.chunk_memory import ChunkMemory
from penstock.engine.core.device.stream import stream_of
from penstock.engine.core.loading import weights_loader
from penstock.engine.executors.torch.packed_batch import PackedBatch, PackedModel
from penstock.engine.model_files.resolve import resolve_model, with_device
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import TokenizedInput
from penstock.engine.protocol.model_info import ModelInfo
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.scheduling import Allocation, InputSequence, PoolSize, PrefillChunk, Request
from penstock.kernels.cpu import CpuLibrary, Format

from .array_model import ArrayModel, load_model
from .families import ENCODER_SIZES

LENGTHS = (1, 2, 7, 63, 130)

Save = Callable[..., tuple[Path, transformers.PreTrainedModel]]
Load = Callable[..., PackedModel]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


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
    library: CpuLibrary = request.getfixturevalue("three_lane_library")

    def load_on_cpu(info: ModelInfo, **options: object) -> PackedModel:
        model = load_model(info, library=library, **options)
        assert isinstance(model, ArrayModel)
        return model

    return load_on_cpu


@pytest.fixture(scope="session")
def load_on_torch() -> Load:
    return weights_loader.load_model


@pytest.fixture
def needs_formats(three_lane_library: CpuLibrary) -> Callable[[str, str | None], None]:
    """Skips the test if the processor lacks products in this dtype or arithmetic."""

    def check(dtype: str, arithmetic: str | None) -> None:
        needed = {Format.INT8} if dtype == "int8" else set()
        if arithmetic == "bfloat16":
            needed.add(Format.DOT)
        if not needed <= three_lane_library.formats:
            pytest.skip(f"this processor has no products in {needed - three_lane_library.formats}")

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
        sequences: Sequence[Sequence[int]],
        boundaries: Sequence[int] | None = None,
        device: str = "cpu",
        adapters: Sequence[int] | None = None,
    ) -> PackedBatch:
        boundaries = boundaries or [0] * len(sequences)
        inputs = [TokenizedInput(np.asarray(s, np.int32), b) for s, b in zip(sequences, boundaries, strict=True)]
        numbers = None if adapters is None else np.array(adapters, np.int32)
        return PackedBatch.build(inputs, torch.device(device), adapters=numbers)

    return pack_tokens


@pytest.fixture
def sequences() -> list[list[int]]:
    """Token ids of odd lengths."""
    numbers = np.random.default_rng(0)
    return [numbers.integers(3, ENCODER_SIZES["vocab_size"], length).tolist() for length in LENGTHS]


BLOCK_SIZE = 16


class ChunkedRun:
    """Runs sequences in chunks, with keys, values and states in blocks and slots of memory full of NaN."""

    def __init__(
        self,
        model: PackedModel,
        sequences: Sequence[Sequence[int]],
        dtype: torch.dtype = torch.float32,
        block_size: int = BLOCK_SIZE,
        device: torch.device | str = "cpu",
    ):
        self.device, self.model = torch.device(device), model
        self.rows: list[list[torch.Tensor]] = [[] for _ in sequences]
        spec = model.cache_spec
        assert spec is not None
        num_blocks = sum(-(-len(s) // block_size) for s in sequences)
        pool_size = PoolSize(num_blocks if spec.kv_layers else 0, len(sequences) if spec.ssm_layers else 0, 0)
        stream = stream_of(self.device)
        self.memory = ChunkMemory(
            spec, pool_size, block_size=block_size, dtype=dtype, device=self.device, stream=stream
        )
        self.kv, states = self.memory._kv, self.memory._ssm
        for pool in [*self.kv.k, *self.kv.v] if self.kv else []:
            pool.fill_(float("nan"))
        for pool in [*states.conv, *states.ssm] if states else []:
            pool.fill_(float("nan"))
        blocks = np.random.default_rng(1).permutation(num_blocks).tolist()
        self.sequences = []
        for n, tokens in enumerate(sequences):
            own, blocks = blocks[: -(-len(tokens) // block_size)], blocks[-(-len(tokens) // block_size) :]
            sequence = InputSequence(
                sequence_id=n,
                tokens=TokenizedInput(np.asarray(tokens, np.int32)),
                num_tokens=len(tokens),
                request=Request(n, PoolingParams()),
            )
            sequence.allocation = Allocation(n, len(tokens), own, 0, n, ())
            self.sequences.append(sequence)

    def pack(self, chunks: Sequence[tuple[int, int, int]]) -> PackedBatch:
        """Packs chunks (sequence, start, end) on the device; chunks that start at 0 must come first."""
        parts = [PrefillChunk(self.sequences[n], start, end) for n, start, end in chunks]
        for part in parts:
            if part.start == 0 and part.is_last:  # nothing of a whole sequence is stored
                part.sequence.allocation = None
        cache = self.memory.batch_cache(parts, [part.sequence.allocation for part in parts])
        self.memory.advance(parts)
        starts = [start for _, start, _ in chunks]
        return PackedBatch.build([part.tokens for part in parts], self.device, starts=starts, cache=cache)

    def step(self, chunks: Sequence[tuple[int, int, int]]) -> None:
        """Runs one batch of (sequence, start, end)."""
        chunks = sorted(chunks, key=lambda chunk: chunk[1] > 0)
        batch = self.pack(chunks)
        hidden = self.model.forward(batch).hidden_states
        for (sequence, _, _), rows in zip(chunks, hidden.split(batch.seq_lens), strict=True):
            self.rows[sequence].append(rows)


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
