"""Level 3: building blocks over weights, and the stack that runs any pattern of them.

Shapes: B batch, S sequence, E embedding, H query heads, K key/value heads, D head size, M MLP
width, V vocabulary.
"""
