"""Stage 2, one round of multi-turn RL: from recorded groups of attempts to the next checkpoint (SPEC.md §2, loss.py).

Reads   round-i/ folders (rollout.py; sharded ones as they are), the checkpoint that played them, and state/ of the
        round before
Writes  OUTPUT/  a Hugging Face checkpoint · metrics.jsonl · state/ (float32 weights, optimizer state) · manifest.json
        OUTPUT/batch/  what was trained, as tensors, and an index of it · OUTPUT/resume/step-N/  while it runs
        OUTPUT/round.json  counts; "trained": false when every group is equal: then there is no new checkpoint

Departures from the paper, or choices where it is silent (SPEC.md marks them "ours")
 1. w = min(q/b, C) with ρ = π/q, as both sources have it; the usual form is b/q with ρ = π/b (loss.truncated_weight).
 2. The gate runs before the cap of 16, and K counts trained responses only.
 3. Groups whose rewards are all equal are left out of the batch and of Σu, and are not gated: they could not train.
 4. Episodes, not responses, are shuffled into batches; an episode's responses stay together up to the batch border.
 5. The schedule runs over all rounds, and the optimizer's moments and step count carry over.
 6. A group whose valid attempts began in different states is left out and counted.

An attempt that infrastructure spoiled is run again by rollout.py; its valid try is taken. Killed, the round continues from
the newest resume/step-N on the same command, with the log b of batch/; finished, it says so and exits 0. SIGTERM, SIGINT or
a file OUTPUT/STOP end it after the current step, with a resume point and exit code 4 (under torchrun see sft.py; while log b is
computed a SIGTERM just ends it).

    python rl.py --model run/sft --rollouts run/round-1 --output run/rl-1 --round 1 --rounds 6
    torchrun --nproc_per_node 8 rl.py --model run/rl-1 --previous run/rl-1 --rollouts run/round-2 \\
        --output run/rl-2 --round 2 --rounds 6
"""

import argparse
import random
import shutil
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

import adapters
import checkpoint
import loss
import model
import protocol
import trainer
from batches import Responses, merge_prefix, shuffled
from pictures import load_pictures
from records import (
    at_least, TRAIN_SAMPLING, BadInput, Formatter, ImageStore, call_problem, folders, policy_version, read_calls, read_episodes,
    read_json, run_main, save_args, sha256_file, write_json, write_manifest)

# counts of the round that each step's row of metrics.jsonl repeats
ROUND_METRICS = ("reward", "gate_mismatch", "groups_used", "groups_equal", "groups_too_small")


def parse_args():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    p.add_argument("--model", required=True, help="the checkpoint that played the round: a folder or a hub name")
    p.add_argument("--rollouts", required=True, nargs="+", help="this round's folders, sharded or not")
    p.add_argument("--output", required=True, help="checkpoint folder to write")
    trainer.add_arguments(p, lr=1e-6, global_batch=128)
    g = p.add_argument_group("rl")
    g.add_argument("--round", type=int, default=1, help="number of this round (from 1)")
    g.add_argument("--rounds", type=int, default=6, help="rounds of the whole run; the schedule spans them (count)")
    g.add_argument("--previous", help="OUTPUT of the round before, for its state/; required from round 2 on")
    g.add_argument("--fresh-optimizer", action="store_true", help="start without the state of the round before")
    g.add_argument("--steps-per-round", type=at_least(1),
                   help="cut the round into so many optimizer steps (count) instead of --global-batch")
    g.add_argument("--max-responses", type=at_least(1), default=16,
                   help="trained responses per episode, others drawn out (count)")
    g.add_argument("--max-mismatch", type=float, default=0.01,
                   help="share of gated calls (0 to 1) above which the run stops")
    g.add_argument("--eps-lo", type=float, default=loss.EPS_LO, help="clip of the ratio below 1")
    g.add_argument("--eps-hi", type=float, default=loss.EPS_HI, help="clip of the ratio above 1")
    g.add_argument("--dual-clip", type=float, default=loss.D, help="d, bound of a negative advantage's loss")
    g.add_argument("--cap", type=float, default=loss.C, help="C, cap of the importance weight")
    args = p.parse_args()
    if args.steps_per_round and args.global_batch != p.get_default("global_batch"):
        p.error("--steps-per-round and --global-batch both set the batch; give one")
    if not 1 <= args.round <= args.rounds:
        p.error(f"--round {args.round}: expected 1 to --rounds {args.rounds}")
    if args.round > 1 and not args.previous and not args.fresh_optimizer:
        p.error(f"--round {args.round} needs --previous (the OUTPUT of round {args.round - 1}), or --fresh-optimizer")
    if args.previous and args.fresh_optimizer:
        p.error("--previous and --fresh-optimizer exclude each other")
    if args.steps_per_round:
        args.global_batch = None                                       # not what will be done: do not print or save it
    return trainer.check_arguments(p, args)


