"""What of PyTorch is not ours: its own tests and operators on both sides, and its new releases."""
