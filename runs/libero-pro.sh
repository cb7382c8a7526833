#!/usr/bin/env bash
# The paper's protocol on the real LIBERO-PRO benchmark: eight suites, ten tasks each, with scripted skills in place of the VLA and a tiny
# planner from random weights in place of Qwen3.5-9B. Killed, the same command goes on where it was.
#
#   bash runs/libero-pro.sh                  hours on 2 cores; ends with a table, paired tests, figures and an episode
#   bash runs/libero-pro.sh --workers 16     on a larger machine: LIBERO runs one environment per worker process (1-2 GB each)
#   also: --out DIR (default out/libero-pro), --rounds N (of RL, default 6), --seed N, --suites A,B,…,
#         --evaluate N: only the first N of the 800 evaluation episodes (states outermost); later, without it, the same command adds the rest
#
# Initial states: 0 builds task memory, 1-10 evaluate, 11-44 train, 45-49 choose.
set -euo pipefail
cd "$(dirname "$0")/.."

RUN=out/libero-pro ROUNDS=6 WORKERS=2 SEED=0 LIMIT="" SUITES=""
while [ $# -gt 0 ]; do
  case $1 in --out|--rounds|--workers|--seed|--suites|--evaluate) ;; *)
    echo "error: unknown option $1; valid: --out DIR --rounds N --workers N --seed N --suites A,B --evaluate N" >&2; exit 2 ;; esac
  [ $# -ge 2 ] || { echo "error: $1 needs a value" >&2; exit 2; }
  case $1 in --rounds|--workers|--evaluate) [[ $2 =~ ^[1-9][0-9]*$ ]] || { echo "error: $1 $2: expected a whole number from 1" >&2; exit 2; } ;; esac
  case $1 in --out) RUN=$2 ;; --rounds) ROUNDS=$2 ;; --workers) WORKERS=$2 ;; --seed) SEED=$2 ;; --suites) SUITES=$2 ;; --evaluate) LIMIT="--limit $2" ;; esac
  shift 2
done
. ./setup.sh libero
ALL=libero_object_swap,libero_object_task,libero_goal_swap,libero_goal_task,libero_spatial_swap,libero_spatial_task,libero_10_swap,libero_10_task
SUITES=${SUITES:-$ALL}
LIMITS="--workers $WORKERS --seed $SEED"
WORDS="top rim handle pick place locate finish"                       # stay single tokens in the tiny tokenizer
START=$SECONDS

# 0  The teacher explores state 0 and writes task memory, then plays training states with it. It follows the grasp that memory names in 40 % of
#    its picks (--grasp-skill): room for RL. 10 turns for the teacher, of which it spends one or two on memory; 8 for everybody else.
python collect.py --suites $SUITES --inits 11-20 --grasp-skill 0.4 --turns 10 $LIMITS --output $RUN/teacher
[ -e $RUN/base/manifest.json ] || python tiny.py --calls $RUN/teacher --isolate $WORDS --vocab 768 --seed $SEED --output $RUN/base

# 1  Student contexts and targets, then L_SFT.
[ -e $RUN/rewrite/manifest.json ] || python rewrite.py --teacher $RUN/teacher --student $RUN/base --output $RUN/rewrite
python sft.py --model $RUN/base --data $RUN/rewrite/sft.jsonl --output $RUN/sft --seed $SEED --threads 2 \
  --optimizer muon --lr 4e-3 --schedule wsd --warmup 50 --weight-decay 0.05 --global-batch 16 --epochs 8 --log-every 50

# 2  Validation states choose the tasks of RL (neither always nor never solved); then rounds of rollouts and L_RL on training states.
PLAY="--turns 8 --max-tokens 64 $LIMITS"
python eval.py run --model $RUN/sft --suites $SUITES --inits 45-47 --sampling train $PLAY --output $RUN/validation
policy=$RUN/sft previous="" state=() played=()
for round in $(seq 1 $ROUNDS); do
  if [ -n "$previous" ]; then state=(--previous $previous); elif [ $round -gt 1 ]; then state=(--fresh-optimizer); fi
  python rollout.py --model $policy --suites $SUITES --inits 11-44 --groups 48 --attempts 6 --round $round --pool-report $RUN/validation/report.json \
    $PLAY --output $RUN/round-$round
  python rl.py --rollouts $RUN/round-$round --model $policy "${state[@]}" --round $round --rounds $ROUNDS \
    --lr 5e-4 --schedule linear --warmup 4 --steps-per-round 2 --seed $SEED --threads 2 --output $RUN/rl-$round
  if [ -e $RUN/rl-$round/config.json ]; then policy=$RUN/rl-$round previous=$RUN/rl-$round; fi      # else every group was alike
  played+=($RUN/round-$round)
done

# 3  Evaluation on states 1-10 of all tasks, run once: SFT, the last round, base; the teacher with and without its memory; the executor's ceiling.
SHARE="--suites $SUITES --inits 1-10 $LIMIT"
python eval.py run --model $RUN/sft $SHARE --sampling train $PLAY --output $RUN/eval/sft
python eval.py run --model $policy $SHARE --sampling train $PLAY --output $RUN/eval/rl
python eval.py compare $RUN/eval/sft $RUN/eval/rl --output $RUN/eval/compare
python eval.py run --model $RUN/base $SHARE --sampling train $PLAY --output $RUN/eval/base
python eval.py run --expert perfect --noise 0 $SHARE --turns 16 $LIMITS --output $RUN/eval/ceiling
python eval.py run --expert memory --teacher-run $RUN/teacher $SHARE --turns 10 $LIMITS --output $RUN/eval/teacher-memory
python eval.py run --expert alone --teacher-run $RUN/teacher $SHARE --turns 8 $LIMITS --output $RUN/eval/teacher-alone
python eval.py table $RUN/eval/{base,sft,rl} --names base SFT RL --rounds "${played[@]}" --output $RUN/eval
python eval.py table $RUN/eval/teacher-{alone,memory} --names "teacher alone" "teacher, memory" --output $RUN/eval/teachers
python eval.py table $RUN/eval/ceiling --names "perfect plan, noise 0" --output $RUN/eval/ceiling/table
film=${SUITES##*,} task=0                                             # an episode to look at, from a validation state
case ,$SUITES, in *,libero_goal_swap,*) film=libero_goal_swap task=3 ;; esac
python eval.py run --model $policy --suites $film --tasks $task --inits 45 --sampling train $PLAY --video $film/$task:45 --output $RUN/eval/episode
python - $RUN <<'PY'
import json, pathlib, sys
counts = [json.loads(p.read_text())["counts"] for p in pathlib.Path(sys.argv[1]).rglob("manifest.json")]
played = [c for c in counts if "ends" in c]
print(f"cost: {sum(c['episodes'] for c in played)} episodes, {sum(c['calls'] for c in played)} calls, "
      f"{sum(c['seconds'] for c in played) / 3600:.2f} h of the stages that play")
PY
echo "libero-pro.sh: $((SECONDS - START)) s of this command with $WORKERS workers; table $RUN/eval/table.md, figures beside it"
