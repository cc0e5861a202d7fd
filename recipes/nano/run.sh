#!/bin/bash
# run.sh CORPUS OUT [TARGET_SECONDS=340] [SECONDS=1320]
# All of soloist-nano on one GPU within SECONDS, from the repository root: the target, trained for TARGET_SECONDS behind
# what compiles, its figures, both drafts in the time that is left, their figures.
# CORPUS is what prepare_data.py, train_tokenizer.py and prompts.py wrote. OUT/run.log says how far it is, OUT/DONE that
# it has ended; OUT/train/target is a checkpoint from the first minute on. Run again after an interruption, it goes on
# from there.
#
# By environment: PYTHON, the interpreter; RESERVE, seconds for the drafts' figures; PROMPTS, of drafts; MEASURED, prompts
# that are measured on; LOOPING_TOKENS.
D=$1; W=$2; T=${3:-340}; END=$(($(date +%s) + ${4:-1320})); RESERVE=${RESERVE:-110}
mkdir -p "$W"; exec >> "$W/run.log" 2>&1; rm -f "$W/DONE"
export PYTHONPATH=$PWD/src:$PYTHONPATH PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
PY=${PYTHON:-python3}; HERE=recipes/nano
say() { echo "[$(date +%T)] $*"; }
left() { local n=$((END - $(date +%s) - ${1:-0})); echo $((n > 1 ? n : 1)); }
soloist() { timeout "$(left)" "$PY" -c "import sys; from soloist.cli import main; sys.exit(main(sys.argv[1:]))" "$@"; }
if nvidia-smi -L; then
    DEVICE=cuda; FLAGS=("" "--plain" "--no-polish" "--plain --no-polish")
    DRAFT_FLAGS=("" "--fuse never --no-graphs")
else
    DEVICE=cpu; FLAGS=("--device cpu --num-tokens 512 --no-polish"); DRAFT_FLAGS=("--fuse never")
fi
say "start: target $T s"
# What fails is done without, from the last checkpoint on.
for flags in "${FLAGS[@]}"; do
    [ -f "$W/train/settings.json" ] || [ "$(left)" -lt $((RESERVE + 200)) ] && break
    if [ -f "$W/train/target/progress.json" ]; then
        rm -rf "$W/resumed"; cp -r "$W/train/target" "$W/resumed"; flags="$flags --resume $W/resumed"
    fi
    timeout "$(left $((RESERVE + 100)))" "$PY" $HERE/train.py --data "$D" --out "$W/train" --seconds "$T" $flags
    say "target: exit code $? with '$flags'"
done
[ -d "$W/train/target" ] || { touch "$W/DONE"; exit 1; }
evaluate() { # NAME FILE [FLAG..]
    local name=$1 file=$2; shift 2
    timeout "$(left)" "$PY" $HERE/evaluate.py --model "$W/train/$name" --data "$D" --out "$W/$file" --skip-baselines \
        --device $DEVICE "$@" > "$W/${file%.json}.log" 2>&1
}
if [ ! -f "$W/chosen" ]; then
    for name in plain half target; do
        [ -d "$W/train/$name" ] && evaluate $name choice-$name.json --batched --skip-likelihood &
    done; wait
    # Polishing costs acceptance: the first that meets the goals, or else what comes nearest.
    "$PY" - "$W" > "$W/chosen" <<'P'
import json, pathlib, sys
def score(name):
    file = pathlib.Path(sys.argv[1]) / f"choice-{name}.json"
    if not file.is_file():
        return -1
    found = json.loads(file.read_text())
    return min(found["parsing_share"], 0.6) + min(found["distinct_4_gram_ratio_mean"], 0.6)
print(max(["plain", "half", "target"], key=score))
P
fi
M=$W/train/$(cat "$W/chosen")
say "chosen: $M"
draft_eval() { # DRAFT PROMPTS
    soloist draft eval -m "$M" --draft "$1" --data "$W/prompts.jsonl" --prompts "$2" -n 128 --temperatures 0,0.7 \
        --distinct 0.6 --device $DEVICE --json
}
# While drafts train: the target's figures, and what drafters compile.
ahead() {
    evaluate "$(cat "$W/chosen")" "evaluation-$(cat "$W/chosen").json"
    say "target measured: exit code $?"
    for draft in ngram mtp "$W/drafts/dspark8" "$W/drafts/dspark16"; do
        case $draft in */*) until [ -f "$draft/config.json" ]; do sleep 5; done; sleep 5;; esac
        draft_eval "$draft" 1 > /dev/null
    done
}
ahead > "$W/ahead.log" 2>&1 & AHEAD=$!
for flags in "${DRAFT_FLAGS[@]}"; do
    [ "$(left)" -lt $((RESERVE + 30)) ] && break
    timeout "$(left $((RESERVE - 25)))" "$PY" $HERE/train_drafts.py --model "$M" --prompts "$D/draft_prompts.jsonl" \
        --out "$W/drafts" --seconds "$(left $RESERVE)" --num-prompts "${PROMPTS:-60000}" --device $DEVICE $flags && break
    say "drafts: exit code $? with '$flags'"
done
say "drafts trained"
# What it runs, and itself.
pkill -P $AHEAD; kill $AHEAD; wait
# One at a time: steps are timed. A drafter that failed leaves an empty file.
for draft in "$W/drafts/dspark8" "$W/drafts/dspark16" mtp ngram; do
    draft_eval "$draft" "${MEASURED:-100}" > "$W/eval-$(basename "$draft").json"
    say "$draft: exit code $?"
done
# A text repeated to 2048 tokens; plain decoding beside.
for draft in "$W/drafts/dspark8" "$W/drafts/dspark16"; do
    soloist bench -m "$M" --draft "$draft" --workload looping --input-tokens "${LOOPING_TOKENS:-2048}" \
        --output-tokens 512 --repeats 3 --device $DEVICE --json > "$W/looping-$(basename "$draft").json"
done
say "end"; touch "$W/DONE"
