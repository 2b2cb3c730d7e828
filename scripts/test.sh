#!/usr/bin/env bash
# Sets up .venv and runs the fast suite on two processes; arguments go to pytest (`-m slow` for the long tests).
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh demo train test dev
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false MPLBACKEND=Agg
exec "${DELTAFUSE_VENV:-.venv}/bin/python" -m pytest -n "${DELTAFUSE_TEST_PROCESSES:-2}" --dist worksteal --durations=15 "$@"
