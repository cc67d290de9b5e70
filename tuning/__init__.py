"""Hyper-parameter tuning: a short search on a subset that hands over a recipe."""
