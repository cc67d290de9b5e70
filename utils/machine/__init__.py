"""What this machine has, and how PyTorch uses it."""
