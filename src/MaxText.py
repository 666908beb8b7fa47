"""The former name of the package: `python3 -m MaxText.train`, `.decode`, `.sft_trainer`,
`.sft.sft_trainer` are the commands of maxtext.

A module with a path, not a folder: file systems that ignore case would mix a folder with maxtext/.
"""

from pathlib import Path

_PACKAGE = Path(__file__).parent / "maxtext"
__path__ = [str(_PACKAGE), str(_PACKAGE / "trainers" / "post_train")]
