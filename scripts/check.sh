#!/usr/bin/env bash
# What a change must pass besides the tests: ruff (lint and format), pyright, and shellcheck where it is installed.
#   scripts/check.sh          reports
#   scripts/check.sh --fix    lets ruff repair what it can first
set -euo pipefail
# shellcheck source=scripts/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

ensure_environment test
cd "$repository"
if [ "${1:-}" = --fix ]; then
  "$venv/bin/ruff" check --fix .
  "$venv/bin/ruff" format .
fi
failed=0
"$venv/bin/ruff" check . || failed=1
"$venv/bin/ruff" format --check . || failed=1
"$venv/bin/pyright" --pythonpath "$venv_python" || failed=1
if command -v shellcheck >/dev/null; then
  shellcheck scripts/*.sh scripts/*.sbatch .ci/run || failed=1
else
  echo "shellcheck is not installed; the shell scripts were not checked"
fi
exit "$failed"
