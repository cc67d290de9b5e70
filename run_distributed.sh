#!/usr/bin/env bash
# Starts an entry script on many processes, GPUs or nodes: see --help and docs/distributed.md.
set -euo pipefail

help() {
    cat <<'TEXT'
bash run_distributed.sh                            the first run: ResNet-50 with NGD and meta-mixup
                                                   on all GPUs, or a demo on two CPU processes
bash run_distributed.sh ENTRY [--flag value ...]   any entry script with any of its flags
bash run_distributed.sh --flag value ...           resnet50_test.py with these flags
bash run_distributed.sh ENTRY --help               the flags of an entry
bash run_distributed.sh --check                    checks GPUs, packages and network: do they work,
                                                   and how fast

Environment:
  NPROC            processes on this node (default: its number of GPUs; without GPUs 1, or 2 with
                   --check or without any arguments)
  NNODES           number of nodes, or a range such as 1:4 (default: 1)
  NODE_RANK        number of this node, from 0; node 0 hosts the rendezvous (default: by its name)
  HOSTFILE         file of nodes, a line for each as in "node1 slots=8": starts them all by ssh
  RDZV_ENDPOINT    host:port of the rendezvous, the same on all nodes; needed with several
  RDZV_ID          name of the run, the same on all nodes (default: training)
  JOIN_TIMEOUT     seconds for which a node waits for the others (default: 600)
  MAX_RESTARTS     restarts after failures before the run is given up (default: 3)
  OMP_NUM_THREADS  CPU threads of each process (default: cores per process)
  PYTHON           the interpreter (default: .venv/bin/python next to this script, else python3)
  LOGLEVEL         INFO shows torchrun's own log

In a Slurm allocation nodes, GPUs and cores are read from Slurm:
  srun --ntasks-per-node=1 bash run_distributed.sh ENTRY --output FOLDER ...

Exit codes: 0 done; 1 a check of --check has failed, the other nodes are lost, or a process failed
with exit code 1; 2 a flag, a variable or the data is wrong; 129, 130, 143 saved and stopped by
SIGHUP, SIGINT, SIGTERM; 128 + n a process was killed by signal n; otherwise the code of the process
that failed first. More: docs/distributed.md
TEXT
}

script=$(readlink -f -- "${BASH_SOURCE[0]}" 2>/dev/null || echo "${BASH_SOURCE[0]}")
# Under CDPATH `cd` may print the folder, or enter another one.
root=$(CDPATH='' cd -- "$(dirname -- "$script")" && pwd)
case "${1-}" in
-h | --help)
    help
    exit 0
    ;;
esac

if [ ! -d "$root/utils/launch" ]; then
    # sbatch runs a copy of the script, in a folder of Slurm's.
    root=${SLURM_SUBMIT_DIR:-/nowhere}
    if [ ! -d "$root/utils/launch" ]; then
        echo "error: the project is not next to this copy of run_distributed.sh; in a job script" \
            "for sbatch, start it with: srun bash /path/to/run_distributed.sh ..." >&2
        exit 2
    fi
fi

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
