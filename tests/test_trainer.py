"""batches.py (rows, micro-batches) and trainer.py (log-probs, optimizers, checkpoints).

Also makes the recorded data of test_sft.py and test_rl.py.
"""

import json
import os
import random
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import numpy as np
import pytest
import torch

import batches
import checkpoint
import gate
import loss
import model as network
import trainer
from records import TRAIN_SAMPLING, BadInput, Call, Episode, policy_version, to_line

ROOT = Path(__file__).resolve().parent.parent
TOOLS = [{"type": "function", "function": {"name": n, "description": "", "parameters": {"type": "object", "properties": p}}}
         for n, p in (("locate", {"name": {}}), ("pick", {"x": {}, "y": {}, "dy": {}}))]
COLOURS, SHAPES = ("red", "blue", "green", "white"), ("mug", "pot", "tray")


# ---------------------------------------------------------------------------------------------- recorded data

def conversation(rng, turns):
    """Yields (messages so far, assistant message) of one append-only episode."""
    name = f"{rng.choice(COLOURS)} {rng.choice(SHAPES)}"
    messages = [{"role": "user", "content": f"Task: Put the {name} on the blue tray."}]
    for t in range(turns):
        call = {"name": "locate", "arguments": json.dumps({"name": name})} if t % 2 == 0 else \
            {"name": "pick", "arguments": json.dumps({"x": rng.randrange(500), "y": -rng.randrange(300), "dy": 20})}
        reply = {"role": "assistant", "content": rng.choice(["", f"I will pick up the {name}."]),
                 "tool_calls": [{"id": f"c{t}", "type": "function", "function": call}]}
        yield list(messages), reply
        messages += [reply, {"role": "tool", "tool_call_id": f"c{t}", "content": f"{name} at x {rng.randrange(500)} y -133"}]


def record_round(folder, model_dir, rewards, turns=(2, 4), seed=0, noise=0.0):
    """Writes a round folder. rewards: {(task, init): [reward or None for an invalid attempt, …]}. log q = the model's own log-probs
    plus N(0, noise). Returns (episodes, calls) as they were written."""
    rng, version = random.Random(seed), policy_version(model_dir)
    torch.manual_seed(seed)
    tokenizer = gate.load_tokenizer(model_dir)
    model = load(model_dir)
    folder.mkdir(parents=True, exist_ok=True)
    episodes, calls = [], []
    for (task, init), group in rewards.items():
        for attempt, reward in enumerate(group):
            name = f"{task}-{init}-{attempt}".replace("/", "-")
            mine = []
            for turn, (messages, reply) in enumerate(conversation(rng, rng.randint(*turns))):
                prompt, output = gate.render_target(tokenizer, messages, TOOLS, reply, {})
                with torch.no_grad():
                    logits = model(input_ids=torch.tensor([prompt + output])).logits[0, len(prompt) - 1:-1]
                logp = logits.log_softmax(-1).gather(-1, torch.tensor(output)[:, None]).squeeze(-1)
                logp = (logp + noise * torch.randn_like(logp)).clamp(max=0)
                mine.append(Call(f"{name}/{turn}", name, turn, version, version, "tiny", messages, TOOLS, {},
                                 {**TRAIN_SAMPLING, "max_tokens": 256, "seed": turn}, prompt, output, logp.tolist(), "stop", reply, True))
            calls += mine
            valid = reward is not None
            episodes.append(Episode(name, "skills", task, init, attempt, reward, valid, None if valid else "simulator_crash", version,
                                    f"state-{task}-{init}", reward == 1, reward == 1, None, True, "finish" if valid else "infrastructure",
                                    [c.call_id for c in mine]))
    write_round(folder, episodes, calls)
    return episodes, calls


def write_round(folder, episodes, calls):
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in (("episodes", episodes), ("calls", calls)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(to_line(r)) + "\n" for r in records))


def run_script(script, *argv, ranks=1, check=0):
    """Runs a stage script as a user would; returns its completed process. check: expected exit code (None: any)."""
    launch = [sys.executable] if ranks == 1 else \
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    done = subprocess.run([*launch, str(ROOT / script), *map(str, argv)], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert check is None or done.returncode == check, f"exit {done.returncode}\n{done.stdout}\n{done.stderr[-3000:]}"
    return done


def run_ranks(folder, script, *runs, ranks=2):
    """Runs a script's main() once per argument list, in one torchrun launch (start-up takes seconds)."""
    driver = folder / "driver.py"
    driver.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {script}, torch.distributed\n"
                      "destroy, torch.distributed.destroy_process_group = torch.distributed.destroy_process_group, lambda: None  # one group\n"
                      f"for sys.argv in {[['x', *map(str, argv)] for argv in runs]!r}: {script}.main()\n"
                      "import gc; gc.collect(); destroy()         # as records.run_main: or gloo's threads may abort at the exit\n")
    return run_script(driver, ranks=ranks)


