#!/usr/bin/env bash
# Make the hard pair (see README.md) from the shipped one: PAIR/target and PAIR/drafter with their
# card, packed into TAR. On one H100 with 16 processors this takes about four minutes.
#     bash examples/arith/hard.sh PAIR TAR
# Variables change the sizes: TARGET_S, seconds of the target's training; DRAFTER_STEPS, steps of the
# drafter's at most; SAMPLES, EVALUATED and REPLAYED, numbers of responses; ACCEPT, the accept length
# of a chain of 7 at which the drafter's training stops; CAP, tokens of a response; WORKERS,
# processes that write text; SHARD, texts written at a time; PYTHON, the interpreter.
set -eu
pair=${1:?usage: bash examples/arith/hard.sh PAIR TAR}
tar=${2:?usage: bash examples/arith/hard.sh PAIR TAR}
shipped=tlt_server/demo/pair
cap=${CAP:-2560} evaluated=${EVALUATED:-6000}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONPATH=.:${PYTHONPATH:-} PYTHONUNBUFFERED=1
step() {
  echo "== $SECONDS s: $1"
  "${PYTHON:-python}" "examples/arith/$1" "${@:2}"
}
drafter() {
  echo "== $SECONDS s: tlt drafter $1"
  "${PYTHON:-python}" -m tlt_server drafter "$1" --target "$pair/target" "${@:2}"
}
pack() { tar -cf "$tar" -C "$pair" .; }

if [ -z "${KEEP_TARGET:-}" ]; then
  rm -rf "$pair"
  step train_target.py --recipe hard --start-from "$shipped" --out "$pair/target" \
    --data "$work/data" --lr 1.5e-3 --steps 100000 \
    --time-limit-s "${TARGET_S:-90}" --workers "${WORKERS:-13}" \
    --tokens-per-batch 32768 --documents 1200000 --per-shard "${SHARD:-4000}" --start-shards 13
fi
step sample.py --target "$pair/target" --out "$work/samples.safetensors" \
  --samples "${SAMPLES:-16000}" --cap "$cap"
step sample.py --target "$pair/target" --out "$work/held-out.safetensors" \
  --samples 128 --first-seed 600000000 --cap "$cap"
drafter init --out "$work/start" --start-from "$shipped/drafter" --draft-vocab 256 \
  --data "$work/samples.safetensors"
drafter train --drafter "$work/start" --out "$pair/drafter" --data "$work/samples.safetensors" \
  --record "$work/held-out.safetensors" --stop-at "${ACCEPT:-3.5}" --check-every 10 \
  --steps "${DRAFTER_STEPS:-2000}" --lr 1.5e-3 --budget 4096 --packs 8 --acceptance total-variation
pack
step evaluate.py --pair "$pair" --samples "$evaluated" --greedy-samples 0 --cap "$cap" \
  --calibration-samples $((evaluated / 2)) --replayed "${REPLAYED:-800}"
pack
echo "== $SECONDS s: done"
