"""Which activations each remat policy saves on the device, and which it offloads to the host."""

_PROJECTIONS = ["query_proj", "key_proj", "value_proj", "kv_proj", "qkv_proj"]
_MINIMAL = [*_PROJECTIONS, "out_proj", "mlpwi_0", "mlpwi_1", "mlpwi", "mlpwo"]
# remat policy -> the tensors that it saves on the device
SAVED_ON_DEVICE = {
    "full": [],
    "save_qkv_proj": _PROJECTIONS,
    "save_out_proj": ["out_proj"],
    "save_dot_except_mlp": [*_PROJECTIONS, "out_proj"],
    "save_dot_with_context_except_mlp": [*_PROJECTIONS, "out_proj", "context"],
    "save_dot_except_mlpwi": [*_PROJECTIONS, "out_proj", "mlpwo"],
    "minimal": _MINIMAL,
    "minimal_with_context": [*_MINIMAL, "context"],
    "minimal_flash": [*_MINIMAL, "context"],
    "qkv_proj_offloaded": [],
    "minimal_offloaded": [],
}
# remat policy -> the tensors that it moves to pinned host memory
OFFLOADED = {
    "qkv_proj_offloaded": ["query_proj", "key_proj", "value_proj", "kv_proj"],
    "minimal_offloaded": _MINIMAL,
}
# the tensors whose location remat_policy=custom reads from the key of their name
CUSTOM_TENSORS = (
    "decoder_layer_input",
    "context",
    "mlpwi",
    "mlpwi_0",
    "mlpwi_1",
    "mlpwo",
    "moe_mlpwi_0",
    "moe_mlpwi_1",
    "moe_mlpwo",
    "query_proj",
    "key_proj",
    "value_proj",
    "query_wa_proj",
    "kv_wa_proj",
    "qkv_proj",
    "out_proj",
    "mla_q",
    "mla_kv",
    "attention_out",
    "engram",
)
