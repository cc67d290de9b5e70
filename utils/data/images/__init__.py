"""Pictures: data sets, decoding, loader."""
