"""CPU cores, host memory, and settings of PyTorch's backends."""
