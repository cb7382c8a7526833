"""Stage 1: supervised fine-tuning on student contexts and the teacher's (rewritten) responses (SPEC.md §2, loss (3)).

Reads   sft.jsonl and images/ beside it (rewrite.py, reuse.py), a base checkpoint
Writes  OUTPUT/  a Hugging Face checkpoint · metrics.jsonl · state/ (float32 weights, optimizer state) · manifest.json
        OUTPUT/resume/step-N/  while it runs

Departures from the paper, or choices where it is silent
 1. An optimizer batch is made of whole episodes: it closes as soon as it holds --global-batch responses or more.
 2. Responses of an episode whose prompts extend each other share one forward row (batches.merge_prefix): same loss.
 3. Learning rate, batch and schedule of the paper's SFT are not published; the defaults are ours.

Killed, it continues from the newest resume/step-N on the same command; finished, it says so and exits 0. SIGTERM, SIGINT
or a file OUTPUT/STOP end it after the current step, with a resume point and exit code 4 (before the first step a SIGTERM
just ends it). torchrun turns every exit code into 1, and kills what SIGTERM did not end within 30 s: where a step and its
resume point take longer, give it --shutdown-timeout 1800, or use STOP.

    python sft.py --model run/base --data run/rewrite/sft.jsonl --output run/sft
    torchrun --nproc_per_node 8 sft.py --model Qwen/Qwen3.5-9B --data run/rewrite/sft.jsonl --output run/sft
"""

import argparse
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import torch

import checkpoint
import loss
import model
import trainer
from batches import Responses, merge_prefix, shuffled
from records import (
    at_least, BadInput, Formatter, ImageStore, policy_version, read_jsonl, run_main, save_args, sha256_file, write_manifest)


def parse_args():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    p.add_argument("--model", required=True, help="base checkpoint: a folder or a hub name")
    p.add_argument("--data", required=True, help="sft.jsonl of rewrite.py or reuse.py")
    p.add_argument("--output", required=True, help="checkpoint folder to write")
    trainer.add_arguments(p, lr=1e-5, global_batch=128)
    g = p.add_argument_group("sft")
    g.add_argument("--epochs", type=at_least(1), default=1, help="passes over the data (count)")
    g.add_argument("--max-steps", type=at_least(0), default=0,
                   help="end of the run and its schedule (optimizer steps; 0: all epochs)")
    return trainer.check_arguments(p, p.parse_args())


# ---------------------------------------------------------------------------------------------- data

def read_data(args):
    """sft.jsonl -> (Responses, counts)."""
    rows, counts = [], Counter()
    for number, row in read_jsonl(args.data, ("prompt_token_ids", "token_ids", "episode_id", "turn")):
        counts["rows"] += 1
        if not row["token_ids"]:
            counts["empty"] += 1
        elif not row["prompt_token_ids"]:
            raise BadInput(f"{args.data}:{number}: field 'prompt_token_ids' is empty; a target needs a context "
                           "(rewrite.py, reuse.py)")
        elif len(row["prompt_token_ids"]) + len(row["token_ids"]) > args.max_length:
            counts["too_long"] += 1
        else:
            counts["used"] += 1
            counts[f"source_{row.get('source', 'unknown')}"] += 1
            rows.append((row["episode_id"], row["turn"], np.array(row["prompt_token_ids"], dtype=np.int32),
                         np.array(row["token_ids"], dtype=np.int32), row.get("pictures", [])))
    if not rows:
        raise BadInput(f"{args.data}: none of {counts['rows']} rows can be used ({counts['empty']} without a target, "
                       f"{counts['too_long']} longer than --max-length {args.max_length} tokens)")
    rows.sort(key=lambda row: row[:2])                                # the order of the file does not matter
    episodes, _, prompts, outputs, pictures = zip(*rows, strict=True)
    responses = Responses(prompts, outputs, episodes, pictures, [ImageStore(Path(args.data).parent / "images")])
    counts["episodes"], counts["target_tokens"] = len(set(episodes)), int(responses.lengths.sum())
    return responses, counts


