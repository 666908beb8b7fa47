"""Run with eight fake devices: writes the logits of each adapter of a folder.

`python -m tests.inference.eight_adapters BASE ADAPTERS OUT`; OUT has ids.npy.
"""

import sys
from pathlib import Path

import numpy as np

from maxtext import LLM


def main(base, adapters, out):
    llm = LLM.load(
        base,
        lora_input_adapters_path=adapters,
        dtype="float32",
        weight_dtype="float32",
        matmul_precision="highest",
        attention="dot_product",
        ici_tensor_parallelism=2,
        ici_fsdp_parallelism=4,
    )
    ids = np.load(Path(out) / "ids.npy")
    for name in llm.adapters.loaded:
        np.save(Path(out) / f"{name}.npy", np.asarray(llm.logits(ids, name)))


if __name__ == "__main__":
    main(*sys.argv[1:])
