"""Texts: sources, tokens, loader."""
