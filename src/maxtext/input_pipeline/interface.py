"""The interface of data sources: batches, iterators with a state, and shards.

A batch is a dict of int32 arrays [rows, max_target_length], with the fields of FIELDS:
- `targets[t]` is the token after `inputs[t]` in the same document. The shift is done once, in
  packing.py and olmo.py.
- `*_segmentation` numbers the documents of a row from 1; 0 is padding. The loss counts targets
  whose `targets_segmentation` is not 0; in fine-tuning, targets that are not trained on have 0,
  as padding does.
- `*_position` counts from 0 in each segment.
Padding is 0 in every field, whatever the tokenizer's pad_id. Masks come from lengths, never from
ids: a padding id that equals the end token masks nothing.

Preference pairs have these fields twice, as chosen_inputs … and rejected_inputs …, one pair a row.
A row of a prompt has its tokens as inputs, no targets, and in RECORD, of dtype object, its columns.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum

import numpy as np

from maxtext.common.errors import ConfigError, UserError
from maxtext.common.types import Json
from maxtext.configs.types import MaxTextConfig

Batch = dict[str, np.ndarray]
State = Json

FIELDS = (
    "inputs",
    "inputs_position",
    "inputs_segmentation",
    "targets",
    "targets_position",
    "targets_segmentation",
)

RECORD = "record"
MARGIN = "margin"  # of pairs of reward-model training, float32 [rows]
PAIR_SIDES = ("chosen", "rejected")
PAIR_FIELDS = tuple(f"{side}_{field}" for side in PAIR_SIDES for field in FIELDS)


class Split(str, Enum):
    TRAIN = "train"
    EVAL = "eval"


class LongDocuments(Enum):
    """The treatment of a document with more pairs than fit in a row."""

    CUT = "cut"  # it is truncated
    SPLIT = "split"  # it becomes several sequences, each with positions from 0
    WHOLE = "whole"  # it stays one sequence, for a packer that splits sequences


@dataclass(frozen=True)
class ShardSpec:
    """The part of the data that one stream loads: batches of `rows` rows from shard `index` of
    `count` of the documents.

    `local_streams` is the number of streams that this process loads at once; they share its
    threads. If `min_rows` is 0, every batch has `rows` rows. Otherwise the last batch may have
    fewer, and data with fewer than `min_rows` rows in all is an error. `full_window` gives each
    stream the shuffle window of the whole run instead of its part of it, as positions saved by
    older versions require.
    """

    rows: int
    index: int = 0
    count: int = 1
    local_streams: int = 1
    min_rows: int = 0
    full_window: bool = False

    def window(self, size: int) -> int:
        """The shuffle window of this stream if that of the whole run has `size` rows."""
        return size if self.full_window else -(-size // self.count)


class BatchIterator(ABC):
    """Yields batches until StopIteration. A new iterator with `set_state(state)` yields the batches
    that followed `get_state()`.
    """

    def __iter__(self) -> "BatchIterator":
        return self

    @abstractmethod
    def __next__(self) -> Batch: ...

    @abstractmethod
    def get_state(self) -> State:
        """The position after the batch last returned, as plain JSON values."""

    @abstractmethod
    def set_state(self, state: State) -> None: ...

    @abstractmethod
    def reset(self) -> None:
        """Return to the first batch, as for each new evaluation."""

    def close(self) -> None:  # noqa: B027 - most iterators have nothing to release
        """Release threads and files. The iterator must not be used afterwards."""


class TooLittleData(ConfigError):
    """Data that does not fill a batch."""


def keeps_last(config: MaxTextConfig, split: Split) -> bool:
    """Whether rows that do not fill a last batch are used, with rows of padding."""
    return split is Split.EVAL or config.generate_padding_batch_train


def seal(settings: Json, position: State) -> State:
    """An iterator state with the settings that its position is valid for."""
    return {"made_by": settings, "position": position}


def unseal(settings: Json, state: State) -> State:
    """The position of a sealed state. Raises ConfigError if it was saved with other settings, since
    it would then point at other data.
    """
    saved = state["made_by"]
    for name in {**saved, **settings}:
        if saved.get(name) != settings.get(name):
            raise ConfigError(
                f"the saved data position was made with {name}={saved.get(name)}, but this run has "
                f"{name}={settings.get(name)}: restore the old value, or start again under a new "
                "run_name"
            )
    return state["position"]


def saved_position(state: State) -> int:
    """The entry `position` of a saved state. Checkpoints of earlier versions call it `place`."""
    return state["position"] if "position" in state else state["place"]


def check_position(position: int, count: int) -> None:
    """Raise UserError if a saved position is past the end of the data, which must have changed."""
    if position > count:
        raise UserError(
            "the saved data position is past the end of the data, so the documents, the tokenizer "
            "or num_epoch have changed: restore them, or start again under a new run_name"
        )
