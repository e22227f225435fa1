#!/usr/bin/env bash
# N GPUs: parity of one process with N, and with two replica groups; tokens per second.
# Options are those of benchmarks/gpus.py; PYTHON names the interpreter.
#
#     benchmarks/gpus.sh 4
#     benchmarks/gpus.sh 2 --device cpu --tiny      # tests the script itself
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" benchmarks/gpus.py "$@"
