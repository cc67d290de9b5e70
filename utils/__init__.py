"""What the entry scripts share."""

__version__ = "0.1.0"
