#!/usr/bin/env bash
# The checks that a change must pass besides the tests: ruff (lint and format), pyright and shellcheck, which are in the
# test extra and need no network once installed. With the docs extra (140 MB), the site must build without a warning.
# If OSV can be reached, known vulnerabilities of the locked versions are printed; they fail nothing.
#   scripts/check.sh          only reports
#   scripts/check.sh --fix    first lets ruff repair what it can
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
if [ -x "$venv/bin/mkdocs" ]; then
  NO_MKDOCS_2_WARNING=1 "$venv/bin/mkdocs" build --strict --quiet || failed=1
else
  echo "the site is not built; to build it: $venv_python -m pip install -e '.[docs]'"
fi
"$venv_python" scripts/audit.py || true
exit "$failed"
