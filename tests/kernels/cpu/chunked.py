"""Runs sequences in chunks, for tests and fuzz.py."""

import numpy as np

from penstock.kernels.cpu import BatchBlocks, CpuEncoder, EncoderInput, EncoderWeights, PagedKvCache

from .specs import Floats, Texts


class ChunkedDecoder:
    """Runs sequences in chunks with random blocks of a memory full of NaN."""

    def __init__(self, decoder: CpuEncoder, spec: EncoderWeights, texts: Texts, block_size: int) -> None:
        numbers = np.random.default_rng(2)
        counts = [-(-length // block_size) for length in texts.lengths]
        order = numbers.permutation(sum(counts) + 3).astype(np.int32)
        self.blocks_of = np.split(order, np.cumsum(counts))
        num_kv_heads, layers = spec.num_kv_heads or spec.num_heads, list(spec.layers)
        shape = (len(order), block_size, num_kv_heads, layers[0].attention_out.weight.shape[1] // spec.num_heads)
        dtype, nan = (np.float32, np.nan) if decoder.kv_itemsize == 4 else (np.uint16, 0x7FFF)
        memory = [[np.full(shape, nan, dtype) for _ in layers] for _ in range(2)]
        self.decoder, self.texts, self.block_size = decoder, texts, block_size
        self.cache = PagedKvCache(*memory)
        self.rows: list[list[Floats]] = [[] for _ in texts.lengths]

    def step(self, chunks: list[tuple[int, int, int]]) -> None:
        """Runs chunks (sequence, first token, end) in one batch. Nothing of a whole sequence is stored."""
        width = max(len(blocks) for blocks in self.blocks_of)
        tables, slots, ids = np.full((len(chunks), width), -7, np.int32), [], []
        for line, (number, first, end) in zip(tables, chunks, strict=True):
            own = self.blocks_of[number]
            used = -(-first // self.block_size)
            line[:used] = own[:used]
            at = np.arange(first, end)
            is_whole = (first, end) == (0, self.texts.lengths[number])
            places = own[at // self.block_size] * self.block_size + at % self.block_size
            slots.append(at * 0 - 1 if is_whole else places)
            ids.append(self.texts[number].ids[first:end])
        starts = np.cumsum([0, *map(len, ids)]).astype(np.int32)
        kv_blocks = BatchBlocks(
            cache=self.cache,
            context_lens=np.array([first for _, first, _ in chunks], np.int32),
            block_tables=tables,
            slot_mapping=np.concatenate(slots).astype(np.int64),
        )
        flat = np.concatenate(ids)
        rows, _ = self.decoder.begin(EncoderInput(flat, flat, starts, kv_blocks=kv_blocks)).result()
        for (number, _, _), part in zip(chunks, np.split(rows, starts[1:-1]), strict=True):
            self.rows[number].append(part)

    def result(self) -> Floats:
        """The rows of all sequences so far."""
        return np.concatenate([part for parts in self.rows for part in parts])

    def run(self, size: int) -> Floats:
        """Runs all sequences in chunks of at most `size` tokens; sequence n starts in step n."""
        done, step = [0] * len(self.rows), 0
        while any(at < length for at, length in zip(done, self.texts.lengths, strict=True)):
            step += 1
            chunks = [
                (n, at, min(at + size, length))
                for n, (at, length) in enumerate(zip(done, self.texts.lengths, strict=True))
                if n < step and at < length
            ]
            if chunks:
                self.step(chunks)
            for n, _, end in chunks:
                done[n] = end
        return self.result()
