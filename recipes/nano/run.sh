#!/bin/bash
# run.sh CORPUS OUT [TARGET_SECONDS=450] [DRAFT_SECONDS=60, for each of two]
# All of soloist-nano on one GPU, from the repository root: training, its figures, both drafts, their figures.
# CORPUS is what prepare_data.py, train_tokenizer.py and prompts.py wrote. OUT/run.log says how far it is, OUT/DONE that
# it has ended; OUT/train/target is a checkpoint from the first minute on. Run again after an interruption, it goes on
# from there. Takes TARGET_SECONDS + 2 * DRAFT_SECONDS + about 300 s. PYTHON chooses the interpreter.
D=$1; W=$2; T=${3:-450}; S=${4:-60}
mkdir -p "$W"; exec >> "$W/run.log" 2>&1; rm -f "$W/DONE"
export PYTHONPATH=$PWD/src:$PYTHONPATH PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
PY=${PYTHON:-python3}; HERE=recipes/nano
say() { echo "[$(date +%T)] $*"; }
soloist() { timeout $LIMIT "$PY" -c "import sys; from soloist.cli import main; sys.exit(main(sys.argv[1:]))" "$@"; }
say "start: target $T s, drafts $S s each"
DEVICE=cpu; LIMIT=3600; FLAGS="--device cpu --num-tokens 512 --no-polish"
if nvidia-smi -L; then
    DEVICE=cuda; LIMIT=150
    # Everything once, the last part included: what it compiles is kept, and what fails is done without.
    for FLAGS in "" "--plain" "--no-polish" "--plain --no-polish"; do
        timeout 240 "$PY" $HERE/train.py --data "$D" --out "$W/smoke" --seconds 5 $FLAGS && break
        say "failed with '$FLAGS'"
    done
    rm -rf "$W/smoke"; say "passed with '$FLAGS'"
fi
[ -f "$W/train/target/progress.json" ] && rm -rf "$W/resumed" && cp -r "$W/train/target" "$W/resumed" && FLAGS="$FLAGS --resume $W/resumed"
[ -f "$W/train/settings.json" ] || "$PY" $HERE/train.py --data "$D" --out "$W/train" --seconds "$T" $FLAGS
say "target: exit code $?"
[ -d "$W/train/target" ] || { touch "$W/DONE"; exit 1; }
for name in target plain; do
    [ -d "$W/train/$name" ] && timeout $LIMIT "$PY" $HERE/evaluate.py --model "$W/train/$name" --data "$D" \
        --out "$W/evaluation-$name.json" --skip-baselines --device $DEVICE &
done; wait
# Each goal counts up to where it is met; of equals the one that does not loop.
M=$W/train/$("$PY" - "$W" <<'P'
import json, pathlib, sys
def score(name):
    file = pathlib.Path(sys.argv[1]) / f"evaluation-{name}.json"
    if not file.is_file():
        return -1
    found = json.loads(file.read_text())
    return min(found["parsing_share"], 0.6) + min(found["distinct_4_gram_ratio_mean"], 0.6)
print("plain" if score("plain") > score("target") else "target")
P
)
say "measured; chosen: $M"; basename "$M" > "$W/chosen"
timeout $((2 * S + 300)) "$PY" $HERE/train_drafts.py --model "$M" --prompts "$D/draft_prompts.jsonl" --out "$W/drafts" \
    --seconds "$S" --num-prompts "${DRAFT_PROMPTS:-12000}" --device $DEVICE
say "drafts: exit code $?"
for draft in ngram mtp "$W/drafts/dspark8" "$W/drafts/dspark16"; do
    soloist draft eval -m "$M" --draft "$draft" --data "$W/prompts.jsonl" --prompts 100 -n 128 --temperatures 0,0.7 \
        --distinct 0.6 --device $DEVICE --json > "$W/eval-$(basename "$draft").json" &
done; wait
say "end"; touch "$W/DONE"
