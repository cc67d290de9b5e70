"""Pictures: sources, decoding, loader."""
