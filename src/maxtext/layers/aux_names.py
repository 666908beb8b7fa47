"""Names of the auxiliary outputs of layers (`inputs.Aux`): small float32 arrays, and on request the
output of attention."""

LOAD_BALANCE_LOSS = "load_balance_loss"
INDEXER_LOSS = "indexer_loss"
EXPERT_LOAD = "expert_load"  # [X], the tokens routed to each expert
MAX_LOGITS = "max_logits"  # [H], the largest attention logit of each head
ATTENTION_OUTPUT = "attention_output"  # [B, S, E], after the projection; see LayerInputs

LOSSES = (LOAD_BALANCE_LOSS, INDEXER_LOSS)  # added to the objective, summed over layers
MAXIMA = (MAX_LOGITS,)  # the maximum over microbatches; other outputs are summed
