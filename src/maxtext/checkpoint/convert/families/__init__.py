"""One table a family: its config.json and its tensors, to ours and back."""
