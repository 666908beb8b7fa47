"""The device's side of generation: slots that hold sequences, and the few compiled programs that
extend them.

`prefill` puts tokens of prompts into slots and draws what follows those that are complete; `decode`
extends all slots that are at work by a block of tokens, in one loop on the device. Both return at
once, with arrays that are still being computed; what follows is queued behind them, so the host may
look at one block while the device computes the next. A slot ends by itself at its last place or
with one of its ending ids.

A token depends on its own sequence, seed and position alone: programs differ in shapes and in what
they skip, never in what they mean. Shapes: N slots, R rows of prompts, C tokens of a row, P table
columns, E ending ids, V vocabulary.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.configs.types import MaxTextConfig
from maxtext.inference.sampling import Kind, Rows, draw
from maxtext.inference.scoring import Cached, Recomputed, at_last, scorer
from maxtext.kernels import attention
from maxtext.layers.attend import cannot_attend_pages
from maxtext.layers.attention import AttentionSpec
from maxtext.layers.cache import PAGES, CacheSize
from maxtext.layers.inputs import LayerInputs
from maxtext.layers.parameters import Template
from maxtext.models.common import backend
from maxtext.models.registry import layers
from maxtext.models.transformer import Caches
from maxtext.sharding import AxisRules, use_rules
from maxtext.sharding.manual import platform

IDLE, BROKEN = -1, -2  # in place of a token: the slot does nothing; its scores were not numbers
BLOCK = 16  # tokens of a slot in one call of decode, at most
FIXED_STEPS = (4, BLOCK)  # where the compiler is to know how many
LEAST_ROWS = 64  # of a program for some of the slots: fewer would cost about as much
MOST_ENDS = 8  # ids that end a sequence
PACKED = 4096  # tokens of a row with several prompts


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Wishes:
    """What each row of prompts, or each slot, is to become."""

    last: Any  # [B] int32, the position of its last token at the latest
    seed: Any  # [B] uint32
    ends: Any  # [B, E] int32, filled up with -1
    sampling: Rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """All that the device holds beside the weights."""

    caches: Caches
    token: jax.Array  # [N], the newest of each slot; its keys and values are not in the caches yet
    position: jax.Array  # [N], of that token; -1: the slot does nothing
    wishes: Wishes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Prompts:
    """Tokens to be put into slots."""

    ids: Any  # [R, C]; with segments [1, C]
    positions: Any  # like ids, -1 is padding, behind the tokens
    slots: Any  # [R]; N: the row is padding
    table: Any  # [R, P]
    final: Any  # [R] bool, the prompt ends here
    wishes: Wishes
    # where one row has all R prompts: which of them a token is of, from 1 on; 0 is padding
    segments: Any = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Drawn:
    """New tokens, [...], IDLE where there is none, and their log-probabilities by the model's own
    scores.
    """

    tokens: jax.Array
    log_probs: jax.Array | None


@dataclass(frozen=True)
class Programs:
    """What is compiled, once for all engines of a model."""

    config: MaxTextConfig
    template: Template
    rules: AxisRules

    @cached_property
    def scorer(self) -> Cached | Recomputed:
        return scorer(self.config, self.template)

    @property
    def cached(self) -> bool:
        """Whether layers keep what they need of earlier tokens."""
        return isinstance(self.scorer, Cached)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """While a program is traced: how it is laid out, and how precisely it multiplies."""
        with (
            use_rules(self.rules),
            jax.default_matmul_precision(self.config.matmul_precision.value),
        ):
            yield

    @cached_property
    def start(self) -> Any:
        return jax.jit(self.empty, static_argnums=0)

    @cached_property
    def prefill(self) -> Any:
        return jax.jit(
            self.put_prompts, static_argnames=("fresh", "reach", "kind", "scored"), donate_argnums=1
        )

    @cached_property
    def decode(self) -> Any:
        names = ("fixed", "aligned", "reach", "kind", "scored")
        return jax.jit(self.extend_slots, static_argnames=names, donate_argnums=1)

    @cached_property
    def take(self) -> Any:
        """A copy of what one page has, or, without `pages`, one slot beside pages."""

        def take(state: State, place: jax.Array, pages: bool) -> Any:
            return jax.tree.map(lambda x: x[place], part(state.caches, pages))

        return jax.jit(take, static_argnums=2)

    @cached_property
    def put(self) -> Any:
        """The state with such a copy in a page or slot."""

        def put(state: State, place: jax.Array, kept: Any, pages: bool) -> State:
            after = iter(
                jax.tree.map(lambda x, y: x.at[place].set(y), part(state.caches, pages), kept)
            )
            return replace(
                state,
                caches=[next(after) if (PAGES in each) == pages else each for each in state.caches],
            )

        return jax.jit(put, static_argnums=3, donate_argnums=0)

    def empty(self, size: CacheSize) -> State:
        zero = jnp.zeros(size.slots, jnp.int32)
        sampling = Rows(zero.astype(jnp.float32), zero, zero.astype(jnp.float32))
        ends = jnp.full((size.slots, MOST_ENDS), IDLE, jnp.int32)
        wishes = Wishes(zero, zero.astype(jnp.uint32), ends, sampling)
        return State(self.scorer.empty(size), zero, jnp.full(size.slots, IDLE, jnp.int32), wishes)

    def put_prompts(
        self,
        weights: Any,
        state: State,
        prompts: Prompts,
        *,
        fresh: bool,
        reach: int,
        kind: Kind,
        scored: bool,
    ) -> tuple[State, Drawn]:
        """The state with the prompts in it, and the first token [R] of those that are complete."""
        most = (
            0 if prompts.segments is None else prompts.slots.shape[0] + 1
        )  # with the padding after them
        inputs = LayerInputs(
            prompts.positions,
            prompts.segments,
            fresh=fresh,
            table=prompts.table,
            reach=reach,
            max_segments=most,
        )
        scores, caches = self.scorer.of_prompts(
            weights, state.caches, prompts.ids, inputs, prompts.slots
        )
        place = at_last(prompts.positions, inputs) + 1
        drawn, going = choose(scores, place, prompts.wishes, kind, scored, prompts.final)

        def put(old: jax.Array, new: jax.Array) -> jax.Array:
            return old.at[prompts.slots].set(new, mode="drop")

        position = jnp.where(going, place, IDLE)
        values = (drawn.tokens, position, prompts.wishes)
        token, position, wishes = jax.tree.map(
            put, (state.token, state.position, state.wishes), values
        )
        return State(caches, token, position, wishes), drawn

    def extend_slots(
        self,
        weights: Any,
        state: State,
        table: jax.Array,
        halted: jax.Array,
        steps: jax.Array,
        rows: jax.Array | None,
        *,
        fixed: int,
        aligned: bool,
        reach: int,
        kind: Kind,
        scored: bool,
    ) -> tuple[State, Drawn]:
        """The state after `steps` more tokens, BLOCK at most, and the tokens [BLOCK, N]. Slots that
        are `halted` [N] do nothing any more. `fixed`: so many steps instead, known to the compiler;
        0: as said. With `rows`, slots of which none but N, which is no slot, comes twice, these
        alone are extended, in this order; and the table has theirs."""
        state = replace(state, position=jnp.where(halted, IDLE, state.position))
        whole = state
        if rows is not None:
            token, position, wishes = jax.tree.map(
                lambda x: x[rows], (state.token, state.position, state.wishes)
            )
            position = jnp.where(rows < halted.shape[0], position, IDLE)
            state = State(state.caches, token, position, wishes)
        shape = (BLOCK, state.token.shape[0])
        found = Drawn(
            jnp.full(shape, IDLE, jnp.int32), jnp.zeros(shape, jnp.float32) if scored else None
        )

        def going(carry: tuple) -> jax.Array:
            step, state, _ = carry
            return (step < steps) & jnp.any(state.position >= 0)

        def advance(carry: tuple) -> tuple:
            step, state, found = carry
            inputs = LayerInputs(state.position[:, None], table=table, aligned=aligned, reach=reach)
            ids = jnp.maximum(state.token, 0)[:, None]
            scores, caches = self.scorer.of_slots(weights, state.caches, ids, inputs)
            active = state.position >= 0
            drawn, onward = choose(scores, state.position + 1, state.wishes, kind, scored, active)
            found = jax.tree.map(lambda all, new: all.at[step].set(new), found, drawn)
            position = jnp.where(onward, state.position + 1, IDLE)
            return (
                step + 1,
                replace(state, caches=caches, token=drawn.tokens, position=position),
                found,
            )

        carry = (jnp.int32(0), state, found)
        if fixed:
            _, state, found = jax.lax.fori_loop(0, fixed, lambda _, carry: advance(carry), carry)
        else:
            _, state, found = jax.lax.while_loop(going, advance, carry)
        if rows is not None:
            token = whole.token.at[rows].set(state.token, mode="drop")
            position = whole.position.at[rows].set(state.position, mode="drop")
            state = State(state.caches, token, position, whole.wishes)
        return state, found


def choose(
    scores: jax.Array, place: jax.Array, wishes: Wishes, kind: Kind, scored: bool, active: jax.Array
) -> tuple[Drawn, jax.Array]:
    """The token of each row that follows by its scores [B, V], to stand at `place` [B], and whether
    more may follow.
    """
    keys = jax.vmap(lambda seed, place: jax.random.fold_in(jax.random.key(seed), place))(
        wishes.seed, place
    )
    token = draw(scores, keys, wishes.sampling, kind)
    log_probs = None
    if scored:
        shares = jax.nn.log_softmax(scores.astype(jnp.float32), axis=-1)
        log_probs = jnp.take_along_axis(shares, token[:, None], axis=1)[:, 0]
    right = jnp.isfinite(scores.max(axis=-1))
    token = jnp.where(active, jnp.where(right, token, BROKEN), IDLE)
    ended = jnp.any(token[:, None] == wishes.ends, axis=-1) | (place >= wishes.last) | ~right
    return Drawn(token, log_probs), active & ~ended


def part(caches: Caches, pages: bool) -> Caches:
    """Those that are in pages, or those that each slot has."""
    return [cache for cache in caches if (PAGES in cache) == pages]


def reads_in_place(config: MaxTextConfig, caches: Caches) -> bool:
    """Whether decoding reads pages where they lie, as far as they are filled: then no program need
    know how far.
    """
    plain = config.attention_type != "mla" and (
        config.use_ragged_attention or backend(config) == attention.AUTOSELECTED
    )
    pools = [cache[PAGES] for cache in caches if PAGES in cache]
    return (
        plain
        and bool(pools)
        and all(cannot_attend_pages(pool["key"].shape[-1], pool) is None for pool in pools)
    )


class Engine:
    """One state and the weights that extend it. Arguments are arrays of the host; what comes back
    is on its way.
    """

    def __init__(self, programs: Programs, weights: Any, size: CacheSize):
        self.programs, self.weights, self.size = programs, weights, size
        with programs.context():
            self.state: State = programs.start(size)
        self.aligned = size.page == 0  # slot n has page n, all of it
        # Where programs take long to compile, there are few; and in a loop that may end early, a
        # GPU waits for the host before each step.
        self.few_programs = platform(programs.rules) != "cpu"
        with programs.context():
            self.in_place = reads_in_place(programs.config, self.state.caches)

    def prefill(self, prompts: Prompts, **how: Any) -> Drawn:
        with self.programs.context():
            self.state, drawn = self.programs.prefill(self.weights, self.state, prompts, **how)
        return drawn

    def decode(
        self,
        table: np.ndarray,
        halted: np.ndarray,
        steps: int,
        rows: np.ndarray | None = None,
        **how: Any,
    ) -> Drawn:
        """`steps`: one of FIXED_STEPS, if there are to be few programs. `rows`: as many as
        `row_counts` has.
        """
        fixed = steps if self.few_programs else 0
        with self.programs.context():
            self.state, drawn = self.programs.decode(
                self.weights,
                self.state,
                table,
                halted,
                np.int32(steps),
                rows,
                fixed=fixed,
                aligned=self.aligned,
                **how,
            )
        return drawn

    def take_slot(self, slot: int) -> Any:
        return self.programs.take(self.state, np.int32(slot), False)

    def put_slot(self, slot: int, kept: Any) -> None:
        self.state = self.programs.put(self.state, np.int32(slot), kept, False)

    def read(self, page: int) -> Any:
        """What a page holds, in the host's memory."""
        return jax.device_get(self.programs.take(self.state, np.int32(page), True))

    def write(self, page: int, kept: Any) -> None:
        self.state = self.programs.put(self.state, np.int32(page), kept, True)

    def host(self, snapshot: Any) -> Any:
        return jax.device_get(snapshot)

    def clear_page(self, page: int) -> None:
        self.write(page, self.zeros(pages=True))

    def clear_slot(self, slot: int) -> None:
        self.put_slot(slot, self.zeros(pages=False))

    def zeros(self, pages: bool) -> Any:
        return jax.tree.map(
            lambda x: np.zeros(x.shape[1:], x.dtype), part(self.state.caches, pages)
        )

    @cached_property
    def has_slot_caches(self) -> bool:
        return bool(part(self.state.caches, pages=False))

    @cached_property
    def packs(self) -> bool:
        """Whether prompts may be put in one after the other in one row, which takes no padding."""
        config, rules = self.programs.config, self.programs.rules
        if not self.few_programs or self.aligned or self.has_slot_caches or rules.mesh.size > 1:
            return False
        mixers = [getattr(layer, "attention", None) for layer in layers(config)]
        plain = [mixer for mixer in mixers if isinstance(mixer, AttentionSpec)]
        if len(plain) < len(mixers) or backend(config) != attention.AUTOSELECTED:
            return False
        requests = [mixer.request(PACKED, config.dtype.value, platform(rules)) for mixer in plain]
        return all(attention.fastest_backend(request) != "dot_product" for request in requests)

    @cached_property
    def row_counts(self) -> tuple[int, ...]:
        """How many slots a program may extend, the fewest first. Where pages have all that is kept
        of a sequence, those that do nothing need not be among them."""
        slots, devices = self.size.slots, self.programs.rules.mesh.size
        some = [slots * part // 4 for part in (1, 2, 3) if slots * part % (4 * devices) == 0]
        some = [count for count in some if min(count, slots - count) >= LEAST_ROWS]
        return (slots,) if self.aligned or self.has_slot_caches else (*some, slots)

    @cached_property
    def page_bytes(self) -> int:
        """Of one page, in all layers."""
        return self.bytes_of_one(pages=True)

    @cached_property
    def slot_bytes(self) -> int:
        """Of one slot beside pages, in all layers."""
        return self.bytes_of_one(pages=False)

    def bytes_of_one(self, pages: bool) -> int:
        return sum(
            array.nbytes // array.shape[0]
            for array in jax.tree.leaves(part(self.state.caches, pages))
        )
