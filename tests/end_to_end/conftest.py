"""The entry script within the test process, each time in a new folder."""

import pytest
from quick_runs import handlers_put_back, quick

import resnet50_test


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """Makes an empty folder the working directory and runs quick, and restores signal handlers."""
    monkeypatch.chdir(tmp_path)
    quick(monkeypatch)
    with handlers_put_back():
        yield


@pytest.fixture
def main():
    """The entry; a file of tests can have another one."""
    return resnet50_test.main


@pytest.fixture
def run(capfd, main):
    """run(flags) -> (exit code, output, the line of the error or '')."""

    def start(*arguments) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        errors = [line for line in err.splitlines() if line.startswith("error: ")]
        assert "Traceback" not in err and len(errors) == (code == 2), err
        return code, out, "".join(errors)

    return start


@pytest.fixture
def works(run):
    """Runs the entry, which must exit with 0; returns its output."""

    def start(*arguments) -> str:
        code, out, error = run(*arguments)
        assert code == 0, error
        return out

    return start


@pytest.fixture
def fails(run):
    """Runs the entry, which must exit with 2 and one line; returns the line."""

    def start(*arguments) -> str:
        code, _, error = run(*arguments)
        assert code == 2
        return error

    return start
