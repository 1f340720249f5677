"""Results of a batch as arrays over many sequences, and their message format. Shape letter: N sequences of an array."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from .messages import ArrayHeader, Frame, StepResults
from .params import PoolingParams
from .tasks import PoolingTask

V = TypeVar("V")
"""A numpy array or a tensor."""
W = TypeVar("W")
Arrays = dict[str, NDArray[np.float32]]
"""The outputs of one sequence by name."""
_OUTPUT_NAMES: Final = {
    PoolingTask.EMBED: "embedding",
    PoolingTask.CLASSIFY: "scores",
    PoolingTask.SCORE: "scores",
    PoolingTask.TOKEN_EMBED: "token_embeddings",
    PoolingTask.TOKEN_CLASSIFY: "token_scores",
    PoolingTask.SPARSE_EMBED: "sparse",
}


class OutputGroup(NamedTuple):
    """Key of an OutputArray: the name of the result, and the class columns that it returns (None: all)."""

    name: str
    columns: tuple[int, ...] | None

    @classmethod
    def of(cls, params: PoolingParams) -> OutputGroup:
        """Returns the group of a sequence with these resolved parameters, by its main task."""
        assert params.task is not None, "PoolingParams.resolved sets the task"
        if params.is_compared:
            return cls("similarities", None)
        columns = params.returned_token_ids if params.task is PoolingTask.TOKEN_CLASSIFY else None
        return cls(_OUTPUT_NAMES[params.task], columns)

    @classmethod
    def all_of(cls, params: PoolingParams) -> tuple[OutputGroup, ...]:
        """Returns the groups of a sequence with these resolved parameters, one per task."""
        return cls.of(params), *(cls(_OUTPUT_NAMES[task], None) for task in params.extra_tasks)

    @property
    def is_token_level(self) -> bool:
        """True if the result has rows for every token, False if it is pooled."""
        return self.name in ("token_embeddings", "token_scores", "similarities", "sparse")


def distinct_params(params: Sequence[PoolingParams]) -> list[PoolingParams]:
    """Returns the distinct objects among `params`, by identity. The inputs of a request share one object."""
    return list(dict(zip(map(id, params), params, strict=True)).values())


def by_group(params: Sequence[PoolingParams]) -> dict[OutputGroup, list[int] | None]:
    """Returns the indices of the sequences in each group, or None for all sequences.

    A sequence may be in several groups.
    """
    first = params[0]
    if all(p is first for p in params):
        return dict.fromkeys(OutputGroup.all_of(first))
    groups_by_id = {id(p): OutputGroup.all_of(p) for p in distinct_params(params)}
    if len(set(groups_by_id.values())) == 1:
        return dict.fromkeys(next(iter(groups_by_id.values())))
    indices: dict[OutputGroup, list[int]] = defaultdict(list)
    for index, p in enumerate(params):
        for group in groups_by_id[id(p)]:
            indices[group].append(index)
    return dict(indices)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OutputArray(Generic[V]):
    """Results of one kind for some sequences of a batch, on the host or on a device.

    Attributes:
        name: "embedding", "scores", "token_embeddings", "token_scores", "similarities" or "sparse".
        values: [N, W] float32, a row per sequence; or [R, W], token rows.
        indices: The sequences, in order; None means all of the batch.
        row_lens: Token rows of each sequence in this batch; None for a row per sequence.
        widths: Columns of each sequence, if they differ. Values beyond them are undefined.
    """

    name: str
    values: V
    indices: Sequence[int] | None = None
    row_lens: Sequence[int] | None = None
    widths: Sequence[int] | None = None

    def with_values(self, values: W) -> OutputArray[W]:
        """Returns the same results with other values, such as a copy on the host."""
        return OutputArray(
            name=self.name, values=values, indices=self.indices, row_lens=self.row_lens, widths=self.widths
        )

    def split(self: HostArray) -> list[NDArray[np.float32]]:
        """Returns one array per sequence: [W], or [L, W] of token rows. Views."""
        if self.row_lens is None:
            parts = list(self.values)
        else:
            ends = accumulate(self.row_lens)
            parts = [self.values[end - length : end] for end, length in zip(ends, self.row_lens, strict=True)]
        if self.widths is None:
            return parts
        return [part[..., :width] for part, width in zip(parts, self.widths, strict=True)]

    def pick(self: HostArray, positions: Sequence[int]) -> HostArray:
        """Returns the results of some sequences, given by their ascending positions. They have no `indices`."""
        widths = None if self.widths is None else [self.widths[position] for position in positions]
        if self.row_lens is None:
            return OutputArray(name=self.name, values=self.values[list(positions)], widths=widths)
        is_picked = np.zeros(len(self.row_lens), np.bool_)
        is_picked[list(positions)] = True
        values = self.values[np.repeat(is_picked, self.row_lens)]
        row_lens = [self.row_lens[position] for position in positions]
        return OutputArray(name=self.name, values=values, row_lens=row_lens, widths=widths)


HostArray = OutputArray[NDArray[np.float32]]


@dataclass(frozen=True, slots=True, eq=False)
class BatchOutputs:
    """The results of one batch. Their values must not be changed: frames of messages refer to them.

    Attributes:
        num_seqs: Sequences in the batch, complete or not.
        arrays: A sequence is in at most one array of each name.
        is_finite: [num_seqs] bool. False if an output of the sequence contains NaN or inf.
    """

    num_seqs: int
    arrays: tuple[HostArray, ...]
    is_finite: NDArray[np.bool_]

    @classmethod
    def of(cls, num_seqs: int, arrays: Sequence[HostArray]) -> BatchOutputs:
        """Checks which sequences have finite outputs, and returns the results."""
        is_finite = np.ones(num_seqs, np.bool_)
        for output in arrays:
            # Checking the whole array is much faster than checking each sequence.
            if not np.isfinite(output.values).all():
                found = [bool(np.isfinite(part).all()) for part in output.split()]
                is_finite[slice(None) if output.indices is None else list(output.indices)] &= found
        return cls(num_seqs, tuple(arrays), is_finite)

    def split(self) -> list[Arrays]:
        """Returns the arrays of each sequence by name: [D], [C], [L, D] or [L, C] float32. Views.

        An unfinished sequence of a token-level task has the rows of this chunk (possibly none), to be joined along
        axis 0 with those of its other chunks. An unfinished sequence of a sequence-level task has no array.
        """
        results: list[dict[str, NDArray[np.float32]]] = [{} for _ in range(self.num_seqs)]
        for output in self.arrays:
            indices = range(self.num_seqs) if output.indices is None else output.indices
            for index, array in zip(indices, output.split(), strict=True):
                results[index][output.name] = array
        return list(results)


@dataclass(frozen=True, slots=True, eq=False)
class ResultArray:
    """Outputs of one kind, with the requests that they belong to.

    Attributes:
        output: The outputs. Its `indices` are not used.
        request_ids: The request of each sequence.
        indices: Index of each sequence among the inputs of its request.
        is_last: False if a later step returns more rows of the sequence.
    """

    output: HostArray
    request_ids: list[int]
    indices: list[int]
    is_last: list[bool]

    def pick(self, positions: Sequence[int]) -> ResultArray:
        """Returns the results of some sequences, given by their ascending positions; itself if these are all."""
        if len(positions) == len(self.request_ids):
            return self
        return ResultArray(
            self.output.pick(positions),
            [self.request_ids[position] for position in positions],
            [self.indices[position] for position in positions],
            [self.is_last[position] for position in positions],
        )


def pack_results(arrays: Sequence[ResultArray]) -> tuple[list[ArrayHeader], list[Frame]]:
    """Returns the headers and the frames of a StepResults message.

    The frames refer to the values of the arrays without a copy. Do not write to the values after this call.
    """
    headers: list[ArrayHeader] = []
    frames: list[Frame] = []
    for results in arrays:
        output = results.output
        values = np.ascontiguousarray(output.values, np.float32)
        row_lens, widths = (None if each is None else list(each) for each in (output.row_lens, output.widths))
        headers.append(
            ArrayHeader(
                output.name,
                values.shape[1],
                results.request_ids,
                results.indices,
                results.is_last,
                row_lens,
                widths,
            )
        )
        frames.append(memoryview(values).cast("B") if values.size else b"")  # an empty array cannot be cast
    return headers, frames


def unpack_results(message: StepResults, frames: Sequence[Frame]) -> list[ResultArray]:
    """Returns the arrays of a StepResults message. Their values are views of the frames."""
    arrays = []
    for header, frame in zip(message.arrays, frames, strict=True):
        num_rows = len(header.request_ids) if header.row_lens is None else sum(header.row_lens)
        values = np.frombuffer(frame, np.float32).reshape(num_rows, header.width)
        output = OutputArray(name=header.name, values=values, row_lens=header.row_lens, widths=header.widths)
        arrays.append(ResultArray(output, header.request_ids, header.indices, header.is_last))
    return arrays
