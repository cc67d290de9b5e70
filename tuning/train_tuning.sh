#!/usr/bin/env bash
# Searches settings for what train.py chooses, from any folder: bash tuning/train_tuning.sh DATA
source "$(dirname -- "${BASH_SOURCE[0]}")/run.sh" tuning.entry train "$@"
