#!/usr/bin/env bash
# Trains muse-spark-nano and its drafter, in calls of a few minutes each:
#   tools/train/run.sh RUN OUT [MINUTES]
# RUN holds the state and must stay on the machine's disk; OUT gets what is worth bringing back.
# A call works for about MINUTES (default 7) and exits with 75 until everything is done, then with 0:
# call it again until then. Every call leaves the weights as they are in OUT, whole.
# Settings: RECIPE=nano TARGET_MINUTES=11 DRAFT_MINUTES=7 PYTHON=python3 DEVICE= (as torch finds)
# WEIGHTS= a model folder to begin the target with; TARGET_MINUTES=0 takes it as it is.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ $# -ge 2 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 2; }
run=$1 out=$2 minutes=${3:-7}
python=${PYTHON:-python3} recipe=${RECIPE:-nano} device=${DEVICE:+--device $DEVICE}
weights=${WEIGHTS:+--weights $WEIGHTS}
export PYTHONUNBUFFERED=1 PYTHONPATH=. TOKENIZERS_PARALLELISM=false
export TORCHINDUCTOR_CACHE_DIR=$run/compiled
mkdir -p "$run" "$out"
if [ -n "${WEIGHTS:-}" ] && [ ! -e "$run/tokenizer.json" ]; then # weights go with their vocabulary
  cp "$WEIGHTS/tokenizer.json" "$run/"
fi
end=$((SECONDS + ${minutes%.*} * 60))

left() { # whole minutes of this call that are left
  echo $(((end - SECONDS) / 60))
}

bring_back() { # what OUT should hold now
  cp -f "$run"/*.jsonl "$run"/recipe.json "$run"/settings.json "$out"/ 2>/dev/null || true
  [ -e "$run/target.pt" ] || return 0
  rm -rf "$run/release" "$run/bf16"
  "$python" -m tools.train.export "$run" "$run/release"
  tar -cf "$out/release.tar" -C "$run" release
  if [ ! -e "$run/target.done" ]; then # to go on from, should the machine vanish
    "$python" -m tools.train.export "$run" "$run/bf16" --bf16
    tar -cf - -C "$run" bf16 | split -b 12M - "$out/bf16.tar."
  fi
}

stopped() {
  bring_back
  echo 'stopped in time: the same command again goes on'
  exit 75
}

stage() { # NAME MINUTES OPTIONS: the steps of one job that fit, then on with them
  local name=$1 code=0
  [ ! -e "$run/$name.done" ] || return 0
  # shellcheck disable=SC2086
  "$python" -m tools.train.probe "$run" "$name" --recipe "$recipe" --minutes "$2" $device
  [ "$(left)" -ge 1 ] || stopped
  # shellcheck disable=SC2086
  "$python" -m "tools.train.$name" "$run" --minutes "$(left)" $device "${@:3}" || code=$?
  [ "$code" -ne 75 ] || stopped
  [ "$code" -eq 0 ] || exit "$code"
  touch "$run/$name.done"
}

if [ "${TARGET_MINUTES:-}" = 0 ]; then
  # shellcheck disable=SC2086
  "$python" -m tools.train.target "$run" --recipe "$recipe" $weights --steps 0 $device
  touch "$run/target.done"
fi
# shellcheck disable=SC2086
stage target "${TARGET_MINUTES:-11}" $weights
stage draft "${DRAFT_MINUTES:-7}"
bring_back
rm -f "$out"/bf16.tar.*
echo "done: $out/release.tar; unpack it as gpurt/models/nano, then: python -m tools.train.evaluate --card"
