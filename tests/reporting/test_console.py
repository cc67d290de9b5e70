"""The console: whole lines beside a live bar, in any locale, even on a full disk."""

import errno
import io
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from patience import PATIENCE
from tqdm import tqdm

from utils.reporting.console import PLAIN_LINE_SECONDS, Console, duration, epoch_text

ROOT = Path(__file__).resolve().parents[2]
SPEAK = """
import sys
from pathlib import Path
from utils.reporting.console import Console
console = Console()
console.open_log(Path(sys.argv[1]))
console.live = sys.argv[2] == "live"
console.start_bar(10, 0)
console.advance(5)
console.progress("loss 1.2, 50 \\u00b5s")
console.say("Gr\\u00f6\\u00dfe \\u2713 " + sys.argv[1])
console.close()
"""


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log.txt"


def lines(log: Path) -> list[str]:
    """The lines of the log without their times."""
    return [line[20:] for line in log.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("live", ["live", "plain"])
@pytest.mark.parametrize(
    "locale",
    [{"LC_ALL": "C"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
    ids=["C", "ascii"],
)
def test_letters_that_the_locale_lacks_are_replaced(tmp_path, locale, live):
    folder = tmp_path / "Läufe mit ✓"
    folder.mkdir()
    result = subprocess.run(
        [sys.executable, "-c", SPEAK, folder / "log.txt", live],
        cwd=ROOT,
        env=os.environ | locale,
        capture_output=True,
        timeout=PATIENCE,
    )
    assert result.returncode == 0, result.stderr.decode()
    assert result.stdout.decode("utf-8").count("\n") == (1 if live == "live" else 2)
    assert "Größe ✓" in lines(folder / "log.txt")[-1]


def test_an_undecodable_file_name_can_be_printed(log, capsys):
    """A file name of undecodable bytes reaches Python as lone surrogates."""
    console = Console()
    console.open_log(log)
    console.say("run folder caf\udce9")
    console.close()
    assert "run folder caf" in capsys.readouterr().out
    assert lines(log)[0].startswith("run folder caf")


def test_early_lines_reach_the_log(log, capsys):
    console = Console()
    console.say("before the folder")
    console.open_log(log)
    console.say("after it")
    console.close()
    assert lines(log) == ["before the folder", "after it"]
    assert capsys.readouterr().out == "before the folder\nafter it\n"


def test_a_resumed_run_appends_to_its_log(log):
    for line in ("first", "second"):
        console = Console()
        console.open_log(log)
        console.say(line)
        console.close()
    assert lines(log) == ["first", "second"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_costs_the_log_and_nothing_else(capsys):
    console = Console()
    console.say("early")
    console.open_log(Path("/dev/full"))
    console.say("late")
    console.close()
    assert capsys.readouterr().out == "early\nlate\n"


def test_without_a_terminal_progress_is_a_line_now_and_then(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr("utils.reporting.console.time.monotonic", lambda: now[0])
    console = Console()
    console.live = False
    console.start_bar(100, 0)
    for second in range(int(2.5 * PLAIN_LINE_SECONDS)):
        now[0] = 100.0 + second
        console.advance(1)
        console.progress(f"at {second}")
    console.end_bar()
    printed = capsys.readouterr()
    assert printed.out.splitlines() == ["at 0", "at 10", "at 20"]
    assert printed.err == ""


def test_live_bar_stays_on_stderr(capsys):
    console = Console()
    console.live = True
    console.start_bar(100, 40)
    console.advance(10)
    console.progress("loss 0.5")
    console.say("a line")
    console.close()
    printed = capsys.readouterr()
    assert printed.out == "a line\n"
    assert "40.0/100" in printed.err


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), OSError(errno.ENXIO, "No such device")]
)
def test_a_terminal_that_is_closed_costs_the_bar_and_nothing_else(monkeypatch, error):
    class Terminal(io.StringIO):
        closed_since = False

        def write(self, text):
            if self.closed_since:
                raise error

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(sys, "stdout", Terminal())
    console = Console()
    console.live = True
    console.start_bar(100, 0)
    monkeypatch.setattr(Terminal, "closed_since", True)
    console._bar.mininterval = 0
    for _ in range(3):
        console.advance(10)
        console.progress("loss 0.5")
        console.say("a line")
    console.close()
    # tqdm's lock is free for other threads.
    thread = threading.Thread(target=lambda: tqdm(total=1, file=io.StringIO()).close(), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()


@pytest.mark.parametrize("closed", ["before the start", "now", "by the reader"])
def test_without_stdout_a_run_has_its_log(log, monkeypatch, closed):
    read, write = os.pipe()
    os.close(read)
    stream = open(write, "w")  # noqa: SIM115
    if closed != "by the reader":
        stream.close()
    monkeypatch.setattr(sys, "stdout", None if closed == "before the start" else stream)
    console = Console()
    console.open_log(log)
    console.say("a line")
    console.close()
    assert lines(log) == ["a line"]
    if closed == "by the reader":
        with pytest.raises(BrokenPipeError):  # so `say` met one, too
            stream.close()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (65, "1:05"), (3725, "1:02:05")]
)
def test_durations_are_short_texts(seconds, text):
    assert duration(seconds) == text


def test_epochs_have_decimals_only_where_they_are_not_whole():
    assert [epoch_text(epoch) for epoch in (1, 2.0, 1 / 13, 12.5, 0.999)] == [
        "1", "2", "0.08", "12.50", "1.00",
    ]  # fmt: skip