# ---------------------------------------------------------------------------------------------- data

def read_data(args, version):
    """The round's folders -> (episodes, {call_id: Call}, {call_id: ImageStore}, counts): one episode per attempt, its
    valid try if it has one, else its last. Refuses another policy's episodes."""
    attempts, listed, calls, stores, counts = {}, set(), {}, {}, Counter(episodes_run_again=0)
    for folder in (f for path in args.rollouts for f in folders(path)):
        store = ImageStore(folder / "images")
        for call in read_calls(folder / "calls.jsonl"):
            if call.call_id in calls:
                raise BadInput(f"{folder}/calls.jsonl: call {call.call_id} stands there twice; give each folder once")
            calls[call.call_id], stores[call.call_id] = call, store
        for episode in read_episodes(folder / "episodes.jsonl"):
            protocol.refuse_held_out(episode, folder / "episodes.jsonl")
            attempt = (episode.task, episode.init, episode.attempt)
            before = attempts.get(attempt)
            if before and (before.valid and episode.valid or before.episode_id == episode.episode_id):
                raise BadInput(f"{folder}/episodes.jsonl: attempt {episode.attempt} at {episode.task}, state "
                               f"{episode.init} stands there twice ({before.episode_id}, {episode.episode_id}); give "
                               "each folder once, and only folders of one round")
            if episode.valid and episode.policy_version != version:
                raise BadInput(f"{folder}/episodes.jsonl: episode {episode.episode_id} was played by policy "
                               f"{episode.policy_version!r}, but {args.model} is {version}; give the checkpoint that "
                               "played the round")
            counts["episodes_run_again"] += before is not None
            listed.update(episode.calls)
            if not before or not before.valid:
                attempts[attempt] = episode
    episodes = list(attempts.values())
    counts["episodes"], counts["calls"] = len(episodes), len(calls)
    counts["episodes_invalid"] = sum(not e.valid for e in episodes)    # attempts without any valid try
    counts["calls_orphaned"] = len(calls.keys() - listed)              # of episodes that a kill cut short
    counts["calls_lost"] = len(listed - calls.keys())
    return episodes, calls, stores, counts


def credit(episodes, counts):
    """Leave-one-out advantages: [(episode, advantage)] of the groups that can train; the others are counted."""
    groups, used = defaultdict(list), []
    for episode in episodes:
        groups[episode.task, episode.init].append(episode)
    counts["groups"] = len(groups)
    for name in ("used", "equal", "too_small", "start_state"):
        counts[f"groups_{name}"] = 0
    for (task, init), group in sorted(groups.items()):          # not in the order in which their episodes ended
        group.sort(key=lambda e: e.attempt)
        valid = [e for e in group if e.valid]
        starts = {e.start_state for e in valid}
        if len(starts) > 1:
            counts["groups_start_state"] += 1
            print(f"rl: {task}, state {init}: its attempts began in {len(starts)} different states; group left out")
            continue
        rewards = torch.tensor([float(e.reward) if e.valid else 0.0 for e in group])                # (G,)
        A, counted = loss.leave_one_out(rewards, torch.tensor([e.valid for e in group]))            # (G,), (G,)
        if not counted.any():
            counts["groups_too_small"] += 1
        elif not A.any():
            counts["groups_equal"] += 1
        else:
            counts["groups_used"] += 1
            used += [(e, float(a)) for e, a, c in zip(group, A, counted, strict=True) if c]
    return used