def make_batches(responses, args):
    """Optimizer batches of all epochs, each epoch in its own order: lists of response indices, an episode's by turn."""
    batches = []
    for epoch in range(args.epochs):
        batch = []
        for episode in shuffled(responses.by_episode(), args.seed, epoch):
            batch += episode
            if len(batch) >= args.global_batch:
                batches.append(batch)
                batch = []
        if batch:
            batches.append(batch)                      # the last partial batch has its own denominator
    return batches[:args.max_steps or None]


# ---------------------------------------------------------------------------------------------- main

def main():
    args = parse_args()
    output = Path(args.output)
    ranks = trainer.Ranks(args.threads)
    if ranks.on_main(lambda: checkpoint.already_whole(output, "sft", args)):
        ranks.close()
        return 0

    # ---- data
    ranks.on_main(lambda: model.checkpoint_folder(args.model))                        # a hub name: downloaded here …
    source = ranks.on_all(lambda: model.checkpoint_folder(args.model, ranks.main))    # … and, without weights, on other nodes
    responses, counts = ranks.on_all(lambda: read_data(args))
    batches = make_batches(responses, args)
    pictures = ranks.on_all(lambda: model.preflight(source, responses, args.global_batch, ranks.world, ranks.rank))
    identity = ranks.on_main(lambda: checkpoint.run_identity(args, data_sha256=sha256_file(args.data),
                                                             policy_version=policy_version(source)))
    resume, first = ranks.on_main(lambda: checkpoint.newest_resume(output, identity))
    if ranks.main:
        save_args(output, "sft", args)
        shown = " | ".join(f"{k} {v:,}" for k, v in counts.items())
        print(f"sft: {shown} | {len(batches)} steps on {ranks.world} ranks")
    checkpoint.check_shared(output, ranks)

    # ---- model and optimizer
    run = trainer.Trainer(model.load_model(source, ranks, args), args, ranks, pictures)

    # ---- state: of the killed run, else none
    if resume:
        checkpoint.load_state(resume, run)
        if ranks.main:
            print(f"sft: continuing after step {first} from {resume}")
    elif ranks.main:
        show_first(source, responses, batches[0], pictures)

    # ---- train
    metrics = trainer.Metrics(output, ranks, len(batches), args, {
        "loss": ".4f", "grad_norm": ".3f", "lr": ".2e", "tokens_per_second": ",.0f"})
    metrics.keep(first)
    steps = trainer.Steps(first, len(batches), output, ranks, "sft")
    for step in steps:
        total_tokens = int(responses.lengths[batches[step]].sum())        # over all ranks and micro-batches
        parts = []
        for micro in run.micro_batches(responses, batches[step]):
            logp = run.logp(micro)                                        # (N,)
            part, metric = loss.sft_loss(logp, torch.ones_like(logp, dtype=torch.bool), total_tokens)
            run.backward(part)
            parts.append(metric)
        lr = trainer.lr_at(args, step, step / len(batches))
        norms = run.step(lr)
        m = trainer.reduce_metrics(parts, ranks, loss.merge_metrics)
        assert m["tokens"] == total_tokens, f"{m['tokens']} targets in the micro-batches, {total_tokens} in the batch"
        metrics.log({"step": step + 1, "loss": m["nll"] / total_tokens, "lr": lr, **norms, "tokens": total_tokens,
                     "responses": len(batches[step])}, run.take_work())
        if args.save_every and (step + 1) % args.save_every == 0 and step + 1 < len(batches):
            checkpoint.save_resume(output, run, step + 1, identity)
    if steps.stopped:
        return checkpoint.stop(output, run, steps, identity)

    # ---- save
    version = checkpoint.save_checkpoint(output, run, source, {"stage": "sft"})
    if ranks.main:
        write_manifest(output, "sft", args, {**counts, "steps": run.steps, "policy_version": version})
        shutil.rmtree(output / "resume", ignore_errors=True)
        print(f"sft: {run.steps} steps -> {output}, policy version {version}")
    ranks.close()
    steps.release()
    return 0


def show_first(source, responses, batch, pictures):
    """The first row of the first batch, targets marked: look at it, wrong masks are seen at once."""
    from transformers import AutoTokenizer
    row = merge_prefix(responses, batch)[0]
    trainer.show_row(AutoTokenizer.from_pretrained(source), row, f"episode {responses.episodes[row.spans[0][2]]}",
                     pictures and pictures.token)


if __name__ == "__main__":
    run_main(main)
