#!/bin/bash
# run.sh CORPUS OUT [TARGET_SECONDS=380] [DRAFT_SECONDS=560, for two side by side]
# All of soloist-nano on one GPU, from the repository root: training, its figures, both drafts, their figures.
# CORPUS is what prepare_data.py, train_tokenizer.py and prompts.py wrote. OUT/run.log says how far it is, OUT/DONE that
# it has ended; OUT/train/target is a checkpoint from the first minute on. Run again after an interruption, it goes on
# from there. Takes TARGET_SECONDS + DRAFT_SECONDS + about 480 s. PYTHON chooses the interpreter. FLAGS for
# train.py, if given, save trying which of them work.
D=$1; W=$2; T=${3:-380}; S=${4:-560}
mkdir -p "$W"; exec >> "$W/run.log" 2>&1; rm -f "$W/DONE"
export PYTHONPATH=$PWD/src:$PYTHONPATH PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
PY=${PYTHON:-python3}; HERE=recipes/nano
say() { echo "[$(date +%T)] $*"; }
soloist() { timeout $LIMIT "$PY" -c "import sys; from soloist.cli import main; sys.exit(main(sys.argv[1:]))" "$@"; }
say "start: target $T s, drafts $S s"
if ! nvidia-smi -L; then
    DEVICE=cpu; LIMIT=3600; FLAGS="--device cpu --num-tokens 512 --no-polish"
elif DEVICE=cuda; LIMIT=150; [ -z "${FLAGS+given}" ]; then
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
# Where the GPU's kernels fail, the CPU measures.
for name in target half plain; do
    for place in $DEVICE cpu; do
        [ -d "$W/train/$name" ] && timeout $LIMIT "$PY" $HERE/evaluate.py --model "$W/train/$name" --data "$D" \
            --out "$W/evaluation-$name.json" --skip-baselines --device $place
        [ -f "$W/evaluation-$name.json" ] && break
    done &
done; wait
# Each goal counts up to where it is met; of equals the first, where checkpoints of other runs may lie beside.
M=$W/train/$("$PY" - "$W" <<'P'
import json, pathlib, sys
def score(name):
    file = pathlib.Path(sys.argv[1]) / f"evaluation-{name}.json"
    if not file.is_file():
        return -1
    found = json.loads(file.read_text())
    return min(found["parsing_share"], 0.6) + min(found["distinct_4_gram_ratio_mean"], 0.6)
others = sorted(path.name for path in pathlib.Path(sys.argv[1], "train").iterdir() if path.is_dir())
print(max(["target", "half", "plain", *others], key=score))
P
)
say "measured; chosen: $M"; basename "$M" > "$W/chosen"
drafts() {
    OMP_NUM_THREADS=4 timeout $((S + 400)) "$PY" $HERE/train_drafts.py --model "$M" --prompts "$D/draft_prompts.jsonl" \
        --out "$W/drafts" --seconds "$S" --num-prompts "${DRAFT_PROMPTS:-36000}" --device $DEVICE --blocks "$@"
}
drafts; say "answers: exit code $?"
for block in 8 15; do drafts $block > "$W/drafts-$block.log" 2>&1 & done; wait
say "drafts trained"
# One at a time: steps are timed. A drafter that failed leaves an empty file.
for draft in "$W/drafts/dspark8" "$W/drafts/dspark16" mtp ngram; do
    soloist draft eval -m "$M" --draft "$draft" --data "$W/prompts.jsonl" --prompts 100 -n 128 --temperatures 0,0.7 \
        --distinct 0.6 --device $DEVICE --json > "$W/eval-$(basename "$draft").json"
    say "$draft: exit code $?"
done
# A text repeated to 2048 tokens; plain decoding beside.
for draft in "$W/drafts/dspark8" "$W/drafts/dspark16"; do
    soloist bench -m "$M" --draft "$draft" --workload looping --input-tokens "${LOOPING_TOKENS:-2048}" \
        --output-tokens 512 --repeats 3 --device $DEVICE --json > "$W/looping-$(basename "$draft").json"
done
say "end"; touch "$W/DONE"
