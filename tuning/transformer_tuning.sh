#!/usr/bin/env bash
# Searches settings for transformer_test.py, from any folder: bash tuning/transformer_tuning.sh --help
source "$(dirname -- "${BASH_SOURCE[0]}")/run.sh" tuning.entry transformer "$@"