def ineligible(call, episode, args, version, pictures):
    """None, or why this call of a used episode is not trained on (one word, for the counts)."""
    if call_problem(call):
        return "incomplete"
    if call.policy_version != version:
        return "policy"
    if len(call.prompt_token_ids) + len(call.token_ids) > args.max_length:
        return "too_long"
    if adapters.post_success(episode, call):
        return "post_success"
    if pictures and pictures.token in call.token_ids:                  # the model would put a picture's features there
        return "placeholder"
    sent = {k: call.sampling.get(k, "nothing") for k in TRAIN_SAMPLING}
    if sent != TRAIN_SAMPLING:
        wrong = ", ".join(f"{k} {sent[k]} instead of {v}" for k, v in TRAIN_SAMPLING.items() if sent[k] != v)
        raise BadInput(f"call {call.call_id} of episode {episode.episode_id} was sampled with {wrong}: its log-probs "
                       "are not the policy's; roll out with the train profile")
    return None


def choose(used, calls, stores, counts, args, version):
    """Eligible, gated and capped calls of the used episodes: [(episode, advantage, [Call, …])]."""
    import gate
    tokenizer, pictures, chosen, first = gate.load_tokenizer(args.model), load_pictures(args.model), [], None
    for name in ("calls_compared", "calls_gated", "calls_capped", "calls_trained"):
        counts[name] = 0
    for episode, advantage in used:
        kept = []
        for call in sorted((calls[c] for c in episode.calls if c in calls), key=lambda c: c.turn):
            reason = ineligible(call, episode, args, version, pictures)
            if reason:
                counts[f"calls_{reason}"] += 1
                continue
            counts["calls_compared"] += 1
            mismatch = gate.check(tokenizer, call, stores[call.call_id], pictures)
            if mismatch:
                counts["calls_gated"] += 1
                first = first or f"{call.call_id}: {mismatch}"
            else:
                kept.append(call)
        if len(kept) > args.max_responses:
            counts["calls_capped"] += len(kept) - args.max_responses
            draw = random.Random(f"{args.seed}/{episode.episode_id}").sample(range(len(kept)), args.max_responses)
            kept = [kept[i] for i in sorted(draw)]
        if kept:
            chosen.append((episode, advantage, kept))
        counts["calls_trained"] += len(kept)
    if counts["calls_gated"] > args.max_mismatch * counts["calls_compared"]:
        raise BadInput(f"the gate rejects {counts['calls_gated']} of {counts['calls_compared']} calls, more than "
                       f"--max-mismatch {args.max_mismatch}: prompts render differently from how they were sampled; "
                       f"run gate.py. First: {first}")
    if first:
        print(f"rl: gated, the first of {counts['calls_gated']}: {first}")
    return chosen


def batch_identity(args, version):
    """What batch/ is made from."""
    files = [f / name for path in args.rollouts for f in folders(path) for name in ("calls.jsonl", "episodes.jsonl")]
    return {"policy_version": version, "rollouts_sha256": [sha256_file(f) for f in files if f.exists()], "seed": args.seed,
            "max_length": args.max_length, "max_responses": args.max_responses}


