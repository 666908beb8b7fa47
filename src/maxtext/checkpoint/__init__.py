"""Level 5: weights on disk. Our weights by name, folders of them, and conversion from and to
Hugging Face.
"""
