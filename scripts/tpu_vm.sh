#!/usr/bin/env bash
# Trains on a Cloud TPU VM, a pod, or several slices: creates the TPU unless it exists, copies this repository to all
# workers, installs, trains, shows the log, and after a preemption resumes from the newest checkpoint. Needs gcloud,
# logged in, and for several workers an SSH agent with gcloud's key.
#
#   scripts/tpu_vm.sh up --name my-tpu --zone us-east5-b --type v6e-8 --spot -- steps=1000
#   scripts/tpu_vm.sh up ... --dry-run -- steps=1000     prints the gcloud commands, runs none
#
#   up        create, install, start and follow until the run ends; a run in progress is only followed
#   create    create the TPU, or wait until it is ready
#   install   copy the repository to all workers, and install it there
#   start     start the run on all workers; it does not depend on this computer
#   logs      follow the log of one worker (--worker, default 0) until its run ends
#   status    the state of the TPU, and of the run on each worker
#   stop      ask the run to save and end (exit code 75)
#   ssh       run the words after -- as a command on all workers
#   delete    delete the TPU and its disks
#
# Options: --name NAME             the TPU VM, or queued resource
#          --type TYPE             accelerator type, such as v5litepod-16, v5p-8 or v6e-256
#          --version VERSION       runtime version (default: that of the type)
#          --zone Z, --project P   (default: gcloud's)
#          --spot                  may be preempted; costs less
#          --queued                request a queued resource, which waits for capacity
#          --slices N              number of slices, as a queued resource; set dcn_data_parallelism=N
#          --setup COMMAND         run on every worker after the installation, for example to mount a shared disk
#          --env KEY=VALUE         environment variable of the run; may be repeated
#          --module MODULE         module to run (default: maxtext_lite.train)
#          --max-restarts N        after preemptions (default: 100)
#          --poll SECONDS          between queries of a state (default: 30)
#          --delete-at-end         delete the TPU when `up` ends, but not when it is interrupted
#          --create-flag FLAG      another flag of gcloud's create, such as --network=N; may be repeated
#          --connect-flag FLAG     another flag of gcloud's ssh and scp, such as --internal-ip; may be repeated
#          --dry-run               print the gcloud commands
#
# Exit codes of `up` and `logs` are those of the run: 0 finished, 2 wrong config, 3 non-finite loss, 75 stopped by
# `stop`, 130 stopped with nothing to save yet; 1 anything else. Ctrl-C does not touch the run.
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

name="" zone="" project="" type="" version="" module=maxtext_lite.train setup=""
spot="" queued="" slices=1 dry_run="" delete_at_end="" max_restarts=100 poll=30 worker=0
create_flags=() connect_flags=() variables=() arguments=()
scratch=""

fail() {
  echo "error: $*" >&2
  exit 2
}

say() {
  echo "tpu_vm.sh: $*"
}

usage() {
  sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
}

whole_number() { # OPTION VALUE
  case $2 in
  '' | *[!0-9]*) fail "$1 $2 is not a whole number." ;;
  esac
}

parse() {
  local option value
  while [ $# -gt 0 ]; do
    option=$1
    shift
    case $option in
    --)
      arguments=("$@")
      break
      ;;
    --spot) spot=1 ;;
    --queued) queued=1 ;;
    --delete-at-end) delete_at_end=1 ;;
    --dry-run) dry_run=1 ;;
    --name | --zone | --project | --type | --version | --module | --setup | --slices | --max-restarts | --poll | \
      --worker | --env | --create-flag | --connect-flag)
      [ $# -gt 0 ] || fail "$option needs a value."
      value=$1
      shift
      case $option in
      --name) name=$value ;;
      --zone) zone=$value ;;
      --project) project=$value ;;
      --type) type=$value ;;
      --version) version=$value ;;
      --module) module=$value ;;
      --setup) setup=$value ;;
      --slices) slices=$value ;;
      --max-restarts) max_restarts=$value ;;
      --poll) poll=$value ;;
      --worker) worker=$value ;;
      --env)
        [[ $value =~ ^[A-Za-z_][A-Za-z_0-9]*= ]] || fail "--env $value is not of the form KEY=VALUE."
        variables+=("$value")
        ;;
      --create-flag) create_flags+=("$value") ;;
      --connect-flag) connect_flags+=("$value") ;;
      esac
      ;;
    *) fail "unknown option $option. $0 --help lists the options; the run's own key=value arguments follow --." ;;
    esac
  done
  whole_number --slices "$slices"
  whole_number --max-restarts "$max_restarts"
  whole_number --poll "$poll"
  [ "$slices" -ge 1 ] || fail "--slices $slices must be at least 1. Nearest that works: 1."
  [ -n "$name" ] || fail "--name is missing: the name of the TPU."
  [[ $name =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]] || fail "--name $name is not lower-case letters, digits and hyphens."
  if [ "$slices" -gt 1 ]; then queued=1; fi
}

