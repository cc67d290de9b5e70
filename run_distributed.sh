#!/usr/bin/env bash
# Starts an entry script on many processes, GPUs or nodes: see --help and docs/distributed.md.
set -euo pipefail

script=$(readlink -f -- "${BASH_SOURCE[0]}" 2>/dev/null || echo "${BASH_SOURCE[0]}")
# Under CDPATH `cd` may print the folder, or enter another one.
root=$(CDPATH='' cd -- "$(dirname -- "$script")" && pwd)
if [ ! -d "$root/utils/launch" ]; then
    # sbatch runs a copy of the script, in a folder of Slurm's.
    root=${SLURM_SUBMIT_DIR:-/nowhere}
    if [ ! -d "$root/utils/launch" ]; then
        echo "error: the project is not next to this copy of run_distributed.sh; in a job script" \
            "for sbatch, start it with: srun bash /path/to/run_distributed.sh ..." >&2
        exit 2
    fi
fi
case "${1-}" in
-h | --help)
    cat "$root/utils/launch/help.txt"
    exit 0
    ;;
esac

python=${PYTHON:-}
if [ -z "$python" ]; then
    python=python3
    if [ -x "$root/.venv/bin/python" ]; then
        python=$root/.venv/bin/python
    fi
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "error: Python 3.11 or newer is needed, which $python is not:" \
        "PYTHON=python3.12 bash run_distributed.sh ..." >&2
    exit 2
fi
# -P: a folder named utils in the current directory is not imported.
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$python" -P -m utils.launch.launcher "$@"
