"""Level 3: the building blocks of models, and the stack that runs any pattern of them.

Shapes: B batch, S sequence, E embedding, H query heads, K key/value heads, D head size, M MLP
hidden size, V vocabulary.
"""
