#!/usr/bin/env bash
# Sets up .venv and runs the demo; arguments go to `deltafuse demo`.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh demo
exec "${DELTAFUSE_VENV:-.venv}/bin/deltafuse" demo "$@"
