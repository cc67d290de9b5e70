"""Who computes the optimizer step."""