def build(args, version, identity):
    """Rank 0: writes batch/batch.safetensors, then batch/batch.json. Returns the index. identity: of batch_identity."""
    import gate
    folder = Path(args.output) / "batch"
    if (folder / "batch.json").exists() and (index := read_json(folder / "batch.json"))["identity"] == identity:
        print(f"rl: using {folder} as it was written before")
        return index
    episodes, calls, stores, counts = read_data(args, version)
    used = credit(episodes, counts)
    chosen = choose(used, calls, stores, counts, args, version)
    rewards = [e.reward for e in episodes if e.valid]
    counts["reward"] = sum(rewards) / max(len(rewards), 1)
    counts["gate_mismatch"] = counts["calls_gated"] / max(counts["calls_compared"], 1)
    trained = [(c, e, a, len(kept)) for e, a, kept in chosen for c in kept]        # S responses, an episode's by turn
    index = {"identity": identity, "counts": dict(counts), "log_b": False, "responses": [
        {"call_id": c.call_id, "episode_id": e.episode_id, "turn": c.turn, "reward": e.reward,
         "pictures": gate.picture_hashes(c.messages)} for c, e, _, _ in trained]}
    if trained:
        calls = [c for c, *_ in trained]
        ints = lambda values: torch.tensor(list(values), dtype=torch.int32)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "batch.json").unlink(missing_ok=True)        # another batch's index must not describe these tensors
        save_file({
            "prompt_ids": ints(t for c in calls for t in c.prompt_token_ids),
            "prompt_lengths": ints(len(c.prompt_token_ids) for c in calls),
            "token_ids": ints(t for c in calls for t in c.token_ids),
            "lengths": ints(len(c.token_ids) for c in calls),
            "log_q": torch.tensor([lp for c in calls for lp in c.logprobs], dtype=torch.float32),
            "advantage": torch.tensor([a for _, _, a, _ in trained]),
            "k": ints(k for *_, k in trained)}, folder / "batch.safetensors")
        write_json(folder / "batch.json", index)
    return index


def load_batch(folder, index, stores):
    """batch/ -> (Responses, flat tensors): advantage, u (S,) per response; log_q, log_b, entropy (N,) per token."""
    t = {k: v.clone() for k, v in load_file(folder / "batch.safetensors").items()}      # no longer the file, which rank 0 replaces
    cut = lambda ids, lengths: np.split(ids.numpy(), np.cumsum(lengths.numpy())[:-1])
    responses = Responses(cut(t["prompt_ids"], t["prompt_lengths"]), cut(t["token_ids"], t["lengths"]),
                          [r["episode_id"] for r in index["responses"]], [r["pictures"] for r in index["responses"]], stores)
    listed = len(index["responses"])
    assert len(responses.outputs) == listed, f"{folder}: {len(responses.outputs)} responses as tensors, {listed} listed"
    return responses, {**t, "u": loss.response_weights(t["k"])}


def make_batches(responses, args):
    """Optimizer batches (lists of response indices, in order of turns within an episode) of the round."""
    order = [s for episode in shuffled(responses.by_episode(), args.seed, args.round) for s in episode]
    if args.steps_per_round:
        steps = min(args.steps_per_round, len(order))
        cuts = [round(i * len(order) / steps) for i in range(steps + 1)]
    else:
        cuts = [*range(0, len(order), args.global_batch), len(order)]
    return [order[a:b] for a, b in zip(cuts[:-1], cuts[1:], strict=True)]


def previous_state(args, version):
    """The folder whose state/ this round continues, or None. Rounds that wrote no checkpoint are passed over."""
    folder = args.previous
    while folder and not (report := read_json(Path(folder) / "round.json"))["trained"]:
        print(f"rl: {folder} trained nothing; continuing from {report['previous'] or 'a fresh optimizer'}")
        folder = report["previous"]
    if folder:
        state = read_json(Path(folder) / "state" / "trainer_state.json")
        if state["policy_version"] != version:
            raise BadInput(f"{folder}/state belongs to policy {state['policy_version']}, but {args.model} is {version};"
                           " give as --previous the round that wrote --model, or --fresh-optimizer")
        for name in checkpoint.SHAPE:
            if state.get(name, getattr(args, name)) != getattr(args, name):
                raise BadInput(f"{folder}/state was written with {name}={state[name]!r}, this command says "
                               f"{getattr(args, name)!r}: its optimizer state does not fit; give the same, or --fresh-optimizer")
    return folder


