#!/bin/bash
# run.sh MODEL OUT [TRAIN_SECONDS=240] [DRAFT_MODEL]
# A DSpark draft for an instruction-tuned model, from nothing, on one GPU; run from the repository root.
# Prompts, the model's own answers, training for TRAIN_SECONDS, then what the draft gains beside plain decoding, prompt
# lookup and, if it is given, a smaller DRAFT_MODEL with the same vocabulary. OUT/draft is the draft, OUT/results the
# figures. Run again, it goes on from what is there.
#
# By environment: DATA (folder of prompts, else made), PROMPTS, TOKENS (of an answer), BATCH (answers at once), BLOCK,
# LAYERS, RANK, TEXTS, ANCHORS, RATE (learning), OPTIMIZER, WIDTHS (rows of a step that are measured), MEASURED (prompts
# of a set), ANSWER (tokens of what is measured), CASE (name of the result), DEVICE, PYTHON.
[ $# -ge 2 ] || { sed -n '2,/^\[/{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2; }
set -e
M=$1; W=$2; S=${3:-240}; D=$4
PY=${PYTHON:-python3}; HERE=recipes/real_models; DEVICE=${DEVICE:-cuda}
export PYTHONPATH=$PWD/src:$PYTHONPATH PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
say() { echo "[$(date +%T)] $*"; }
soloist() { "$PY" -c "import sys; from soloist.cli import main; sys.exit(main(sys.argv[1:]))" "$@" --device "$DEVICE"; }
mkdir -p "$W"
if [ -z "$DATA" ]; then
    DATA=$W/prompts
    [ -f "$DATA/train.jsonl" ] || "$PY" $HERE/prompts.py --out "$DATA"
    [ -f "$DATA/mt-bench.jsonl" ] || "$PY" $HERE/evaluation.py --out "$DATA"
fi
say "answers, then training for $S s"
COMPILE=--compile; [ "$DEVICE" = cpu ] && COMPILE=
soloist draft train -m "$M" --data "$DATA/train.jsonl" --out "$W/draft" --seconds "$S" $COMPILE \
    --prompts "${PROMPTS:-8000}" -n "${TOKENS:-256}" --batch "${BATCH:-2048}" --temperatures 0,0,0.7 \
    --min-temperature 0.5 --block "${BLOCK:-5}" --layers "${LAYERS:-2}" --markov-rank "${RANK:-64}" \
    --texts-per-step "${TEXTS:-128}" --anchors "${ANCHORS:-32}" --lr "${RATE:-8e-3}" \
    --optimizer "${OPTIMIZER:-muon}" --save-every 1000000 --no-heads
say "trained; measuring"
SETS=(--set "held-out=$DATA/held-out.jsonl")
for name in humaneval mt-bench; do
    [ -f "$DATA/$name.jsonl" ] && SETS+=(--set "$name=$DATA/$name.jsonl")
done
"$PY" benchmarks/drafts.py --model "$M" "${SETS[@]}" --dspark "$W/draft" --widths ${WIDTHS:-4 6} --adaptive \
    ${D:+--draft-model "$D" --draft-model-widths 3 5} --lookup-width 8 --prompts "${MEASURED:-32}" \
    --tokens "${ANSWER:-128}" --device "$DEVICE" --case "${CASE:-$(basename "${M%.gguf}")-drafts}" --out "$W/results"
# Its reference reads the model once more, in fp32, if an answer parts from plain decoding's.
say "measured; checking"
soloist draft check -m "$M" --draft "$W/draft" --tokens 64 || say "the check did not pass: there will be no card"
soloist draft eval -m "$M" --draft "$W/draft" --data "$DATA/held-out.jsonl" --prompts "${MEASURED:-32}" \
    -n "${ANSWER:-128}" --temperatures 0,0.7 --distinct 0.6 --licence apache-2.0
say "done: figures in $W/results, the draft and its card in $W/draft"
