# shellcheck shell=bash
# Sourced by the other scripts: finds a Python, makes the virtual environment and installs the project into it.
#
#   PYTHON                an interpreter to use instead of searching for one
#   MAXTEXT_LITE_VENV     directory of the virtual environment (default: .venv in the repository)
#   MAXTEXT_LITE_EXTRAS   extras to install as well, such as cuda13 or tpu (comma-separated)
#
# After ensure_environment, venv_python is the interpreter with everything in it. A second call costs milliseconds: the
# stamp in the environment holds a checksum of pyproject.toml, constraints.txt and the place, and the extras installed.

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${MAXTEXT_LITE_VENV:-$repository/.venv}
venv_python=$venv/bin/python

fail() {
  echo "error: $*" >&2
  exit 1
}

# Runs a command, forwards INT, TERM and HUP to it, waits until it has ended, and returns its exit code; sets interrupted
# if there was such a signal.
run_and_forward_signals() {
  local child exit_code=0 again signalled=1
  interrupted=
  set -m # its own process group: Ctrl-C reaches it once, through us
  "$@" &
  child=$!
  set +m
  for signal in INT TERM HUP; do
    # shellcheck disable=SC2064  # the child's id is fixed now
    trap "signalled=1; interrupted=1; kill -$signal $child 2>/dev/null || true" "$signal"
  done
  while [ -n "$signalled" ]; do # a signal interrupts `wait`
    signalled=
    again=0
    wait "$child" || again=$?
    [ "$again" -eq 127 ] || exit_code=$again
  done
  trap - INT TERM HUP
  return "$exit_code"
}

is_recent_python() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then
    is_recent_python "$PYTHON" || fail "PYTHON=$PYTHON is not Python 3.11 or newer ($("$PYTHON" --version 2>&1 || true))."
    echo "$PYTHON"
    return
  fi
  for candidate in python3 python3.13 python3.12 python3.11 python; do
    if is_recent_python "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  fail "no Python 3.11 or newer was found (python3 is $(python3 --version 2>&1 || true)). Install one, or name it: PYTHON=/path/to/python3.12 $0"
}

make_venv() {
  local python
  python=$(find_python) || exit 1
  "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 ||
    fail "$python has no venv module. On Debian and Ubuntu: apt-get install python3-venv"
  echo "Making the virtual environment $venv with $("$python" --version) ..."
  run_and_forward_signals "$python" -m venv --clear "$venv"
}

# The extras that $venv has, and those that it was about to get when an installation was interrupted, unless
# MAXTEXT_LITE_EXTRAS now says which.
installed_extras() {
  {
    tail -n +2 "$venv/.maxtext_lite_installed" || true
    [ -n "${MAXTEXT_LITE_EXTRAS+set}" ] || cat "$venv/.maxtext_lite_installing" || true
  } 2>/dev/null | sed '/^base$/d; /^$/d' | sort -u
}

# ensure_environment EXTRA...: installs the project in $venv with these extras, those of MAXTEXT_LITE_EXTRAS, and those
# that it has.
ensure_environment() {
  local extras extra wanted="" stamp installing before have="" options=()
  stamp=$venv/.maxtext_lite_installed
  installing=$venv/.maxtext_lite_installing

  if [ -d "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv")" ]; then
    fail "$venv exists and is not a virtual environment. Move it away, or set MAXTEXT_LITE_VENV."
  fi
  mkdir -p "$venv"
  exec 9<"$venv"
  if command -v flock >/dev/null; then flock 9; fi # two scripts started at once: one installs, the other waits
  extras=$(printf '%s\n' "$@" "${MAXTEXT_LITE_EXTRAS:-}" "$(installed_extras)" | tr ',' '\n' | sed '/^$/d' | sort -u)

  # A checksum of everything that determines the installation: the two files and the path of the repository.
  local checksum
  checksum=$(cat "$repository/pyproject.toml" "$repository/constraints.txt" - <<<"$repository" | cksum)
  if [ -f "$stamp" ] && [ "$(head -n 1 "$stamp")" = "$checksum" ] && "$venv_python" -c '' 2>/dev/null; then
    have=$(tail -n +2 "$stamp")
  fi
  [ -n "$have" ] || wanted=1
  for extra in $extras; do
    grep -qx "$extra" <<<"$have" || wanted=1
  done

  if [ -n "$wanted" ]; then
    before=$(tail -n +2 "$stamp" 2>/dev/null || true)
    if ! "$venv_python" -m pip --version >/dev/null 2>&1; then
      "$venv_python" -m ensurepip >/dev/null 2>&1 || make_venv # an interrupted venv, or one made by uv, has no pip
    fi
    is_recent_python "$venv_python" ||
      fail "$venv has $("$venv_python" --version), but Python 3.11 or newer is needed. Remove it, or set MAXTEXT_LITE_VENV."
    echo "Installing maxtext_lite${extras:+ with $(echo "$extras" | paste -sd, -)} into $venv (once; a minute or a few) ..."
    # pip takes the half-written files of an interrupted install for installed ones: write everything again.
    if [ -f "$installing" ]; then options+=(--ignore-installed); fi
    if [ ! -t 1 ]; then options+=(--quiet); fi
    options+=(--no-compile) # of 16,000 files most are never imported; Python compiles those that are
    printf '%s\n' "$extras" >"$installing"
    printf '%s\n' unfinished "$before" >"$stamp"
    run_and_forward_signals "$venv_python" -m pip install ${options[@]+"${options[@]}"} --disable-pip-version-check \
      -c "$repository/constraints.txt" -e "$repository${extras:+[$(echo "$extras" | paste -sd, -)]}" 9<&- || {
      # An extra that cannot be installed is not tried again, unless it is asked for again.
      [ -n "$interrupted" ] || : >"$installing"
      fail "the installation failed; the lines above say why. Run the same command again to continue."
    }
    printf '%s\n' "$checksum" base "$extras" | sed '/^$/d' >"$stamp.new"
    mv "$stamp.new" "$stamp"
    rm -f "$installing"
  fi
  exec 9<&-
}
