"""Training in fp8: quantizers, matrix products over quantized operands, and layers fused with
them.
"""
