#!/usr/bin/env bash
# Several GPUs of one machine: the same bans and losses as on one, and how much faster.
# Options are those of benchmarks/gpus.py; PYTHON names the interpreter.
#
#     benchmarks/gpus.sh [N]                                   # default: all; writes gpus.json
#     benchmarks/gpus.sh 2 --device cpu --tiny                 # tests the script itself
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" benchmarks/gpus.py "$@"
