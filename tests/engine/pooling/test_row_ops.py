"""Transforms of rows, without arrays of rows."""

from penstock.engine.pooling.row_ops import VectorTransform
from penstock.engine.protocol.params import PoolingParams

from ...tables import cases


@cases(__file__, "dimensions", "normalize", "changes")
def test_transform_changes_rows_only_if_a_request_asks(
    dimensions: list[int | None], normalize: list[bool], changes: bool
) -> None:
    params = [PoolingParams(dimensions=d, normalize=n) for d, n in zip(dimensions, normalize, strict=True)]
    assert VectorTransform.of(params, 8).changes(8) is changes
    assert not VectorTransform().changes(8)