# The runtime version that Google names for a type: https://cloud.google.com/tpu/docs/runtimes
default_version() {
  case $type in
  v2-* | v3-* | v4-*) echo tpu-ubuntu2204-base ;;
  v5litepod-*) echo v2-alpha-tpuv5-lite ;;
  v5p-*) echo v2-alpha-tpuv5 ;;
  v6e-*) echo v2-alpha-tpuv6e ;;
  *) fail "--type $type: name its runtime with --version; \`gcloud compute tpus tpu-vm versions list\` shows them." ;;
  esac
}

# A command of gcloud's TPU group with the flags that all have; with --dry-run it is printed instead.
tpus() {
  local words=(gcloud compute tpus "$@" ${zone:+"--zone=$zone"} ${project:+"--project=$project"} --quiet)
  if [ -n "$dry_run" ]; then
    printf '%q ' "${words[@]}" | sed 's/ $//'
    echo
  else
    "${words[@]}"
  fi
}

# remote WORKERS COMMAND: runs a command line on `all` workers or on one of the first slice.
remote() {
  if [ "$slices" -gt 1 ]; then
    local nodes=0
    if [ "$1" = all ]; then nodes=all; fi
    tpus queued-resources ssh "$name" "--node=$nodes" "--worker=$1" "--command=$2" \
      ${connect_flags[@]+"${connect_flags[@]}"}
  else
    tpus tpu-vm ssh "$name" "--worker=$1" "--command=$2" ${connect_flags[@]+"${connect_flags[@]}"}
  fi
}

quoted() {
  printf '%q ' "$@" | sed 's/ $//'
}

# Prints absent, waiting, ready, stopped or gone (preempted, or failed: it must be deleted).
state() {
  local text tries
  for tries in 1 2 3 4 5; do
    if [ -n "$queued" ]; then
      text=$(tpus queued-resources describe "$name" '--format=value(state.state)' 2>"$scratch/state") || text="?"
    else
      text=$(tpus tpu-vm describe "$name" '--format=value(state)' 2>"$scratch/state") || text="?"
    fi
    case $text in
    READY | ACTIVE) echo ready ;;
    PREEMPTED | TERMINATED | SUSPENDED | FAILED) echo gone ;;
    STOPPED) echo stopped ;;
    '?')
      if ! grep -q NOT_FOUND "$scratch/state"; then # a run of days must survive a moment without network
        if [ "$tries" -lt 5 ]; then sleep "$poll"; fi
        continue
      fi
      echo absent
      ;;
    *) echo waiting ;;
    esac
    return
  done
  cat "$scratch/state" >&2
  return 1
}

need_type() {
  [ -n "$type" ] || fail "--type is missing: $name has to be created, and an accelerator type is needed for that."
  [ -n "$version" ] || version=$(default_version)
}

create() {
  local flags=(${spot:+--spot} ${create_flags[@]+"${create_flags[@]}"})
  if [ "$slices" -gt 1 ]; then
    tpus queued-resources create "$name" "--node-count=$slices" "--accelerator-type=$type" \
      "--runtime-version=$version" ${flags[@]+"${flags[@]}"}
  elif [ -n "$queued" ]; then
    tpus queued-resources create "$name" "--node-id=$name" "--accelerator-type=$type" \
      "--runtime-version=$version" ${flags[@]+"${flags[@]}"}
  else
    tpus tpu-vm create "$name" "--accelerator-type=$type" "--version=$version" ${flags[@]+"${flags[@]}"}
  fi
}