def run_main(main, *argv):
    """Runs a script's main() in this process (start-up of a new one takes seconds)."""
    saved, sys.argv = sys.argv, ["script", *map(str, argv)]
    try:
        return main()
    finally:
        sys.argv = saved


def weights(folder):
    from safetensors.torch import load_file
    return load_file(Path(folder) / "model.safetensors")


def assert_equal_weights(a, b, atol=0.0):
    a, b = weights(a), weights(b)
    assert a.keys() == b.keys()
    for name in a:
        assert torch.allclose(a[name], b[name], rtol=0, atol=atol), f"{name}: {(a[name] - b[name]).abs().max():.2e} apart"


# ---------------------------------------------------------------------------------------------- fixtures

def arguments(**changed):
    p = ArgumentParser()
    trainer.add_arguments(p, lr=1e-3, global_batch=8)
    args = p.parse_args([])
    for name, value in changed.items():
        assert hasattr(args, name), name
        setattr(args, name, value)
    return args


@pytest.fixture(scope="module")
def recorded(tiny_dir):
    """Responses of five append-only episodes, the last call of each with a rewritten history, and their calls."""
    rng, tokenizer = random.Random(1), gate.load_tokenizer(tiny_dir)
    prompts, outputs, episodes = [], [], []
    for e in range(5):
        turns = list(conversation(rng, 2 + e))
        for t, (messages, reply) in enumerate(turns):
            if t == len(turns) - 1:
                messages = messages[:-1] + [{**messages[-1], "content": "(shortened)"}, {"role": "user", "content": "Go on."}]
                messages[0] = {"role": "user", "content": "Task: (history was dropped)"}
            prompt, output = gate.render_target(tokenizer, messages, TOOLS, reply, {})
            prompts.append(np.array(prompt, np.int32))
            outputs.append(np.array(output, np.int32))
            episodes.append(e)
    return batches.Responses(prompts, outputs, episodes)


def load(folder, **changed):
    return network.load_model(folder, trainer.Ranks(), arguments(**changed))


def loss_and_gradient(tiny_dir, recorded, chosen=None, **changed):
    """SFT loss of all responses as one optimizer batch, flat log-probs (N,), gradients by name."""
    run = trainer.Trainer(load(tiny_dir), arguments(**changed), trainer.Ranks())
    chosen = list(range(len(recorded.outputs))) if chosen is None else chosen
    total, value, flat = int(recorded.lengths[chosen].sum()), 0.0, torch.full((int(recorded.start[-1]),), torch.nan)
    for micro in run.micro_batches(recorded, chosen):
        logp = run.logp(micro)
        part, _ = loss.sft_loss(logp, torch.ones_like(logp, dtype=torch.bool), total)
        run.backward(part)
        value += part.item()
        flat[micro.index] = logp.detach()
    return value, flat, {n: p.grad.clone() for n, p in run.model.named_parameters()}


def same(a, b, tolerance=2e-6):
    assert abs(a[0] - b[0]) < tolerance
    assert torch.allclose(a[1], b[1], rtol=0, atol=1e-4), (a[1] - b[1]).abs().max()
    for name in a[2]:
        assert torch.allclose(a[2][name], b[2][name], rtol=1e-3, atol=tolerance), f"{name} {(a[2][name] - b[2][name]).abs().max():.1e}"


# ---------------------------------------------------------------------------------------------- rows and plan

def test_prefix_merge_known_answer():
    a = lambda *x: np.array(x, np.int32)
    r = batches.Responses([a(1, 2), a(1, 2, 3, 4), a(1, 9), a(1, 2), a(1, 2, 3)], [a(3), a(5), a(3), a(3), a(7)],
                          ["e", "e", "e", "f", "f"])
    rows = batches.merge_prefix(r, range(5))
    assert [row.tokens.tolist() for row in rows] == [[1, 2, 3, 4, 5], [1, 9, 3], [1, 2, 3, 7]]
    assert [row.spans for row in rows] == [[(2, 3, 0), (4, 5, 1)], [(2, 3, 2)], [(2, 3, 3), (3, 4, 4)]]
    assert len(batches.merge_prefix(r, range(5), merge=False)) == 5
    assert [row.spans for row in batches.merge_prefix(r, [1, 4])] == [[(4, 5, 1)], [(3, 4, 4)]]    # what was not chosen is context


