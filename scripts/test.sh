#!/usr/bin/env bash
# Installs the project with its test extra (once) and runs the whole suite on CPU, on 8 simulated devices.
# --fast: the cheap tests that together touch every main claim, in about 100 seconds on two cores. Other arguments go
# to pytest:
#   scripts/test.sh tests/batching -k plan -x
set -euo pipefail
# shellcheck source=scripts/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

ensure_environment test
cd "$repository"
# One more than there are cores, as some tests wait for processes that they start.
workers=$(($(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2) + 1))
if [ "$workers" -gt 8 ]; then workers=8; fi
# The tests of a module stay together: they share what they compile. tests/conftest.py has put the longest first.
run_and_forward_signals "$venv_python" -m pytest -n "$workers" --dist loadscope --no-loadscope-reorder "$@"
