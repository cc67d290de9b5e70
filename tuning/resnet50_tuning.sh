#!/usr/bin/env bash
# Searches settings for resnet50_test.py, from any folder: bash tuning/resnet50_tuning.sh --help
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
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$python" -P -m tuning.resnet50_tuning "$@"
