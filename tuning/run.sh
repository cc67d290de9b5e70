# Sourced by the scripts beside it, with a module and its flags: runs the module by the project's
# Python, from any folder.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-}
if [ -z "$python" ]; then
    python=python3
    if [ -x "$root/.venv/bin/python" ]; then
        python=$root/.venv/bin/python
    fi
fi
# -P: a folder named utils where the command is given does not count.
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$python" -P -m "$@"
