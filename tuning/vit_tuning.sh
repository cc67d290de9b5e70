#!/usr/bin/env bash
# Searches settings for vit_test.py, from any folder: bash tuning/vit_tuning.sh --help
source "$(dirname -- "${BASH_SOURCE[0]}")/run.sh" tuning.entry vit "$@"
