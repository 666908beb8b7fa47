"""Level 3: the mechanism of Hugging Face mappings, for any family: rules between tensors and
weights, config.json to and from configuration keys, and quantized formats.
"""