delete() {
  if [ -n "$queued" ]; then
    tpus queued-resources delete "$name" --force
  else
    tpus tpu-vm delete "$name"
  fi
}

# Returns once the TPU is ready. Deletes and recreates a preempted one, and waits for capacity.
ensure_ready() {
  local now previous=""
  if [ -n "$dry_run" ]; then
    need_type
    create
    return
  fi
  while true; do
    now=$(state)
    if [ "$now" != "$previous" ]; then say "$name: $now"; fi
    previous=$now
    case $now in
    ready) return ;;
    gone)
      need_type
      delete
      ;;
    stopped) tpus tpu-vm start "$name" ;;
    absent)
      need_type
      if ! create 2>"$scratch/errors"; then
        cat "$scratch/errors" >&2
        grep -q 'no more capacity' "$scratch/errors" || exit 1
        say "trying again in $poll seconds"
        sleep "$poll"
      fi
      ;;
    waiting) sleep "$poll" ;;
    esac
  done
}

pack() { # what git tracks or would track; without git, everything but environments and runs
  (
    cd "$repository"
    if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
      git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
        if [ -e "$file" ]; then printf '%s\0' "$file"; fi
      done | tar --null --files-from=- -czf "$1"
    else
      tar --exclude=./.git --exclude=./.venv --exclude=./runs --exclude=./.jax_cache -czf "$1" .
    fi
  )
}

install() {
  local archive=maxtext_lite.tar.gz source unpack
  source=$archive
  if [ -z "$dry_run" ]; then
    source=$scratch/$archive
    pack "$source" || return
  fi
  if [ "$slices" -gt 1 ]; then
    tpus queued-resources scp "$source" "$name:$archive" --node=all --worker=all \
      ${connect_flags[@]+"${connect_flags[@]}"} || return
  else
    tpus tpu-vm scp "$source" "$name:$archive" --worker=all ${connect_flags[@]+"${connect_flags[@]}"} || return
  fi
  unpack="rm -rf maxtext_lite && mkdir maxtext_lite && tar -xzf $archive -C maxtext_lite"
  remote all "$unpack && maxtext_lite/scripts/tpu_worker.sh install" || return
  if [ -n "$setup" ]; then remote all "$setup"; fi
}

start() {
  remote all "$(quoted env ${variables[@]+"${variables[@]}"} maxtext_lite/scripts/tpu_worker.sh start "$module" \
    ${arguments[@]+"${arguments[@]}"})"
}

# Waits up to $1 seconds for the run to end and prints one word: running, none, stopped, unreachable or an exit code.
# Of several, the most telling: a wrong config or loss, then any other failure, then a signal.
result() {
  local words code
  local script=maxtext_lite/scripts/tpu_worker.sh
  remote all "if test -x $script; then $script result $1; else echo run=none; fi; \
test ! -f maxtext_lite_run/stopped || echo run=stopped" >"$scratch/result" || true
  words=$(sed -n 's/.*run=\([a-z0-9]*\)$/\1/p' "$scratch/result")
  for code in stopped 2 3 76; do
    if grep -qx "$code" <<<"$words"; then
      echo "$code"
      return
    fi
  done
  code=$(grep -vxE '0|75|130|running|none' <<<"$words" | head -n 1) || true
  for word in "$code" running 75 130 none 0; do
    if [ -n "$word" ] && grep -qx "$word" <<<"$words"; then
      echo "$word"
      return
    fi
  done
  echo unreachable
}

follow() { # WORKER [LINES]
  remote "$1" "maxtext_lite/scripts/tpu_worker.sh follow${2:+ $2}"
}

# Follows the run to its end, with only the log on stdout; leaves the outcome in $outcome.
outcome=""
follow_to_the_end() {
  local lines=+1
  while true; do
    follow 0 "$lines" || true
    lines=5
    outcome=$(result 120)
    case $outcome in
    running)
      if [ "$(state)" != ready ]; then return; fi
      say "the connection was lost; the run continues"
      ;;
    unreachable)
      if [ "$(state)" != ready ]; then return; fi
      say "the workers do not respond; trying again in $poll seconds"
      sleep "$poll"
      ;;
    *) return ;;
    esac
  done
}

