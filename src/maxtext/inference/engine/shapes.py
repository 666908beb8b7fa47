"""The shapes of batches. Every shape is a compiled program, so there are few."""

from dataclasses import dataclass

MAX_PREFILL_TOKENS = 4096  # of a batch, unless a single prompt has more
# Rows that prompts share: the tokens of a row, and the most prompts. With the padding after them,
# these are a power of two. Attention does some work for each segment, even an empty one.
PACKED_SHAPES = (
    (256, 7),
    (512, 7),
    (1024, 15),
    (1536, 15),
    (2048, 15),
    (3072, 31),
    (4096, 7),
    (4096, 15),
    (4096, 31),
    (4096, 63),
)
FEW_ROWS = 8  # the batch size between one row and the maximum, where there are few programs
MIN_ROW_TOKENS = 16  # of a prefill row
MIN_KV_LEN = 64  # KV cache positions that attention reads
MIN_CHUNK_TOKENS = 32  # of a prompt, however long its cache is


@dataclass(frozen=True)
class ChunkSize:
    """The most tokens of a prompt in one prefill program: `tokens`, and no more than have
    `max_logits` logits with the keys of a cache, over all heads, if that is a limit."""

    tokens: int
    heads: int = 0
    max_logits: int = 0  # 0: no limit
    only_online: bool = False  # while requests may arrive, and not for lists of requests

    def at(self, kv_len: int) -> int:
        """For a cache of `kv_len` tokens, those of the chunk included."""
        if not self.heads or not self.max_logits:
            return self.tokens
        limit = self.max_logits // (self.heads * next_power_of_two(kv_len))
        return min(self.tokens, max(limit, MIN_CHUNK_TOKENS))


def next_power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def row_tokens(count: int) -> int:
    """The length of the row for `count` tokens: the next power of two, or the midpoint between two
    of them, which limits both the number of programs and the padding.
    """
    tokens = max(next_power_of_two(count), MIN_ROW_TOKENS)
    midpoint = tokens // 4 * 3
    return midpoint if count <= midpoint and tokens > MIN_ROW_TOKENS else tokens


def max_prefill_rows(tokens: int, max_tokens: int = MAX_PREFILL_TOKENS) -> int:
    """The most rows of `tokens` tokens in one prefill batch of up to `max_tokens`, a power of
    two."""
    return next_power_of_two(max(1, max_tokens // tokens) + 1) // 2


def prefill_rows(
    count: int,
    tokens: int,
    num_slots: int,
    few_programs: bool,
    max_tokens: int = MAX_PREFILL_TOKENS,
) -> int:
    """The rows of a prefill batch for `count` prompts of up to `tokens` tokens, where a batch has
    up to `max_tokens`."""
    if not few_programs:
        return next_power_of_two(count)
    most = min(max_prefill_rows(tokens, max_tokens), next_power_of_two(num_slots))
    return next(rows for rows in (1, min(FEW_ROWS, most), most) if rows >= count)


def packed_shape(tokens: int, prompts: int) -> tuple[int, int]:
    """The smallest of PACKED_SHAPES for `prompts` with `tokens` in all."""
    return next(shape for shape in PACKED_SHAPES if tokens <= shape[0] and prompts <= shape[1])


def kv_length(num_tokens: int, max_length: int) -> int:
    """How many KV cache positions a program reads for sequences of up to `num_tokens`."""
    return min(next_power_of_two(max(MIN_KV_LEN, num_tokens)), max_length)
