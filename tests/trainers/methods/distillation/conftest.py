"""Fixtures of several modules."""

import pytest

from tests.support.distillation import save_llama


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of a student and of a larger teacher, and their torch models."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("student", "teacher")}
    student = save_llama(folders["student"], layers=1, embed_dim=16, seed=0)
    teacher = save_llama(folders["teacher"], layers=2, embed_dim=24, seed=1)
    return folders, student, teacher
