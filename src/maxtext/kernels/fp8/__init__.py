"""Training in fp8: quantizers, matmuls of quantized operands, and sublayers fused with them."""
