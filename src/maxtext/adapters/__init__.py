"""Level 6: low-rank adapters (LoRA) in PEFT folders: read, written, merged, and served."""
