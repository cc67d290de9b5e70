"""pytest plugin: coverage.py's contexts say which test reaches which line of utils/, also in the
processes that a test starts; $TEST_SECONDS becomes a JSON of {test that passes: its seconds}."""

import collections
import functools
import json
import os
from pathlib import Path

import coverage
import pytest

seconds, failed = collections.Counter(), set()


def switch_context(name: str) -> None:
    coverage.Coverage.current().switch_context(name)


def current_test() -> str:
    return os.environ["PYTEST_CURRENT_TEST"].rpartition(" (")[0]


def in_context(test: str, case, *args):
    """Calls case(*args) in a rank, in the context of a test."""
    switch_context(test)
    try:
        return case(*args)
    finally:
        coverage.Coverage.current().save()  # ranks are ended by SIGKILL


def pytest_configure():
    from distributed.world import World

    run = World.run
    World.run = lambda self, case, *args: run(
        self, functools.partial(in_context, current_test(), case), *args
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    switch_context(item.nodeid)
    try:
        return (yield)
    finally:
        switch_context("")


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    """The lines that a module's fixture reaches count for all tests of the file."""
    if fixturedef.scope not in ("module", "class"):
        return (yield)
    switch_context(request.node.nodeid.split("::")[0])
    try:
        return (yield)
    finally:
        switch_context(current_test())


def pytest_runtest_logreport(report):
    seconds[report.nodeid] += report.duration
    if not report.passed:
        failed.add(report.nodeid)


def pytest_sessionfinish():
    passed = {test: round(time, 3) for test, time in seconds.items() if test not in failed}
    Path(os.environ["TEST_SECONDS"]).write_text(json.dumps(passed))
