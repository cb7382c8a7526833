#!/usr/bin/env bash
# CaP-X's privileged setting on the real LIBERO-PRO benchmark: the planner writes control code against exact poses, on six suites of ten
# tasks each (Object, Goal, Spatial x swap, task). A scripted teacher writes the programs, a tiny planner from random weights learns them.
# Killed, the same command goes on where it was.
#
#   bash runs/capx-libero.sh                 hours on 2 cores; ends with a table, paired tests, figures and an episode
#   bash runs/capx-libero.sh --workers 16    on a larger machine: LIBERO runs one environment per worker process (1-2 GB each)
#   also: --out DIR (default out/capx-libero), --rounds N (of RL, default 4), --seed N,
#         --evaluate N: only the first N of the 600 evaluation episodes (states outermost); later, without it, the same command adds the rest
#
# Initial states, as everywhere: 1-10 evaluate, 11-44 train, 45-49 choose. Trial k of CaP-X's numbering is state k - 1 here.
set -euo pipefail
cd "$(dirname "$0")/.."

RUN=out/capx-libero ROUNDS=4 WORKERS=2 SEED=0 LIMIT=""
while [ $# -gt 0 ]; do
  case $1 in --out|--rounds|--workers|--seed|--evaluate) ;; *)
    echo "error: unknown option $1; valid: --out DIR --rounds N --workers N --seed N --evaluate N" >&2; exit 2 ;; esac
  [ $# -ge 2 ] || { echo "error: $1 needs a value" >&2; exit 2; }
  case $1 in --rounds|--workers|--evaluate) [[ $2 =~ ^[1-9][0-9]*$ ]] || { echo "error: $1 $2: expected a whole number from 1" >&2; exit 2; } ;; esac
  case $1 in --out) RUN=$2 ;; --rounds) ROUNDS=$2 ;; --workers) WORKERS=$2 ;; --seed) SEED=$2 ;; --evaluate) LIMIT="--limit $2" ;; esac
  shift 2
done
. ./setup.sh libero
SUITES=libero_object_swap,libero_object_task,libero_goal_swap,libero_goal_task,libero_spatial_swap,libero_spatial_task
LIMITS="--harness code --workers $WORKERS --seed $SEED"
PLAY="--turns 4 --max-tokens 400 $LIMITS"                             # four programs an episode
START=$SECONDS

# 0  The teacher's programs on training states. It takes the right grasp in half of its picks (--grasp-skill): room for RL.
python collect.py --suites $SUITES --inits 11-17 --grasp-skill 0.5 $PLAY --output $RUN/teacher
[ -e $RUN/base/manifest.json ] || python tiny.py --calls $RUN/teacher --vocab 1536 --seed $SEED --output $RUN/base

# 1  Its replies as they are, then L_SFT.
[ -e $RUN/reuse/manifest.json ] || python reuse.py --teacher $RUN/teacher --student $RUN/base --output $RUN/reuse
python sft.py --model $RUN/base --data $RUN/reuse/sft.jsonl --output $RUN/sft --seed $SEED --threads 2 \
  --optimizer muon --lr 4e-3 --micro-tokens 2560 --schedule wsd --warmup 30 --weight-decay 0.05 --global-batch 16 --epochs 10 --log-every 50

# 2  Validation states choose the tasks of RL (neither always nor never solved); then rounds of rollouts and L_RL on training states.
python eval.py run --model $RUN/sft --suites $SUITES --inits 45-47 --sampling train $PLAY --output $RUN/validation
policy=$RUN/sft previous="" state=() played=()
for round in $(seq 1 $ROUNDS); do
  if [ -n "$previous" ]; then state=(--previous $previous); elif [ $round -gt 1 ]; then state=(--fresh-optimizer); fi
  python rollout.py --model $policy --suites $SUITES --inits 11-44 --groups 20 --attempts 6 --round $round --pool-report $RUN/validation/report.json \
    $PLAY --output $RUN/round-$round
  python rl.py --rollouts $RUN/round-$round --model $policy "${state[@]}" --round $round --rounds $ROUNDS \
    --lr 2e-4 --micro-tokens 2560 --schedule linear --warmup 2 --steps-per-round 2 --seed $SEED --threads 2 --output $RUN/rl-$round
  if [ -e $RUN/rl-$round/config.json ]; then policy=$RUN/rl-$round previous=$RUN/rl-$round; fi      # else every group was alike
  played+=($RUN/round-$round)
done

# 3  Evaluation on states 1-10, run once: SFT, the last round, base; the teacher's programs with the right grasps.
SHARE="--suites $SUITES --inits 1-10 $LIMIT"
python eval.py run --model $RUN/sft $SHARE --sampling train $PLAY --output $RUN/eval/sft
python eval.py run --model $policy $SHARE --sampling train $PLAY --output $RUN/eval/rl
python eval.py compare $RUN/eval/sft $RUN/eval/rl --output $RUN/eval/compare
python eval.py run --model $RUN/base $SHARE --sampling train $PLAY --output $RUN/eval/base
python eval.py run --expert perfect $SHARE --turns 4 $LIMITS --output $RUN/eval/perfect
python eval.py table $RUN/eval/{base,sft,rl,perfect} --names base SFT RL "right programs" --rounds "${played[@]}" --output $RUN/eval
python eval.py run --model $policy --suites libero_object_swap --tasks 0 --inits 45 --sampling train $PLAY --video libero_object_swap/0:45 --output $RUN/eval/episode
python - $RUN <<'PY'
import json, pathlib, sys
run = pathlib.Path(sys.argv[1])
tasks = lambda path, solved=True: {e["task"] for line in open(run / path / "episodes.jsonl") if (e := json.loads(line))["reward"] or not solved}
trained = set().union(*(tasks(p.relative_to(run), False) for p in run.glob("round-*")))
print(f"of 60 tasks: {len(tasks('teacher'))} with teacher successes, {len(trained)} in RL rollouts, {len(tasks('eval/rl', False))} evaluated, "
      f"solved at least once there: {len(tasks('eval/sft'))} by SFT, {len(tasks('eval/rl'))} by RL, {len(tasks('eval/perfect'))} by the right programs")
PY
echo "capx-libero.sh: $((SECONDS - START)) s of this command with $WORKERS workers; table $RUN/eval/table.md, figures beside it"
