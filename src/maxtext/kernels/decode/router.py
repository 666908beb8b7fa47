"""The selection of a token's experts from the router's logits by one kernel, where XLA launches
four and sorts. A Pallas kernel for NVIDIA GPUs, lowered by Triton.

Shapes: T tokens, X experts, k experts of a token.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

MAX_EXPERTS = 1024


def select_experts(
    logits: Array,
    topk: int,
    *,
    score: str,
    bias: Array | None = None,
    normalise: bool = False,
    scaling: float = 1.0,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """The indices [T, k] of the experts with the largest logits [T, X], the largest first, and
    their weights [T, k] in float32: their `score`, which is softmax, sigmoid or softmax_of_topk,
    divided by the sum of the k if `normalise`, times `scaling`. With a bias [X], experts are
    selected by score + bias. Of equal values the first is selected.
    """
    tokens, experts = logits.shape
    arrays = [logits] if bias is None else [logits, bias]
    by_token = pl.BlockSpec((None, topk), lambda t: (t, 0))
    return pl.pallas_call(
        functools.partial(
            select_program, score=score, topk=topk, normalise=normalise, scaling=scaling
        ),
        grid=(tokens,),
        in_specs=[
            pl.BlockSpec((None, experts), lambda t: (t, 0)),
            *(pl.BlockSpec((experts,), lambda t: (0,)) for _ in arrays[1:]),
        ],
        out_specs=[by_token, by_token],
        out_shape=[
            jax.ShapeDtypeStruct((tokens, topk), jnp.int32),
            jax.ShapeDtypeStruct((tokens, topk), jnp.float32),
        ],
        interpret=interpret,
        name="select_experts",
        compiler_params=triton.CompilerParams(num_warps=1, num_stages=1),
    )(*arrays)


def select_program(
    logits_ref: Ref,
    *refs: Ref,
    score: str,
    topk: int,
    normalise: bool,
    scaling: float,
) -> None:
    *bias_refs, index_ref, weight_ref = refs
    experts = logits_ref.shape[0]
    column = jnp.arange(pl.next_power_of_2(experts))
    exists = column < experts
    logits = triton.load(logits_ref.at[column], mask=exists, other=-jnp.inf).astype(jnp.float32)
    if score == "sigmoid":
        scores = jnp.where(exists, jax.nn.sigmoid(logits), 0)
    else:
        weights = jnp.where(exists, jnp.exp(logits - logits.max()), 0)
        # The sum of softmax_of_topk is that of the selected experts.
        scores = weights if score == "softmax_of_topk" else weights / weights.sum()
    values = logits
    if bias_refs:
        bias = triton.load(bias_refs[0].at[column], mask=exists, other=0.0).astype(jnp.float32)
        values = jnp.where(exists, scores + bias, -jnp.inf)
    choice = jnp.arange(pl.next_power_of_2(topk))
    indices = jnp.zeros(choice.shape, jnp.int32)
    selected = jnp.zeros(choice.shape, jnp.float32)
    for number in range(topk):
        # NaN equals nothing: then the index is out of bounds, and the weight NaN.
        index = jnp.where(values == values.max(), column, experts).min()
        weight = jnp.where(column == index, scores, 0).sum()
        weight = jnp.where(index < experts, weight, jnp.nan)
        indices = jnp.where(choice == number, index, indices)
        selected = jnp.where(choice == number, weight, selected)
        values = jnp.where(column == index, -jnp.inf, values)
    if score == "softmax_of_topk":
        selected = selected / selected.sum()
    if normalise:
        selected = selected / (selected.sum() + 1e-20)
    valid = choice < topk
    triton.store(index_ref.at[choice], indices, mask=valid)
    triton.store(weight_ref.at[choice], selected * scaling, mask=valid)
