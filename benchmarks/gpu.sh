#!/usr/bin/env bash
# One GPU, at most 8 minutes: parity with the CPU, tokens per second, memory, waits for the device.
# Options are those of benchmarks/gpu.py; PYTHON names the interpreter.
#
#     benchmarks/gpu.sh                          # writes gpu.json
#     benchmarks/gpu.sh --device cpu --tiny      # tests the script itself
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec timeout --foreground 480 "${PYTHON:-python3}" benchmarks/gpu.py --budget 420 "$@"
