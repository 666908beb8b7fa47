"""Small files of every format."""

import pytest

from tests.input_pipeline.formats.writers import WRITERS, make_records


@pytest.fixture(params=WRITERS)
def written(request, tmp_path):
    """20 + 0 + 15 records in three files of one kind: (paths, kind, records, records in each
    block).
    """
    kind, write, block = WRITERS[request.param]
    paths = [tmp_path / f"{name}.{request.param}" for name in "abc"]
    for path, records in zip(paths, (make_records(20), [], make_records(15, 20)), strict=True):
        write(path, records)
    return [str(path) for path in paths], kind, make_records(35), block
