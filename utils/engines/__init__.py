"""Engines: how an optimizer step is computed."""
