"""The key of a cached row: a digest of everything that decides the row, and of its namespace.

A key is made in two steps: the model, the parameters and the namespace are the same for many inputs; then the tokens.
Everything that is read has its length before it or a fixed one, so that no two different things read alike.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Final

import numpy as np

from ...protocol.params import PoolingParams
from ...protocol.request import TokenizedInput
from ...protocol.tasks import PoolingTask

KEY_BYTES: Final = 32
IN_THE_IDS: Final = frozenset({"truncate_prompt_tokens", "refuse_too_long", "truncation_side", "any_dimensions"})
"""Fields of PoolingParams that change no vector of the same tokens; all others are part of the key."""
_KEPT_TASKS: Final = frozenset({PoolingTask.EMBED, PoolingTask.SPARSE_EMBED})
"""Tasks with one vector per input. Rows for tokens would be larger by the number of tokens."""
_NUM_PREFIXES: Final = 256


class Keys:
    """Makes the keys of one model.

    Args:
        secret: Secret of the cache: without it nobody can compute a key.
        identity: Digest of all that decides the model's vectors (identity.py).
        embedding_size: Width of an embedding that is not cut.
    """

    def __init__(self, secret: bytes, identity: bytes, embedding_size: int) -> None:
        @lru_cache(_NUM_PREFIXES)
        def prefix(params: PoolingParams, namespace: str, finish: str) -> blake2b:
            fields = {name: value for name, value in dataclasses.asdict(params).items() if name not in IN_THE_IDS}
            if fields["dimensions"] == embedding_size:
                fields["dimensions"] = None
            digest = blake2b(digest_size=KEY_BYTES, key=secret)
            for part in (identity, _canonical(fields), namespace.encode(), finish.encode()):
                digest.update(struct.pack("<Q", len(part)) + part)
            return digest

        self._prefix = prefix

    def of(
        self, inputs: Sequence[TokenizedInput], params: PoolingParams, namespace: str, finish: str = ""
    ) -> list[bytes]:
        """Returns the key of each input's outputs.

        Args:
            inputs: Tokenized inputs.
            params: Resolved.
            namespace: Namespace of the client; "" where clients share rows.
            finish: Name of the function that is applied to the outputs before they are kept; "" for none.
        """
        prefix = self._prefix(params, namespace, finish)
        keys = []
        for tokens in inputs:
            digest = prefix.copy()
            places = (len(tokens), tokens.type_boundary, tokens.num_prompt_tokens, tokens.num_hidden)
            digest.update(struct.pack("<4q", *places))
            digest.update(np.ascontiguousarray(tokens.token_ids, "<i4").data)
            keys.append(digest.digest())
        return keys


def is_kept(params: PoolingParams, finish: str = "") -> bool:
    """Whether outputs of such a request are kept: one vector per input, or the result of a Finish."""
    return bool(finish) or {params.task, *params.also} <= _KEPT_TASKS


def _canonical(fields: object) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
