"""Optimizers, parameter groups and schedules."""
