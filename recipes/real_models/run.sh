#!/bin/bash
# run.sh MODEL OUT [TRAIN_SECONDS=240] [DRAFT_MODEL]
# A DSpark draft for an instruction-tuned model, from nothing, on one GPU; run from the repository root.
# Prompts, the model's own answers, training for TRAIN_SECONDS, then what the draft gains beside plain decoding, prompt
# lookup and, if it is given, a smaller DRAFT_MODEL with the same vocabulary. OUT/draft is the draft, OUT/results the
# figures. Run again, it goes on from what is there.
#
# By environment: DATA (folder of prompts, else made), PROMPTS, TOKENS (of an answer), BATCH (answers at once), BLOCK,
# LAYERS, RANK, TEXTS, ANCHORS, RATE (learning), OPTIMIZER, WIDTHS (rows of a step that are measured), MEASURED (prompts
# of a set), ANSWER (tokens of what is measured), CASE (name of the result), END (seconds since 1970 when it has to be
# over), DEVICE, PYTHON.
M=$1; W=$2; S=${3:-240}; D=$4
PY=${PYTHON:-python3}; HERE=recipes/real_models; DEVICE=${DEVICE:-cuda}
export PYTHONPATH=$PWD/src:$PYTHONPATH PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
say() { echo "[$(date +%T)] $*"; }
left() { local n=$((${END:-$(($(date +%s) + 100000))} - $(date +%s))); echo $((n > 1 ? n : 1)); }
soloist() { timeout "$(left)" "$PY" -c "import sys; from soloist.cli import main; sys.exit(main(sys.argv[1:]))" "$@"; }
mkdir -p "$W"
if [ -z "$DATA" ]; then
    DATA=$W/prompts
    [ -f "$DATA/train.jsonl" ] || "$PY" $HERE/prompts.py --out "$DATA"
    [ -f "$DATA/mt-bench.jsonl" ] || "$PY" $HERE/evaluation.py --out "$DATA"
fi
say "training for $S s"
train() {
    soloist draft train -m "$M" --data "$DATA/train.jsonl" --out "$W/draft" --device "$DEVICE" --seconds "$S" "$@" \
        --prompts "${PROMPTS:-8000}" -n "${TOKENS:-256}" --batch "${BATCH:-2048}" --temperatures 0,0,0.7 \
        --min-temperature 0.5 --block "${BLOCK:-5}" --layers "${LAYERS:-2}" --markov-rank "${RANK:-64}" \
        --texts-per-step "${TEXTS:-128}" --anchors "${ANCHORS:-32}" --lr "${RATE:-8e-3}" \
        --optimizer "${OPTIMIZER:-muon}" --save-every 1000000 --no-heads --json
}
if [ "$DEVICE" = cpu ]; then
    train || { say "training: exit code $?"; exit 1; }
else
    # Where nothing can be compiled, steps take longer; answers are kept.
    train --compile || train || { say "training: exit code $?"; exit 1; }
fi
say "trained; measuring"
SETS=(--set "held-out=$DATA/held-out.jsonl")
for name in humaneval mt-bench; do
    [ -f "$DATA/$name.jsonl" ] && SETS+=(--set "$name=$DATA/$name.jsonl")
done
measure() {
    # Building the engines takes a while too, and so does looking at where texts part.
    local T=$(($(left) - 110)); T=$((T > 300 ? 300 : T < 20 ? 20 : T))
    timeout "$(left)" "$PY" benchmarks/drafts.py --model "$M" "${SETS[@]}" --dspark "$W/draft" --widths ${WIDTHS:-4 6} \
        --adaptive --lookup-width 8 --prompts "${MEASURED:-32}" --tokens "${ANSWER:-128}" --seconds $T \
        --device "$DEVICE" --case "${CASE:-$(basename "${M%.gguf}")-drafts}" --out "$W/results" "$@"
}
if [ -n "$D" ]; then
    measure --draft-model "$D" --draft-model-widths 3 5 || { say "without the peer: exit code $?"; measure; }
else
    measure
fi
say "measured: exit code $?"
if [ "$(left)" -gt 60 ]; then
    # Its reference reads the model once more, in fp32, if an answer parts from plain decoding's.
    END=$(($(date +%s) + $(left) - 30)) soloist draft check -m "$M" --draft "$W/draft" --device "$DEVICE" \
        --tokens 64
    say "checked: exit code $?"
fi
if [ "$(left)" -gt 15 ]; then
    soloist draft eval -m "$M" --draft "$W/draft" --data "$DATA/held-out.jsonl" --prompts "${MEASURED:-32}" \
        -n "${ANSWER:-128}" --temperatures 0,0.7 --distinct 0.6 --device "$DEVICE" --licence apache-2.0
    say "evaluated: exit code $?"
fi
