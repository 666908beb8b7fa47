"""JSON schemas and a small vocabulary."""

SIZES = {
    "base_emb_dim": 32,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 1,
    "head_dim": 16,
    "base_mlp_dim": 48,
    "base_num_decoder_layers": 2,
    "vocab_size": 290,  # more than the tokenizer has
    "override_model_config": True,
    "dtype": "float32",
    "weight_dtype": "float32",
    "matmul_precision": "highest",
    "attention": "dot_product",
    "tokenizer_path": "byte",
    "max_target_length": 256,
    "per_device_batch_size": 8,
}
SCHEMAS = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "ok": {"type": "boolean"},
        },
        "required": ["name", "age", "ok"],
        "additionalProperties": False,
    },
    {
        "type": "array",
        "items": {"enum": ["red", "green", "blue"]},
        "minItems": 1,
        "maxItems": 3,
    },
    {
        "$defs": {"p": {"type": "integer", "minimum": -9, "maximum": 9}},
        "type": "object",
        "properties": {
            "a": {"$ref": "#/$defs/p"},
            "b": {"anyOf": [{"$ref": "#/$defs/p"}, {"type": "null"}]},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"d": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}$"}},
        "required": ["d"],
        "additionalProperties": False,
    },
]
