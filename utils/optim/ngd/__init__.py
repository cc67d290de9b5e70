"""Natural-gradient descent."""
