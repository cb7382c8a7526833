#!/usr/bin/env bash
# The whole pipeline on two CPU cores: from a randomly initialised tiny planner to an RL checkpoint, on MuJoCo tabletop.
#
#   bash run.sh                 about 10 minutes after installation; ends with a table, a paired test, a figure and an episode
#   bash run.sh --quick         2 minutes, every stage for real, far too little training for a claim
#   bash run.sh --harness code  20 minutes; the planner writes control code (CaP-X's shape) in place of calling skills; same stages, same trainer
#   bash run.sh --seed 1        another seed: other weights, other samples, another result
#   bash run.sh --grasp-skill 1 the teacher without its handicap (--out keeps the arms apart)
#   also: --rounds N (of RL), --out DIR (default out/tabletop-seed<N>, with --harness code out/tabletop-code-seed<N>)
#
# Killed, the same command goes on where it was: each stage skips what it has finished.
set -euo pipefail
cd "$(dirname "$0")"

SEED=0 OUT="" GRASP=0.3 QUICK="" ROUNDS="" HARNESS=skills
while [ $# -gt 0 ]; do
  case $1 in
    --quick) QUICK=1; shift; continue ;;
    --seed|--out|--grasp-skill|--rounds|--harness) [ $# -ge 2 ] || { echo "error: $1 needs a value" >&2; exit 2; } ;;
    *) echo "error: unknown option $1; valid: --quick --harness skills|code --seed N --out DIR --grasp-skill Q --rounds N" >&2; exit 2 ;;
  esac
  case $1 in --seed) SEED=$2 ;; --out) OUT=$2 ;; --grasp-skill) GRASP=$2 ;; --rounds) ROUNDS=$2 ;;
    --harness) HARNESS=$2 ;; esac
  shift 2
done
case $HARNESS in skills|code) ;; *) echo "error: --harness $HARNESS; valid: skills, code" >&2; exit 2 ;; esac
. ./setup.sh
CODE=${HARNESS#skills}                                                          # empty, or "code"
RUN=${OUT:-out/tabletop${CODE:+-code}${QUICK:+-quick}-seed$SEED}
SUITES=tabletop_base,tabletop_swap,tabletop_task
WORDS="red green blue white black yellow mug pan jug jar pot tray bowl box"     # stay single tokens in the tiny tokenizer
LIMITS="--harness $HARNESS --concurrency 24"                                    # many episodes share a forward
SUCCESSES=2200 PER_ROUND=64 EVAL="--inits 1-10"
# Short tasks. Prompts of control code hold the API: a larger vocabulary makes 60 tokens of it; small micro-batches of like rows pad less.
if [ -n "$CODE" ]; then LIMITS+=" --turns 6" TOKENS=320 VOCAB=1024 MICRO=2560; else LIMITS+=" --turns 14" TOKENS=64 VOCAB=512 MICRO=8192; fi
if [ -n "$QUICK" ]; then SUCCESSES=320 PER_ROUND=8 ROUNDS=${ROUNDS:-2} EVAL="--inits 1-10 --limit 60"; fi
ROUNDS=${ROUNDS:-10}
START=$SECONDS

# 0  A teacher with memory solves tasks; every call is recorded. It knows the right grasp in $GRASP of its picks: room for RL.
python collect.py --suites $SUITES --inits 11-44,100-999 --target-successes $SUCCESSES --grasp-skill "$GRASP" $LIMITS --seed "$SEED" \
  --output "$RUN/teacher"

#    The planner: a tokenizer for the recorded text, random weights.
[ -e "$RUN/base/manifest.json" ] || python tiny.py --calls "$RUN/teacher" --isolate $WORDS --vocab $VOCAB --seed "$SEED" --output "$RUN/base"

# 1  Targets. Skills: what a student without memory would have seen, and responses that do not lean on memory; code: the teacher's responses as they are.
#    Then L_SFT. (Larger models: torchrun --nproc_per_node N sft.py …;
#    at 0.46M parameters one process with two threads is twice as fast as two ranks.)
STAGE=rewrite
if [ -n "$CODE" ]; then STAGE=reuse; fi
[ -e "$RUN/$STAGE/manifest.json" ] || python $STAGE.py --teacher "$RUN/teacher" --student "$RUN/base" --output "$RUN/$STAGE"
python sft.py --model "$RUN/base" --data "$RUN/$STAGE/sft.jsonl" --output "$RUN/sft" --seed "$SEED" --threads 2 \
  --optimizer muon --lr 4e-3 --micro-tokens $MICRO --schedule wsd --warmup 50 --weight-decay 0.05 --global-batch 16 --epochs 2 --log-every 50

# 2  Rounds of rollouts and L_RL. Groups of six share a start state; each round draws new ones and continues the last round's optimizer.
policy=$RUN/sft previous="" state=() played=()
for round in $(seq 1 "$ROUNDS"); do
  # Groups that are all alike train nothing and leave no checkpoint; the first round that does train starts the optimizer.
  if [ -n "$previous" ]; then state=(--previous "$previous"); elif [ "$round" -gt 1 ]; then state=(--fresh-optimizer); fi
  python rollout.py --model "$policy" --suites $SUITES --inits 11-44,1000-9999 --groups $PER_ROUND --attempts 6 --round "$round" \
    $LIMITS --max-tokens $TOKENS --seed "$SEED" --output "$RUN/round-$round"
  python rl.py --rollouts "$RUN/round-$round" --model "$policy" "${state[@]}" --round "$round" --rounds "$ROUNDS" \
    --lr 4e-4 --micro-tokens $MICRO --schedule linear --warmup 4 --steps-per-round 2 --seed "$SEED" --threads 2 --output "$RUN/rl-$round"
  if [ -e "$RUN/rl-$round/config.json" ]; then policy=$RUN/rl-$round previous=$RUN/rl-$round; fi
  played+=("$RUN/round-$round")
done

# 3  Held-out initial states 1-10 of every task: base, SFT, and the last round's RL checkpoint, paired by (task, state).
for who in base sft rl; do
  model=$RUN/$who; [ $who != rl ] || model=$policy
  python eval.py run --model "$model" --suites $SUITES $EVAL --sampling train $LIMITS --max-tokens $TOKENS --seed "$SEED" --output "$RUN/eval/$who"
done
python eval.py compare "$RUN/eval/sft" "$RUN/eval/rl" --output "$RUN/eval/compare"
python eval.py table "$RUN/eval/base" "$RUN/eval/sft" "$RUN/eval/rl" --names base SFT RL --rounds "${played[@]}" --output "$RUN/eval"
python eval.py run --model "$policy" --suites tabletop_base --tasks 12 --inits 1 --sampling train $LIMITS --max-tokens $TOKENS --seed "$SEED" \
  --video tabletop_base/12:1 --output "$RUN/eval/episode"
echo "run.sh: $((SECONDS - START)) s; table $RUN/eval/table.md, curve $RUN/eval/learning.png, episode $RUN/eval/episode/episode.gif"