def test_merge_gives_equal_loss_and_gradients_with_less_work(tiny_dir, recorded):
    merged, apart = batches.merge_prefix(recorded, range(len(recorded.outputs))), len(recorded.outputs)
    assert len(merged) == 10 and apart == 20                           # five append-only rows, five rewritten ones
    same(loss_and_gradient(tiny_dir, recorded), loss_and_gradient(tiny_dir, recorded, no_prefix_merge=True))


def test_log_probs_are_those_of_full_logits(tiny_dir, recorded):
    model = load(tiny_dir)
    _, flat, _ = loss_and_gradient(tiny_dir, recorded)
    for s in (0, 3, len(recorded.outputs) - 1):
        prompt, output = recorded.prompts[s], recorded.outputs[s]
        logits = model(input_ids=torch.tensor(np.concatenate([prompt, output]))[None].long()).logits[0, len(prompt) - 1:-1]
        right = logits.log_softmax(-1).gather(-1, torch.tensor(output)[:, None].long()).squeeze(-1)
        assert torch.allclose(flat[recorded.start[s]:recorded.start[s + 1]], right, rtol=0, atol=1e-5)


@pytest.mark.parametrize("micro_tokens", [1, 300, 100_000])            # 1×8 = 8×1, and everything padded into one
def test_padding_order_and_split_change_nothing(tiny_dir, recorded, micro_tokens):
    a = loss_and_gradient(tiny_dir, recorded)
    order = [s for e in batches.shuffled(recorded.by_episode(), micro_tokens) for s in e]
    same(a, loss_and_gradient(tiny_dir, recorded, order, micro_tokens=micro_tokens))


def test_plan_counts_every_row_once_within_budget_on_any_world():
    rng = random.Random(0)
    for world in (1, 2, 3, 8):
        rows = [batches.Row(np.zeros(rng.randint(1, 400), np.int32), [], []) for _ in range(rng.randint(1, 40))]
        plan = batches.plan_micro_batches(rows, 500, world)
        assert all(len(slot) == world for slot in plan)
        assert sorted(id(r) for slot in plan for m in slot for r in m) == sorted(map(id, rows))
        assert all(len(m) * max(len(r.tokens) for r in m) <= 500 for slot in plan for m in slot if len(m) > 1)


def test_empty_micro_batch_gives_zero_loss_and_gradient(tiny_dir, recorded):
    run = trainer.Trainer(load(tiny_dir), arguments(), trainer.Ranks())
    micro = batches.pack([], recorded, torch.device("cpu"))
    zero = torch.zeros(0)
    part, metrics = loss.rl_loss(run.logp(micro), zero, zero, zero, zero, 1.0)
    run.backward(part)
    assert part.item() == 0 and metrics["tokens"] == 0
    assert all(not p.grad.any() for p in run.model.parameters())


def test_entropy_of_uniform_and_certain_distributions(tiny_dir):
    model = load(tiny_dir)
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()                  # all logits 0
    ids = torch.arange(4)[None]
    logp, entropy = model.target_logp(ids, torch.tensor([1]), torch.tensor([2]), {}, entropy=True)
    V = model.config.vocab_size
    assert torch.allclose(entropy, torch.tensor([float(np.log(V))])) and torch.allclose(logp, -entropy)


# ---------------------------------------------------------------------------------------------- optimizers

def test_schedules():
    args = arguments(lr=2.0, warmup=4)
    at = lambda schedule, step, progress: trainer.lr_at(arguments(lr=2.0, warmup=4, schedule=schedule), step, progress)
    assert trainer.lr_at(args, 0, 0.0) == 0.5 and trainer.lr_at(args, 3, 0.5) == 2.0 and trainer.lr_at(args, 99, 0.99) == 2.0
    assert at("linear", 4, 0.25) == 1.5 and at("cosine", 4, 0.5) == pytest.approx(1.0)
    assert at("wsd", 4, 0.69) == 2.0 and at("wsd", 4, 0.85) == pytest.approx(1.0) and at("linear", 1, 0.5) == 0.5