# ---------------------------------------------------------------------------------------------- main

def main():
    args = parse_args()
    output = Path(args.output)
    ranks = trainer.Ranks(args.threads)
    if ranks.on_main(lambda: checkpoint.already_whole(output, "rl", args)):
        ranks.close()
        return 0

    # ---- data
    ranks.on_main(lambda: model.checkpoint_folder(args.model))                        # a hub name: downloaded here …
    source = ranks.on_all(lambda: model.checkpoint_folder(args.model, ranks.main))    # … and, without weights, on other nodes
    version = ranks.on_main(lambda: policy_version(source))
    previous = ranks.on_main(lambda: previous_state(args, version))
    content = ranks.on_main(lambda: batch_identity(args, version))
    identity = checkpoint.run_identity(args, policy_version=version, rollouts_sha256=content["rollouts_sha256"])
    resume, first = ranks.on_main(lambda: checkpoint.newest_resume(output, identity))    # before batch/ may be written anew
    if ranks.main:
        save_args(output, "rl", args)
    checkpoint.check_shared(output, ranks)
    index = ranks.on_main(lambda: build(args, version, content))
    if resume and not index["log_b"]:
        ranks.stop(f"{resume} was saved, but {output}/batch holds no log b; restore that folder, or delete {output}/resume to "
                   "start the round again")
    counts = index["counts"]
    report = {"round": args.round, "rounds": args.rounds, "model": args.model, "previous": args.previous,
              "counts": counts}
    if ranks.main:
        print("rl: " + " | ".join(f"{k} {v:,.4f}".rstrip("0").rstrip(".") if v % 1 else f"{k} {v:,.0f}" for k, v in counts.items()))
    if not index["responses"]:
        if ranks.main:
            print(f"rl: nothing to train: of {counts['groups']} groups {counts['groups_equal']} have equal rewards, "
                  f"{counts['groups_too_small']} fewer than two valid attempts, and none of the calls of the other "
                  f"{counts['groups_used']} may be trained; no new checkpoint, {args.model} stays")
            write_json(output / "round.json", {**report, "trained": False})
            write_manifest(output, "rl", args, counts)
        ranks.close()
        return 0
    stores = [ImageStore(f / "images") for path in args.rollouts for f in folders(path)]
    responses, data = load_batch(output / "batch", index, stores)
    batches = make_batches(responses, args)
    pictures = ranks.on_all(lambda: model.preflight(source, responses, args.global_batch, ranks.world, ranks.rank))

    # ---- model and optimizer
    run = trainer.Trainer(model.load_model(source, ranks, args), args, ranks, pictures)

    # ---- state: of the killed run, else of the round before
    if resume or previous:
        checkpoint.load_state(resume or Path(previous) / "state", run)
    if resume and ranks.main:
        print(f"rl: continuing after step {first} from {resume}")
    elif ranks.main:
        show_first(source, responses, data, index, pictures)

    # ---- log b: the trainer's own log-probs before the first update, by the forwards that the update will use
    if not index["log_b"]:
        log_b, entropy = torch.zeros_like(data["log_q"]), torch.zeros_like(data["log_q"])    # (N,), (N,)
        with torch.no_grad():
            for batch in tqdm(batches, desc="log b", disable=None if ranks.main else True):
                for micro in run.micro_batches(responses, batch):
                    b, h = run.logp(micro, entropy=True)                               # (N,), (N,) of the micro-batch
                    log_b[micro.index.cpu()], entropy[micro.index.cpu()] = b.cpu(), h.cpu()
        data["log_b"], data["entropy"] = ranks.sum_(log_b), ranks.sum_(entropy)        # every token is one rank's
        run.take_work()                                                                # no step's
        if ranks.main:
            save_file({k: v for k, v in data.items() if k != "u"}, output / "batch" / "part")
            (output / "batch" / "part").replace(output / "batch" / "batch.safetensors")
            write_json(output / "batch" / "batch.json", {**index, "log_b": True})
    on = lambda x: x.to(ranks.device)
    log_q, log_b, entropy = on(data["log_q"]), on(data["log_b"]), data["entropy"]      # (N,) each
    advantage = on(torch.repeat_interleave(data["advantage"], responses.lengths))      # (N,) A of the token's episode
    weight = on(loss.token_weights(responses.lengths, data["u"]))                      # (N,) u_s / L_s
    clips = dict(cap=args.cap, eps_lo=args.eps_lo, eps_hi=args.eps_hi, d=args.dual_clip)

    # ---- train
    metrics = trainer.Metrics(output, ranks, len(batches), args, {
        "loss": "+.4f", "ratio": ".4f", "clip_low": ".1e", "clip_high": ".1e", "grad_norm": ".4f", "lr": ".2e",
        "tokens_per_second": ",.0f"})
    metrics.keep(first)
    steps = trainer.Steps(first, len(batches), output, ranks, "rl")
    for step in steps:
        total_u = float(data["u"][batches[step]].sum())                    # over all ranks and micro-batches
        parts = []
        for micro in run.micro_batches(responses, batches[step]):
            logp, i = run.logp(micro), micro.index                         # (N,), (N,)
            part, metric = loss.rl_loss(logp, log_q[i], log_b[i], advantage[i], weight[i], total_u, **clips)
            run.backward(part)
            parts.append({"loss": part.detach(), **metric})
        lr = trainer.lr_at(args, run.steps, (args.round - 1 + step / len(batches)) / args.rounds)
        norms = run.step(lr, measure=True)
        m = trainer.reduce_metrics(parts, ranks, loss.merge_metrics)
        total_loss, tokens = m.pop("loss"), int(responses.lengths[batches[step]].sum())
        assert m["tokens"] == tokens, f"{m['tokens']} targets in the micro-batches, {tokens} in the batch"
        mine = torch.cat([torch.arange(responses.start[s], responses.start[s + 1]) for s in batches[step]])
        metrics.log({"step": step + 1, "total_step": run.steps, "loss": total_loss, "lr": lr, **norms,
                     **loss.per_token(m), "entropy_before": float(entropy[mine].mean()),
                     "responses": len(batches[step]), **{k: counts[k] for k in ROUND_METRICS}}, run.take_work())
        if args.save_every and (step + 1) % args.save_every == 0 and step + 1 < len(batches):
            checkpoint.save_resume(output, run, step + 1, identity)
    if steps.stopped:
        return checkpoint.stop(output, run, steps, identity)

    # ---- save
    version = checkpoint.save_checkpoint(output, run, source, {"stage": "rl", "round": args.round, "rounds": args.rounds})
    if ranks.main:
        write_json(output / "round.json", {**report, "trained": True, "steps": len(batches), "total_steps": run.steps,
                                           "policy_version": version})
        write_manifest(output, "rl", args, {**counts, "steps": len(batches), "policy_version": version})
        shutil.rmtree(output / "resume", ignore_errors=True)
        print(f"rl: round {args.round}/{args.rounds}, {len(batches)} steps -> {output}, policy version {version}")
    ranks.close()
    steps.release()
    return 0


def show_first(source, responses, data, index, pictures):
    """One whole scored episode of the round: all of its rows (a history that was edited opens a new one)."""
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(source)
    for row in merge_prefix(responses, responses.by_episode()[0]):
        s = row.spans[0][2]
        trainer.show_row(tokenizer, row, f"episode {responses.episodes[s]}, turn {index['responses'][s]['turn']}, reward "
                         f"{index['responses'][s]['reward']:g}, advantage {data['advantage'][s]:+.2f}, u {data['u'][s]:.3f}",
                         pictures and pictures.token)


if __name__ == "__main__":
    run_main(main)
