"""Level 4: the families, each a pattern of layers, and the model that embeds, runs the pattern, and
scores tokens.
"""
