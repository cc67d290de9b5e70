#!/usr/bin/env bash
# Searches settings for resnet50_test.py, from any folder: bash tuning/resnet50_tuning.sh --help
source "$(dirname -- "${BASH_SOURCE[0]}")/run.sh" tuning.entry resnet50 "$@"
