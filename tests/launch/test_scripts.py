"""The shell scripts and the Makefile, with a stand-in for Python: which folder they take as the
project's, and what they say without a Python that can run it."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ["run_distributed.sh", "tuning/resnet50_tuning.sh"]
# Prints what it is called with; asked by -c whether it is new enough, it says yes.
PYTHON = """#!/bin/sh
[ "$1" = -c ] || printf '%s\\n' "$PYTHONPATH" "$@"
"""
# As on Debian without the package python3-venv.
WITHOUT_VENV = """#!/bin/sh
[ "$1" = -c ] && exit 0
mkdir -p "$3/bin" && touch "$3/bin/python"
exit 1
"""
FAILS = "#!/bin/sh\necho Unknown option >&2\nexit 2\n"


@pytest.fixture
def project(tmp_path):
    """A copy of the scripts, where `readlink` knows no -f, as on older Macs."""
    project = tmp_path / "my project"
    (project / "utils" / "launch").mkdir(parents=True)
    (project / "tuning").mkdir()
    for script in (*SCRIPTS, "tuning/run.sh"):
        shutil.copy(ROOT / script, project / script)
    (tmp_path / "bin").mkdir()
    for name, text in (("python", PYTHON), ("old python", FAILS), ("readlink", FAILS)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return project


def run(project: Path, script, folder: Path, python="python", **environ):
    """(exit code, lines on stdout, stderr) of a script that is started in `folder`."""
    tools = project.parent / "bin"
    known = {name: value for name, value in os.environ.items() if "SLURM" not in name}
    known |= {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHON": str(tools / python)}
    known.pop("PYTHONPATH", None)
    ended = subprocess.run(
        ["bash", str(script), "--flag", "a value"], cwd=folder, env=known | environ,
        capture_output=True, text=True,
    )  # fmt: skip
    return ended.returncode, ended.stdout.splitlines(), ended.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_project_is_found_whatever_cdpath_says(project, script):
    """CDPATH has a folder of the same name, which `cd` would enter, and print."""
    other = project.parent / "other"
    for name in ("my project/tuning", "tuning"):
        (other / name).mkdir(parents=True)
    for folder, path in ((project.parent, f"my project/{script}"), (project, script)):
        for cdpath in (str(other), f".:{other}", ".."):
            code, out, err = run(project, path, folder, CDPATH=cdpath)
            assert (code, err) == (0, "")
            assert out[0] == str(project) and out[-2:] == ["--flag", "a value"]


@pytest.mark.parametrize("python", ["old python", "none"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_python_that_is_too_old_or_missing_is_told_in_a_line(project, script, python):
    code, out, err = run(project, script, project, python)
    assert (code, out) == (2, [])
    assert err.startswith("error: Python 3.11 or newer is needed") and err.count("\n") == 1
    assert f"PYTHON=python3.12 bash {script} ..." in err


def test_the_copy_that_sbatch_runs_finds_the_project(project):
    spool = project.parent / "spool"
    spool.mkdir()
    shutil.copy(project / "run_distributed.sh", spool / "slurm_script")
    code, out, err = run(project, spool / "slurm_script", project, SLURM_SUBMIT_DIR=str(project))
    assert (code, out[0], err) == (0, str(project), "")
    for elsewhere in ({"SLURM_SUBMIT_DIR": str(spool)}, {}):
        code, out, err = run(project, spool / "slurm_script", spool, **elsewhere)
        assert (code, out) == (2, []) and err.count("\n") == 1
        assert "srun bash /path/to/run_distributed.sh ..." in err


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_does_not_take_half_an_environment_for_a_whole(tmp_path):
    python, venv = tmp_path / "python", tmp_path / "venv"
    python.write_text(WITHOUT_VENV)
    python.chmod(0o755)
    venv.mkdir()
    (venv / "mine").touch()
    (tmp_path / "requirements.txt").touch()
    for _ in range(2):
        made = subprocess.run(
            ["make", "-f", ROOT / "Makefile", f"PYTHON={python}", f"VENV={venv}", "demo"],
            cwd=tmp_path, capture_output=True, text=True,
        )  # fmt: skip
        assert made.returncode == 2 and "Installing" not in made.stdout
        assert "apt install python3-venv" in made.stdout
        assert (venv / "mine").exists() and not (venv / "bin" / "python").exists()
