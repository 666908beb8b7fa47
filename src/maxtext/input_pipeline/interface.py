"""What the trainer sees of any data source, and what a data source must offer.

A batch is a dict of int32 arrays [rows, max_target_length], the fields of FIELDS:
- `targets[t]` is the token after `inputs[t]` in the same document; the shift is done here, once,
  and nowhere else;
- `*_segmentation` numbers the documents of a row from 1; 0 = padding, which is also what the loss
  leaves out;
- `*_position` counts from 0 in each segment. Padding is 0 in every field, whatever the tokenizer's
  pad_id.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np

from maxtext.common.errors import ConfigError, UserError
from maxtext.configs.types import MaxTextConfig

Batch = dict[str, np.ndarray]
State = dict[str, Any]

FIELDS = (
    "inputs",
    "inputs_position",
    "inputs_segmentation",
    "targets",
    "targets_position",
    "targets_segmentation",
)


class Split(str, Enum):
    TRAIN = "train"
    EVAL = "eval"


@dataclass(frozen=True)
class ShardSpec:
    """What one data stream loads: batches of `rows` rows from shard `index` of `count` of the
    documents.

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
    """Batches until StopIteration. `set_state(get_state())` on a fresh iterator gives the same next
    batches.
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
        """Back to the first batch, as for each new evaluation."""

    def close(self) -> None:  # noqa: B027 - most iterators hold nothing
        """Let go of threads and files; the iterator is not used afterwards."""


class DataSource(Protocol):
    """Makes the iterator of one split for one stream. None: the configuration names no data for
    evaluation.
    """

    def __call__(
        self, config: MaxTextConfig, split: Split, shard: ShardSpec
    ) -> BatchIterator | None: ...


def keeps_last(config: MaxTextConfig, split: Split) -> bool:
    """Whether rows that do not fill a last batch are used, beside padding."""
    return split is Split.EVAL or config.generate_padding_batch_train


def seal(made_by: dict[str, Any], position: State) -> State:
    """A state that says which settings give its position a meaning."""
    return {"made_by": made_by, "position": position}


def unseal(made_by: dict[str, Any], state: State) -> State:
    """The position of a sealed state, unless other settings made it: then it would point at other
    data, in silence.
    """
    saved = state["made_by"]
    for name in {**saved, **made_by}:
        if saved.get(name) != made_by.get(name):
            raise ConfigError(
                f"the saved data position was made with {name}={saved.get(name)}, but this run has "
                f"{name}={made_by.get(name)}: restore the old value, or start again under a new run_name"
            )
    return state["position"]


def check_position(position: int, count: int) -> None:
    """Raise UserError if a saved position is past the elements that the data gives now: they are
    not the same.
    """
    if position > count:
        raise UserError(
            "the saved data position is past the end of what the data gives now, so the documents, the tokenizer or "
            "num_epoch have changed: restore them, or start again under a new run_name"
        )