def test_every_parameter_has_one_optimizer_and_lr_zero_moves_nothing(tiny_dir, recorded):
    for name in ("adamw", "muon"):
        run = trainer.Trainer(load(tiny_dir), arguments(optimizer=name, weight_decay=0.1), trainer.Ranks())
        held = [id(p) for o in run.optimizers for g in o.param_groups for p in g["params"]]
        assert sorted(held) == sorted(id(p) for p in run.model.parameters())
        before = {n: p.clone() for n, p in run.model.named_parameters()}
        for lr in (0.0, 1e-3):
            for micro in run.micro_batches(recorded, range(6)):
                run.backward(-run.logp(micro).sum())
            norms = run.step(lr, measure=True)
            moved = [n for n, p in run.model.named_parameters() if not torch.equal(p, before[n])]
            assert (norms["update_norm"] > 0) == bool(lr) and len(moved) == (len(before) if lr else 0)


def test_non_finite_gradient_stops_before_any_weight_changes(tiny_dir, recorded):
    run = trainer.Trainer(load(tiny_dir), arguments(), trainer.Ranks())
    before = {n: p.clone() for n, p in run.model.named_parameters()}
    run.backward(run.logp(next(iter(run.micro_batches(recorded, [0])))).sum() * float("nan"))
    with pytest.raises(BadInput, match="gradient norm is nan"):
        run.step(1e-3)
    assert all(torch.equal(p, before[n]) for n, p in run.model.named_parameters())


# ---------------------------------------------------------------------------------------------- checkpoints

def test_saved_folder_reloads_and_state_continues(tiny_dir, recorded, tmp_path):
    from transformers import AutoModelForCausalLM
    ranks = trainer.Ranks()

    def steps(run, n):
        for _ in range(n):
            for micro in run.micro_batches(recorded, range(8)):
                run.backward(-run.logp(micro).mean())
            run.step(1e-3)

    for optimizer in ("adamw", "muon"):
        args, output = arguments(optimizer=optimizer), tmp_path / optimizer
        run = trainer.Trainer(load(tiny_dir), args, ranks)
        steps(run, 2)
        version = checkpoint.save_checkpoint(output, run, tiny_dir, {})
        assert version == policy_version(output) != policy_version(tiny_dir) and not (output / "part").exists()
        for name in ("tokenizer.json", "chat_template.jinja"):
            assert (output / name).read_bytes() == (tiny_dir / name).read_bytes()
        loaded, info = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
        assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        assert loaded.dtype == torch.float32 and "lm_head.weight" not in weights(output)
        assert all(torch.equal(p, dict(run.model.named_parameters())[n]) for n, p in loaded.named_parameters())
        again = trainer.Trainer(load(output), args, ranks)
        checkpoint.load_state(output / "state", again)
        assert again.steps == 2
        steps(run, 2)
        steps(again, 2)
        assert all(torch.equal(p, dict(again.model.named_parameters())[n]) for n, p in run.model.named_parameters())


def test_bfloat16_checkpoint_says_so(tiny_dir, tmp_path):
    run = trainer.Trainer(load(tiny_dir), arguments(save_dtype="bfloat16"), trainer.Ranks())
    checkpoint.save_checkpoint(tmp_path, run, tiny_dir, {})
    assert {t.dtype for t in weights(tmp_path).values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_newest_whole_resume_point_and_no_half_one(tiny_dir, tmp_path):
    run = trainer.Trainer(load(tiny_dir), arguments(), trainer.Ranks())
    assert checkpoint.newest_resume(tmp_path, {}) == (None, 0)
    for step in (1, 2, 10):
        checkpoint.save_resume(tmp_path, run, step, {"seed": "0"})
    (tmp_path / "resume" / "part").mkdir()                             # what a kill while saving leaves
    assert checkpoint.newest_resume(tmp_path, {"seed": "0"}) == (tmp_path / "resume" / "step-00000010", 10)
    with pytest.raises(BadInput, match="had other seed"):
        checkpoint.newest_resume(tmp_path, {"seed": "1"})
    assert sorted(p.name for p in (tmp_path / "resume").glob("step-*")) == ["step-00000002", "step-00000010"]


def test_metrics_keys_are_frozen_and_rows_behind_a_resume_point_dropped(tmp_path):
    m, work = trainer.Metrics(tmp_path, trainer.Ranks(), 9, arguments(log_every=10), {}), {"forward_tokens": 1, "flops": 6}
    for step in (1, 2, 3):
        m.log({"step": step}, work)
    with pytest.raises(AssertionError, match="metrics changed"):
        m.log({"step": 4, "extra": 0}, work)
    m.keep(1)
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1]
