"""Names a test the moment it has failed; pytest itself does so when all have ended.

A plugin of pytest, for conftest.py.
"""

import pytest


class FailuresAtOnce:
    def __init__(self, config: pytest.Config):
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = crash.message.partition("\n")[0] if crash else report.when
            terminal.write(f"\nFAILED {report.nodeid} - {why}\n", flush=True, red=True)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # pytest-xdist's workers report to this process
        config.pluginmanager.register(FailuresAtOnce(config))
