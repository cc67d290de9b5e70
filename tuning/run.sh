# Sourced by the scripts beside it, with a module and its flags: runs the module by the project's
# Python, from any folder.
set -euo pipefail

# Under CDPATH `cd` may print the folder, or enter another one.
root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-}
if [ -z "$python" ]; then
    python=python3
    if [ -x "$root/.venv/bin/python" ]; then
        python=$root/.venv/bin/python
    fi
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "error: Python 3.11 or newer is needed, which $python is not:" \
        "PYTHON=python3.12 bash $0 ..." >&2
    exit 2
fi
# -P: a folder named utils where the command is given does not count.
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$python" -P -m "$@"
