"""Shared by the tests of trackers."""

import threading

import pytest


@pytest.fixture(autouse=True)
def hook(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)  # put back after the test
