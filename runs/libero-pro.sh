#!/usr/bin/env bash
# Every stage in sequence on the real LIBERO-PRO benchmark (libero_object_swap, libero_object_task), with scripted skills in place of
# the VLA. Small: it shows that the path works, its numbers claim nothing. About 5 minutes on 2 cores; the same command goes on when killed.
#
#   bash runs/libero-pro.sh [OUT]
set -euo pipefail
cd "$(dirname "$0")/.."
. ./setup.sh libero
RUN=${1:-out/libero-pro}
SUITES=libero_object_swap,libero_object_task
LIMITS="--turns 12 --max-tokens 64"
WORDS="alphabet soup cream cheese salad dressing bbq sauce ketchup tomato butter milk chocolate pudding orange juice basket"

# 20 teacher episodes, one per task: the scripted teacher must solve at least 90 % of them (its report is printed).
python collect.py --suites $SUITES --inits 11 --turns 12 --output $RUN/teacher-20
# Teacher data: memory from state 0, then training states. LIBERO runs one environment per worker process.
python collect.py --suites $SUITES --inits 11-16 --turns 12 --output $RUN/teacher
[ -e $RUN/base/manifest.json ] || python tiny.py --calls $RUN/teacher --isolate $WORDS --output $RUN/base
[ -e $RUN/rewrite/manifest.json ] || python rewrite.py --teacher $RUN/teacher --student $RUN/base --output $RUN/rewrite
torchrun --nproc_per_node 2 sft.py --model $RUN/base --data $RUN/rewrite/sft.jsonl --output $RUN/sft --threads 1 \
  --optimizer muon --lr 4e-3 --schedule wsd --warmup 50 --weight-decay 0.05 --global-batch 16 --epochs 15 --log-every 50

python rollout.py --model $RUN/sft --suites $SUITES --inits 17-44 --groups 12 --attempts 4 --round 1 $LIMITS --output $RUN/round-1
python rl.py --rollouts $RUN/round-1 --model $RUN/sft --round 1 --rounds 1 --lr 4e-4 --steps-per-round 2 --threads 2 --output $RUN/rl-1
policy=$RUN/sft
if [ -e $RUN/rl-1/config.json ]; then policy=$RUN/rl-1; fi      # every group equal: no new checkpoint, and rl.py has said so

python eval.py run --model $RUN/sft --suites $SUITES --inits 45-46 --sampling train $LIMITS --output $RUN/eval/sft
python eval.py run --model $policy --suites $SUITES --inits 45-46 --sampling train $LIMITS --output $RUN/eval/rl
python eval.py compare $RUN/eval/sft $RUN/eval/rl --output $RUN/eval/compare
