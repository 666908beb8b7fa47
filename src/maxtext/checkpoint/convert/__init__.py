"""Hugging Face folders to native weights and back, a tensor at a time."""

from maxtext.checkpoint.convert.conversion import Conversion, from_hf, to_hf
from maxtext.checkpoint.safetensors_reader import (
    HF_STEM,
    NATIVE_STEM,
    SafetensorsFolder,
    find_hf_assets,
)
from maxtext.checkpoint.safetensors_writer import write_hf_folder, write_native_folder
from maxtext.checkpoint.tensors import Progress, RenamedTensors, TensorInfo, TensorSource

__all__ = [
    "HF_STEM",
    "NATIVE_STEM",
    "Conversion",
    "Progress",
    "RenamedTensors",
    "SafetensorsFolder",
    "TensorInfo",
    "TensorSource",
    "find_hf_assets",
    "from_hf",
    "to_hf",
    "write_hf_folder",
    "write_native_folder",
]
