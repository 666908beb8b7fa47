"""Gated DeltaNet with experts in every layout."""

import pytest

from tests.sharding import matrix

MODEL = "delta"


@pytest.fixture(scope="module")
def reports(request):
    """Reports of the layouts that this session tests."""
    chosen = [
        item.callspec.params["layout"]
        for item in request.session.items
        if item.module is request.module
    ]
    return matrix.run(MODEL, chosen)


@pytest.mark.slow
@pytest.mark.parametrize("layout", matrix.parameters(MODEL))
def test_layout(reports, layout):
    matrix.check(MODEL, layout, reports[layout])
