"""Products of activations with float32, bf16 or int8 weights."""
