"""Keys: each thing that decides a vector changes them, by itself; what does not, does not."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from penstock.engine.client.vector_cache.keys import IN_THE_IDS, KEY_BYTES, Keys, is_kept
from penstock.engine.protocol.params import PoolingParams
from penstock.engine.protocol.request import TokenizedInput
from penstock.engine.protocol.tasks import PoolingTask

SECRET, IDENTITY = bytes(range(32)), b"model"
PARAMS = PoolingParams(task=PoolingTask.EMBED, normalize=True, use_activation=True)
IDS = np.array([101, 7, 8, 9, 102], np.int32)
TOKENS = TokenizedInput(IDS, type_boundary=3, num_prompt_tokens=1, num_hidden=1)
OTHERS: dict[str, Any] = {
    "truncate_prompt_tokens": 12,
    "refuse_too_long": True,
    "truncation_side": "left",
    "dimensions": 64,
    "any_dimensions": True,
    "normalize": False,
    "use_activation": False,
    "task": PoolingTask.SPARSE_EMBED,
    "step_tag_id": 3,
    "returned_token_ids": (1, 2),
    "is_query": True,
    "also": (PoolingTask.SPARSE_EMBED,),
    "is_compared": True,
}
"""For each field of PoolingParams another value."""


def key(
    tokens: TokenizedInput = TOKENS,
    params: PoolingParams = PARAMS,
    namespace: str = "one",
    finish: str = "",
    secret: bytes = SECRET,
    identity: bytes = IDENTITY,
) -> bytes:
    (made,) = Keys(secret, identity, 384).of([tokens], params, namespace, finish)
    return made


def test_the_same_has_the_same_key() -> None:
    again = TokenizedInput(np.array([0, *IDS], np.int64).astype(np.int32)[1:], 3, 1, 1)
    assert key() == key(again, dataclasses.replace(PARAMS))
    assert len(key()) == KEY_BYTES


@pytest.mark.parametrize(
    "changes",
    [
        {"namespace": "two"},
        {"namespace": ""},
        {"finish": "late True [(0, 2)]"},
        {"secret": bytes(32)},
        {"identity": b"another"},
        {"tokens": dataclasses.replace(TOKENS, token_ids=IDS[:-1])},
        {"tokens": dataclasses.replace(TOKENS, token_ids=IDS[::-1])},
        {"tokens": dataclasses.replace(TOKENS, token_ids=np.array([101, 7, 8, 10, 102], np.int32))},
        {"tokens": dataclasses.replace(TOKENS, type_boundary=2)},
        {"tokens": dataclasses.replace(TOKENS, num_prompt_tokens=0)},
        {"tokens": dataclasses.replace(TOKENS, num_hidden=0)},
    ],
    ids=str,
)
def test_each_part_changes_the_key(changes: dict[str, Any]) -> None:
    assert key(**changes) != key()


def test_every_field_of_the_parameters_has_another_value_here() -> None:
    assert set(OTHERS) == {field.name for field in dataclasses.fields(PoolingParams)}
    assert all(getattr(PARAMS, name) != value for name, value in OTHERS.items())


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_each_parameter_changes_the_key_unless_it_is_in_the_ids(name: str) -> None:
    changed = key(params=PARAMS.clone(**{name: OTHERS[name]}))
    assert (changed == key()) is (name in IN_THE_IDS)


def test_the_native_width_is_no_cut() -> None:
    assert key(params=PARAMS.clone(dimensions=384)) == key()


def test_parts_do_not_run_into_each_other() -> None:
    assert key(namespace="a", finish="b") != key(namespace="ab") != key(finish="ab")
    assert key(identity=b"ab", namespace="c") != key(identity=b"a", namespace="bc")


def test_many_inputs_have_the_keys_of_each_alone() -> None:
    inputs = [TokenizedInput(np.arange(n, dtype=np.int32)) for n in range(1, 50)]
    together = Keys(SECRET, IDENTITY, 384).of(inputs, PARAMS, "one")
    assert together == [key(tokens) for tokens in inputs]
    assert len(set(together)) == len(inputs)


@pytest.mark.parametrize(
    ("tasks", "finish", "kept"),
    [
        ((PoolingTask.EMBED,), "", True),
        ((PoolingTask.SPARSE_EMBED,), "", True),
        ((PoolingTask.EMBED, PoolingTask.SPARSE_EMBED), "", True),
        ((PoolingTask.TOKEN_EMBED,), "", False),
        ((PoolingTask.EMBED, PoolingTask.TOKEN_EMBED), "", False),
        ((PoolingTask.TOKEN_EMBED,), "late", True),
        ((PoolingTask.CLASSIFY,), "", False),
        ((PoolingTask.SCORE,), "", False),
    ],
)
def test_what_is_kept(tasks: tuple[PoolingTask, ...], finish: str, kept: bool) -> None:
    assert is_kept(PoolingParams(task=tasks[0], also=tasks[1:]), finish) is kept
