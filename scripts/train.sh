#!/usr/bin/env bash
# From a bare machine to a trained model: makes the environment once, trains, and prints a sample of the model's text.
# Stop it whenever you like and run it again: training resumes from the newest checkpoint.
#
#   scripts/train.sh                                      a small model on Shakespeare's plays, minutes on a laptop
#   scripts/train.sh steps=1000 per_device_batch_size=32  any key of configs/base.yml
#   scripts/train.sh my.yml run_name=second               a config of your own
#   MAXTEXT_LITE_EXTRAS=cuda13 scripts/train.sh           on NVIDIA GPUs (or cuda12; tpu on TPUs)
#
# Exit codes are those of the training command: 0 finished, 2 wrong config or data, 3 non-finite loss, 75 stopped by a
# signal after saving, 130 stopped by a signal with nothing to save yet, 1 anything else.
set -euo pipefail
# shellcheck source=scripts/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

case ${1:-} in
-h | --help)
  sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
  exit 0
  ;;
*.yml | *.yaml)
  config=$1
  shift
  ;;
*) config=configs/base.yml ;;
esac

ensure_environment ""
if [ -z "${MAXTEXT_LITE_EXTRAS:-}" ] && command -v nvidia-smi >/dev/null; then
  echo "This machine seems to have an NVIDIA GPU; MAXTEXT_LITE_EXTRAS=cuda13 $0 trains on it."
fi

run_and_forward_signals "$venv_python" -m maxtext_lite.train "$config" "$@"

# The run directory as the training command resolved it; empty if there is no checkpoint to sample from. Without a
# sample the training has succeeded all the same.
run_directory=$("$venv_python" -c '
import sys
from maxtext_lite.train import read_arguments
config, asked, _ = read_arguments(sys.argv[1:])
has_checkpoints = config.enable_checkpointing and not (asked and asked.data_only)
print(f"{config.base_output_directory}/{config.run_name}" if has_checkpoints else "")
' "$config" "$@") || run_directory=""
if [ -n "$run_directory" ]; then
  echo
  echo "A sample (python -m maxtext_lite.generate $run_directory prompt=... for more):"
  run_and_forward_signals "$venv_python" -m maxtext_lite.generate "$run_directory" \
    prompt=ROMEO: max_new_tokens=200 temperature=0.8 || true
fi
