#!/usr/bin/env bash
# The worker's side of scripts/tpu_vm.sh, which copies the repository to ~/maxtext_lite and calls this script there:
#
#   tpu_worker.sh install            makes the environment, once, in ~/maxtext_lite_venv
#   tpu_worker.sh start MODULE ...   starts `python -m MODULE ...` in the background; it outlives the connection
#   tpu_worker.sh follow [LINES]     prints its log until it ends: all of it, or its last LINES and what follows
#   tpu_worker.sh result [SECONDS]   prints run=running, run=none, run=lost (the machine restarted) or run=EXIT_CODE,
#                                    once it has ended or SECONDS (default 0) have passed
#   tpu_worker.sh stop [SECONDS]     asks it to save and end; kills it after SECONDS (default 600)
#   tpu_worker.sh end [SECONDS]      the same, for tpu_vm.sh itself, which may start it again
#
# The log, the process id and the exit code are in ~/maxtext_lite_run.
set -euo pipefail
export MAXTEXT_LITE_VENV=${MAXTEXT_LITE_VENV:-$HOME/maxtext_lite_venv} MAXTEXT_LITE_EXTRAS=${MAXTEXT_LITE_EXTRAS-tpu}
# shellcheck source=scripts/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
run=$HOME/maxtext_lite_run

is_running() {
  [ -f "$run/pid" ] && [ ! -f "$run/exit_code" ] && kill -0 "$(cat "$run/pid")" 2>/dev/null
}

result() {
  if [ -f "$run/exit_code" ]; then
    cat "$run/exit_code"
  elif is_running; then
    echo running
  elif [ -f "$run/pid" ]; then
    echo lost
  else
    echo none
  fi
}

# The images of TPU VMs have too old a Python, or no venv module: uv, from PyPI, installs one.
find_or_install_python() {
  local suits='import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))'
  if [ -n "${PYTHON:-}" ] || python3 -c "$suits" >/dev/null 2>&1; then return; fi
  python3 -m pip install --quiet --user uv
  python3 -m uv python install --quiet 3.12
  PYTHON=$(python3 -m uv python find --system 3.12)
  export PYTHON
}

case ${1:-} in
install)
  [ -x "$MAXTEXT_LITE_VENV/bin/python" ] || find_or_install_python
  ensure_environment ""
  ;;
start)
  shift
  if is_running; then
    echo "the run is already running"
    exit 0
  fi
  rm -rf "$run"
  mkdir "$run"
  setsid nohup "$0" watch "$@" >"$run/log" 2>&1 </dev/null &
  echo "$!" >"$run/pid"
  ;;
watch)
  shift
  cd "$(dirname "${BASH_SOURCE[0]}")/.."
  # A shutdown sends SIGTERM to every process. The run must get it once: a second one would end it unsaved.
  trap : TERM
  code=0
  export PYTHONUNBUFFERED=1
  # shellcheck disable=SC2016  # $$ is the number of the process that becomes Python
  bash -c 'echo "$$" >"$0"; exec "$@"' "$run/child" "$MAXTEXT_LITE_VENV/bin/python" -m "$@" || code=$?
  echo "$code" >"$run/exit_code.new" # renamed into place: it is never seen half-written
  mv "$run/exit_code.new" "$run/exit_code"
  ;;
follow)
  [ -f "$run/log" ] || fail "there is no run on this worker."
  if is_running; then
    tail -n "${2:-+1}" -s 1 --pid="$(cat "$run/pid")" -f "$run/log"
  else
    tail -n "${2:-+1}" "$run/log"
  fi
  ;;
result)
  for ((waited = 0; waited < ${2:-0}; waited++)); do
    is_running || break
    sleep 1
  done
  code=$(result)
  case $code in
  0 | running | none | 75 | 130) ;;
  *) tail -n 20 "$run/log" >&2 ;;
  esac
  echo "run=$code"
  ;;
stop | end)
  if is_running; then
    if [ "$1" = stop ]; then touch "$run/stopped"; fi
    while is_running && [ ! -s "$run/child" ]; do sleep 0.1; done
    kill -TERM "$(cat "$run/child")"
    for ((waited = 0; waited < ${2:-600}; waited++)); do
      is_running || break
      sleep 1
    done
    if is_running; then kill -KILL "$(cat "$run/child")"; fi
    while is_running; do sleep 0.1; done
  fi
  echo "run=$(result)"
  ;;
*)
  sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
  [ "${1:-}" = --help ] || exit 2
  ;;
esac
