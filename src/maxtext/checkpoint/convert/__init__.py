"""Hugging Face folders to our weights and back: rules as data, read and written a tensor at a
time.
"""

from maxtext.checkpoint.convert.rules import Rule
from maxtext.checkpoint.convert.stream import Conversion, from_hf, to_hf
from maxtext.checkpoint.folders import OURS, THEIRS, Folder, companions
from maxtext.checkpoint.tensors import Progress, Renamed, Source, Tensor
from maxtext.checkpoint.writer import write_ours, write_theirs

__all__ = [
    "OURS",
    "THEIRS",
    "Conversion",
    "Folder",
    "Progress",
    "Renamed",
    "Rule",
    "Source",
    "Tensor",
    "companions",
    "from_hf",
    "to_hf",
    "write_ours",
    "write_theirs",
]
