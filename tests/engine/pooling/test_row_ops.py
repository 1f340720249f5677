"""Transforms of rows, without arrays of rows."""

import pytest

from penstock.engine.pooling.row_ops import VectorTransform
from penstock.engine.protocol.params import PoolingParams


@pytest.mark.parametrize(
    ("dimensions", "normalize", "changes"),
    [
        ((None, None), (False, False), False),
        ((None, 8), (False, False), False),
        ((8, 4), (False, False), True),
        ((4, 4), (False, False), True),
        ((None, None), (False, True), True),
        ((None, None), (True, True), True),
    ],
)
def test_transform_changes_rows_only_if_a_request_asks(
    dimensions: tuple[int | None, ...], normalize: tuple[bool, ...], changes: bool
) -> None:
    params = [PoolingParams(dimensions=d, normalize=n) for d, n in zip(dimensions, normalize, strict=True)]
    assert VectorTransform.of(params, 8).changes(8) is changes
    assert not VectorTransform().changes(8)
