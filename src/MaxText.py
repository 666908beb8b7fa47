"""The former name of the package: `python3 -m MaxText.train`, `.decode`, `.sft_trainer`,
`.sft.sft_trainer` are the commands of maxtext.

A module with a path, not a folder: file systems that ignore case would mix a folder with maxtext/.
"""

import maxtext  # which finds the commands that have no file

__path__ = maxtext.__path__