# Whether the TPU is or was being preempted. The run notices a preemption some time before the state does.
was_preempted() {
  local looks
  for looks in 1 2 3 4; do
    if [ "$(state)" != ready ]; then return 0; fi
    if [ "$looks" -lt 4 ]; then sleep "$poll"; fi
  done
  return 1
}

finish() { # EXIT_CODE
  if [ -n "$delete_at_end" ]; then delete; fi
  exit "$1"
}

# Counts a restart and ends the rest of the run on every worker; after the last restart it fails.
again() { # WHY
  restarts=$((restarts + 1))
  if [ "$restarts" -gt "$max_restarts" ]; then
    say "$1 again, after all --max-restarts $max_restarts"
    finish 1
  fi
  say "$1; restart $restarts of at most $max_restarts"
  if [ "$(state)" = ready ]; then remote all "maxtext_lite/scripts/tpu_worker.sh end 60" >/dev/null || true; fi
}

restarts=0
up() {
  case " ${arguments[*]-} " in
  *" base_output_directory="*) ;;
  *) say "note: without base_output_directory on a disk that all workers share, checkpoints stay on this TPU" ;;
  esac
  while true; do
    ensure_ready
    if [ -n "$dry_run" ]; then
      install
      start
      follow 0
      result 120 >/dev/null
      cat "$scratch/result"
      if [ -n "$delete_at_end" ]; then delete; fi
      return
    fi
    if [ "$(result 0)" != running ] && ! (install && start); then
      was_preempted || finish 1
      again "$name was preempted during the installation"
      continue
    fi
    say "the run is running on all workers; Ctrl-C detaches without stopping it"
    follow_to_the_end
    case $outcome in
    0 | 2 | 3) finish "$outcome" ;;
    stopped)
      say "the run was stopped by \`stop\`, after saving"
      finish 75
      ;;
    esac
    if was_preempted; then
      again "$name was preempted"
    elif [ "$outcome" = 75 ] || [ "$outcome" = 76 ] || [ "$outcome" = 130 ] || [ "$outcome" = lost ]; then
      again "the run was interrupted"
    else
      say "the run failed with exit code $outcome"
      remote all "maxtext_lite/scripts/tpu_worker.sh end 60" >/dev/null || true
      finish 1
    fi
  done
}

logs() {
  local code
  follow "$worker"
  [ -z "$dry_run" ] || return 0
  code=$(result 0)
  case $code in
  0 | 2 | 3) exit "$code" ;;
  stopped | 75) exit 75 ;;
  130) exit 130 ;;
  running) ;;
  *) exit 1 ;;
  esac
}

main() {
  local command=${1:-}
  case $command in
  up | create | install | start | logs | status | stop | ssh | delete) ;;
  -h | --help)
    usage
    exit 0
    ;;
  *) fail "unknown command '$command'. There are: up, create, install, start, logs, status, stop, ssh, delete." ;;
  esac
  shift
  parse "$@"
  if [ -z "$dry_run" ]; then
    command -v gcloud >/dev/null || fail "gcloud is not installed: https://cloud.google.com/sdk/docs/install"
  fi
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  trap 'echo; say "detached; the run continues. $0 logs --name $name follows it, stop ends it"; exit 130' INT
  case $command in
  up) up ;;
  create) ensure_ready ;;
  install) install ;;
  start) start ;;
  logs) logs ;;
  status)
    if [ -n "$dry_run" ]; then
      tpus tpu-vm describe "$name" '--format=value(state)'
    else
      echo "$name: $(state)"
    fi
    remote all "maxtext_lite/scripts/tpu_worker.sh result"
    ;;
  stop) remote all "maxtext_lite/scripts/tpu_worker.sh stop" ;;
  ssh) remote all "$(quoted ${arguments[@]+"${arguments[@]}"})" ;;
  delete) delete ;;
  esac
}

main "$@"
