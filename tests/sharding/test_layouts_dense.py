"""A dense model in every layout."""

import pytest

from tests.sharding import matrix

MODEL = "dense"


@pytest.fixture(scope="module")
def reports():
    return matrix.run(MODEL)


@pytest.mark.slow
@pytest.mark.parametrize("layout", matrix.cases(MODEL))
def test_layout(reports, layout):
    matrix.check(MODEL, layout, reports[layout])
