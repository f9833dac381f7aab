#!/usr/bin/env bash
# What a change must pass besides the tests: ruff (lint and format), pyright and shellcheck. All four are in the test
# extra, and need nothing from the network once they are installed. Where OSV can be reached, known vulnerabilities of the
# locked versions are printed; they fail nothing.
#   scripts/check.sh          reports
#   scripts/check.sh --fix    lets ruff repair what it can first
set -euo pipefail
# shellcheck source=scripts/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

ensure_environment test
cd "$repository"
if [ "${1:-}" = --fix ]; then
  "$venv_python" -m ruff check --fix .
  "$venv_python" -m ruff format .
fi
failed=0
"$venv_python" -m ruff check . || failed=1
"$venv_python" -m ruff format --check . || failed=1
"$venv_python" -m pyright --pythonpath "$venv_python" || failed=1
"$venv/bin/shellcheck" scripts/*.sh scripts/*.sbatch .ci/run || failed=1
"$venv_python" scripts/audit.py || true
exit "$failed"
