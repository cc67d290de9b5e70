"""What the entry scripts share."""
