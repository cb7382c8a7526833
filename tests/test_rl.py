"""rl.py as a user runs it: groups, gate, credit, one update, rounds that carry over, bad input."""

import copy
import json
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

import adapters
import checkpoint
import model
import rl
import trainer
from records import BadInput, policy_version
from test_trainer import ROOT, assert_equal_weights, record_round, run_main, run_ranks, run_script, weights, write_round

GROUPS = {("s/0", 11): [1, 0, 1, 0, 0, 1], ("s/1", 12): [1, 0, None, 0], ("s/2", 13): [0, 0, 0], ("s/3", 14): [1, None, None],
          ("s/4", 15): [0, 1]}


@pytest.fixture(scope="module")
def recorded(tiny_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("round") / "round-1"
    return folder, *record_round(folder, tiny_dir, GROUPS)


def update(model, rollouts, output, *more):
    run_main(rl.main, "--model", model, "--rollouts", rollouts, "--output", output, "--lr", 1e-3, *more)
    return json.loads((output / "round.json").read_text())


def changed(recorded, folder, change):
    """A copy of the round with change(episodes by id, calls by id) applied to it."""
    episodes, calls = ([copy.deepcopy(r) for r in records] for records in recorded[1:])     # one by one: nothing shared
    change({e.episode_id: e for e in episodes}, {c.call_id: c for c in calls})
    write_round(folder, episodes, calls)
    return folder


def rows(output):
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def updated(tiny_dir, recorded, tmp_path_factory):
    output = tmp_path_factory.mktemp("rl") / "rl-1"
    return output, update(tiny_dir, recorded[0], output, "--steps-per-round", 3, "--rounds", 2, "--warmup", 2, "--schedule", "linear")


def test_help():
    out = run_script("rl.py", "--help").stdout
    assert "Departures from the paper" in out and "--previous" in out and "torchrun" in out


def test_round_is_counted_and_trained(updated, recorded, tiny_dir):
    output, report = updated
    counts = report["counts"]
    assert report["trained"] and report["policy_version"] == policy_version(output) != policy_version(tiny_dir)
    assert (counts["groups"], counts["groups_used"], counts["groups_equal"], counts["groups_too_small"]) == (5, 3, 1, 1)
    assert (counts["episodes"], counts["episodes_invalid"], counts["calls_gated"], counts["calls_orphaned"]) == (18, 3, 0, 0)
    used = [e for e in recorded[1] if e.valid and e.task in ("s/0", "s/1", "s/4")]
    assert counts["calls_trained"] == sum(len(e.calls) for e in used)
    log = rows(output)
    assert [r["lr"] for r in log] == pytest.approx([1e-3 / 2, 1e-3 * (1 - 1 / 6), 1e-3 * (1 - 2 / 6)])    # 2 warm-up steps, of 2 x 3
    assert sum(r["responses"] for r in log) == counts["calls_trained"] and all(r["update_norm"] > 0 for r in log)
    assert log[0]["pi_b_min"] == log[0]["pi_b_max"] == 1.0 and log[0]["ratio"] == pytest.approx(1, abs=1e-4)
    assert log[0]["gap_qb_abs_max"] < 1e-4 and log[0]["clip_low"] == log[0]["clip_high"] == 0
    assert {"entropy_before", "w_capped", "gap_bp_k3", "grad_norm", "bf16_changed", "gate_mismatch", "reward"} <= log[0].keys()


def test_batch_holds_advantages_and_weights_of_the_paper(updated):
    output, _ = updated
    tensors, index = load_file(output / "batch" / "batch.safetensors"), json.loads((output / "batch" / "batch.json").read_text())
    advantage = {}
    for r, a, k in zip(index["responses"], tensors["advantage"].tolist(), tensors["k"].tolist(), strict=True):
        advantage[r["episode_id"]] = a
        assert k == sum(x["episode_id"] == r["episode_id"] for x in index["responses"])
    assert [advantage[f"s-0-11-{i}"] for i in range(6)] == pytest.approx([.6, -.6, .6, -.6, -.6, .6])     # the worked example
    assert [advantage[f"s-1-12-{i}"] for i in (0, 1, 3)] == pytest.approx([1, -.5, -.5])                  # three valid of four
    assert index["log_b"] and tensors["log_b"].shape == tensors["log_q"].shape == (int(tensors["lengths"].sum()),)
    assert torch.allclose(tensors["log_b"], tensors["log_q"], rtol=0, atol=1e-4)


def test_saved_folder_reloads_whole(updated):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    _, info = AutoModelForCausalLM.from_pretrained(updated[0], output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert AutoTokenizer.from_pretrained(updated[0]).chat_template


def test_finished_round_is_left_alone_and_a_killed_one_reuses_its_batch(updated, recorded, tiny_dir, tmp_path, capsys, monkeypatch):
    output, _ = updated
    argv = ("--steps-per-round", 3, "--rounds", 2, "--warmup", 2, "--schedule", "linear")
    update(tiny_dir, recorded[0], output, *argv)
    assert "already whole" in capsys.readouterr().out

    def killed(*_):
        raise KeyboardInterrupt
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(checkpoint, "save_checkpoint", killed)
        update(tiny_dir, recorded[0], tmp_path / "out", *argv)
    assert not (tmp_path / "out" / "config.json").exists()
    with monkeypatch.context() as m:
        m.setattr(rl, "read_data", None)                               # the records are not read a second time
        update(tiny_dir, recorded[0], tmp_path / "out", *argv)
    assert_equal_weights(output, tmp_path / "out")                     # bit for bit
    assert len(rows(tmp_path / "out")) == 3


def test_learning_rate_zero_keeps_pi_over_b_at_exactly_one(tiny_dir, recorded, tmp_path):
    update(tiny_dir, recorded[0], tmp_path / "out", "--lr", 0, "--global-batch", 7, "--micro-tokens", 500)
    log = rows(tmp_path / "out")
    assert len(log) > 3 and all(r["pi_b_min"] == r["pi_b_max"] == 1 and r["update_norm"] == 0 for r in log)
    assert_equal_weights(tiny_dir, tmp_path / "out")


def test_merge_micro_batches_and_padding_change_nothing(tiny_dir, recorded, tmp_path):
    for name, more in (("a", ()), ("b", ("--no-prefix-merge",)), ("c", ("--micro-tokens", 1))):
        update(tiny_dir, recorded[0], tmp_path / name, "--steps-per-round", 1, *more)
    a, b, c = (rows(tmp_path / name)[0] for name in "abc")
    for r in (b, c):
        assert r["loss"] == pytest.approx(a["loss"], abs=1e-6) and r["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
        assert r["tokens"] == a["tokens"]
    assert a["forward_tokens"] < b["forward_tokens"]


def test_two_ranks_give_the_weights_of_one(tiny_dir, recorded, tmp_path):
    """One round; then a second one that continues the state of one process on two ranks; then one response for two ranks."""
    more = ["--lr", 1e-3, "--steps-per-round", 2]
    first = ["--model", tiny_dir, "--rollouts", recorded[0], *more]
    run_main(rl.main, *first, "--output", tmp_path / "first-1")

    def played_by_first(episodes, calls):
        for r in (*episodes.values(), *calls.values()):
            r.policy_version = r.policy_version_end = policy_version(tmp_path / "first-1")
    folder = changed(recorded, tmp_path / "round-2", played_by_first)
    second = ["--model", tmp_path / "first-1", "--previous", tmp_path / "first-1", "--rollouts", folder, "--round", 2, *more]
    run_main(rl.main, *second, "--output", tmp_path / "second-1")
    few = [copy.deepcopy(e) for e in recorded[1] if e.task == "s/4"]
    few[0].calls, few[1].calls = [], few[1].calls[:1]                  # the first is valid and votes, but has no response
    write_round(tmp_path / "few", few, recorded[2])
    few = ["--model", tiny_dir, "--rollouts", tmp_path / "few", "--lr", 1e-3]
    run_main(rl.main, *few, "--output", tmp_path / "few-1")
    run_ranks(tmp_path, "rl", *[[*argv, "--output", tmp_path / f"{name}-2"]
                                for name, argv in (("first", first), ("second", second), ("few", few))])

    for name in ("first", "second", "few"):
        start = weights(tmp_path / "first-1" if name == "second" else tiny_dir)
        for a, b in zip(rows(tmp_path / f"{name}-1"), rows(tmp_path / f"{name}-2"), strict=True):
            for key in ("loss", "grad_norm", "update_norm", "ratio", "ratio_min", "entropy_before"):
                assert a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-6), (name, key)
            assert a["tokens"] == b["tokens"] and a["lr"] == b["lr"] and a["total_step"] == b["total_step"]
        a, b = weights(tmp_path / f"{name}-1"), weights(tmp_path / f"{name}-2")
        for key in a:
            assert (a[key] - b[key]).norm() < 1e-3 * (a[key] - start[key]).norm(), (name, key)
    row = rows(tmp_path / "first-2")[0]
    assert row["pi_b_min"] == row["pi_b_max"] == 1 and rows(tmp_path / "few-2")[0]["responses"] == 1


def test_two_rounds_carry_step_count_moments_and_schedule(tiny_dir, recorded, tmp_path):
    """Round 2 with lr 0 in round 1 (so the policy stays and its record can be used again) still finds round 1's moments."""
    more = ("--rounds", 2, "--schedule", "linear", "--steps-per-round", 2)
    first = tmp_path / "rl-1"
    update(tiny_dir, recorded[0], first, "--lr", 0, *more)
    state = json.loads((first / "state" / "trainer_state.json").read_text())
    assert state["steps"] == 2 and state["policy_version"] == policy_version(first)
    assert_equal_weights(tiny_dir, first)

    def played_by_first(episodes, calls):
        for r in (*episodes.values(), *calls.values()):
            r.policy_version = r.policy_version_end = policy_version(first)
    again = changed(recorded, tmp_path / "round-2", played_by_first)
    update(first, again, tmp_path / "rl-2", "--round", 2, "--previous", first, *more)
    update(first, again, tmp_path / "fresh", "--round", 2, "--fresh-optimizer", *more)
    two, fresh = rows(tmp_path / "rl-2"), rows(tmp_path / "fresh")
    assert [r["total_step"] for r in two] == [3, 4] and [r["total_step"] for r in fresh] == [1, 2]
    assert [r["lr"] for r in two] == pytest.approx([0.5e-3, 0.25e-3])
    # by hand: the two rounds as one run of AdamW over the same batches
    run_main_args = ["rl", "--model", str(tiny_dir), "--rollouts", "x", "--output", "y", "--lr", "1e-3", *map(str, more)]
    saved, sys.argv = sys.argv, run_main_args
    args = rl.parse_args()
    sys.argv = saved
    ranks = trainer.Ranks()
    run = trainer.Trainer(model.load_model(tiny_dir, ranks, args), args, ranks)
    for args.round, folder, lrs in ((1, first, (0, 0)), (2, tmp_path / "rl-2", (0.5e-3, 0.25e-3))):
        responses, data = rl.load_batch(folder / "batch", json.loads((folder / "batch" / "batch.json").read_text()), [])
        weight = rl.loss.token_weights(responses.lengths, data["u"])
        A = torch.repeat_interleave(data["advantage"], responses.lengths)
        for batch, lr in zip(rl.make_batches(responses, args), lrs, strict=True):
            for m in run.micro_batches(responses, batch):
                part, _ = rl.loss.rl_loss(run.logp(m), data["log_q"][m.index], data["log_b"][m.index], A[m.index], weight[m.index],
                                          float(data["u"][batch].sum()))
                run.backward(part)
            run.step(lr)
    together = {n: p.detach() for n, p in run.model.named_parameters()}
    for name, w in weights(tmp_path / "rl-2").items():
        assert torch.equal(w, together[name]), name                    # bit for bit
    assert any(not torch.equal(w, together[n]) for n, w in weights(tmp_path / "fresh").items())


def test_round_two_needs_the_right_previous_state(tiny_dir, recorded, updated, tmp_path):
    with pytest.raises(SystemExit):                                    # argparse: exit code 2
        update(tiny_dir, recorded[0], tmp_path / "out", "--round", 2)
    with pytest.raises(BadInput, match="belongs to policy"):
        update(tiny_dir, recorded[0], tmp_path / "out", "--round", 2, "--previous", updated[0])


def test_all_equal_round_writes_no_checkpoint_and_the_next_one_looks_through_it(tiny_dir, recorded, tmp_path, capsys):
    def level(episodes, _):
        for e in episodes.values():
            e.reward = 0 if e.valid else None
    folder = changed(recorded, tmp_path / "round", level)
    report = update(tiny_dir, folder, tmp_path / "rl-1")
    assert not report["trained"] and report["counts"]["groups_equal"] == 4 and "no new checkpoint" in capsys.readouterr().out
    assert not (tmp_path / "rl-1" / "config.json").exists() and (tmp_path / "rl-1" / "manifest.json").exists()
    report = update(tiny_dir, recorded[0], tmp_path / "rl-2", "--round", 2, "--previous", tmp_path / "rl-1")
    assert report["trained"] and report["total_steps"] == report["steps"]


def test_wrong_policy_version_exits_2_with_one_line(tiny_dir, recorded, updated, tmp_path):
    done = run_script("rl.py", "--model", updated[0], "--rollouts", recorded[0], "--output", tmp_path / "out", check=2)
    assert done.stderr.count("\n") == 1 and "give the checkpoint that played the round" in done.stderr
    assert not (tmp_path / "out" / "config.json").exists()


def test_sigkill_and_the_same_command_equal_an_uninterrupted_round(tiny_dir, tmp_path):
    """Killed as soon as batch/ is whole, killed again among the updates (a second of them), then left to finish."""
    _, calls = record_round(tmp_path / "round", tiny_dir, {("s/0", 11): [1, 0] * 15})
    argv = ["--model", tiny_dir, "--rollouts", tmp_path / "round", "--lr", 1e-3, "--global-batch", 1, "--threads", 1]
    run_main(rl.main, *argv, "--output", tmp_path / "whole")
    output = tmp_path / "killed"
    for written in (output / "batch" / "batch.json", output / "metrics.jsonl"):
        with subprocess.Popen([sys.executable, str(ROOT / "rl.py"), *map(str, argv), "--output", str(output)],
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            deadline = time.monotonic() + 60
            while not written.exists() or not written.stat().st_size:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.005)
            process.send_signal(signal.SIGKILL)
            said = process.stdout.read()
        assert not (output / "manifest.json").exists() and not (output / "config.json").exists()
    assert "as it was written before" in said and 0 < len(rows(output)) < len(calls)
    run_main(rl.main, *argv, "--output", output)
    assert_equal_weights(tmp_path / "whole", output)                   # bit for bit
    clock = ("seconds", "tokens_per_second")
    a, b = ([{k: v for k, v in r.items() if k not in clock} for r in rows(o)] for o in (tmp_path / "whole", output))
    assert a == b and len(a) == len(calls)
    a, b = (json.loads((o / "manifest.json").read_text())["counts"] for o in (tmp_path / "whole", output))
    assert a == b


def test_sharded_round_trains_as_the_whole_one(tiny_dir, recorded, tmp_path):
    """Every third episode and its calls in a shard (pictures in their own shard's images/: test_vision.py)."""
    episodes, calls = ([copy.deepcopy(r) for r in records] for records in recorded[1:])
    write_round(tmp_path / "whole", episodes, calls)
    episodes.sort(key=lambda e: e.reward or 0)                         # another order than the whole round's
    for i in range(3):
        folder, ids = tmp_path / "round" / f"shard-{i}-of-3", {e.episode_id for e in episodes[i::3]}
        write_round(folder, episodes[i::3], [c for c in calls if c.episode_id in ids])
    whole, sharded = (update(tiny_dir, tmp_path / name, tmp_path / f"{name}-out", "--steps-per-round", 2)["counts"]
                      for name in ("whole", "round"))
    assert whole == sharded and sharded["calls_orphaned"] == sharded["calls_gated"] == 0
    assert_equal_weights(tmp_path / "whole-out", tmp_path / "round-out")       # bit for bit
    (tmp_path / "round" / "shard-1-of-3").rename(tmp_path / "round" / "elsewhere")
    with pytest.raises(BadInput, match="missing shard-1-of-3"):
        update(tiny_dir, tmp_path / "round", tmp_path / "out")


def run_again(recorded, folder, *tries):
    """The round, with tries (reward or None, …) before the recorded one of attempt 0 at s/0. Ids as adapters.py makes
    them: only the try, .r0, .r1, …, differs."""
    episodes, calls = ([copy.deepcopy(r) for r in records] for records in recorded[1:])
    kept = next(e for e in episodes if e.episode_id == "s-0-11-0")
    more = []
    for r, reward in enumerate(tries):
        e, mine = copy.deepcopy(kept), [copy.deepcopy(c) for c in calls if c.call_id in kept.calls[:1]]
        e.episode_id = f"s-0-11-0.r{r}"
        e.reward, e.valid, e.reason = reward, reward is not None, None if reward is not None else "model_server"
        for c in mine:
            c.episode_id, c.call_id = e.episode_id, f"{e.episode_id}/0"
        e.calls = [c.call_id for c in mine]
        more.append(e)
        calls += mine
    write_round(folder, [*more, *episodes], calls)
    return folder


def test_invalid_try_that_was_run_again_is_replaced(tiny_dir, recorded, updated, tmp_path):
    folder = run_again(recorded, tmp_path / "round", None, None)
    argv = ("--steps-per-round", 3, "--rounds", 2, "--warmup", 2, "--schedule", "linear")
    counts, before = update(tiny_dir, folder, tmp_path / "out", *argv)["counts"], updated[1]["counts"]
    assert before["episodes_run_again"] == 0
    assert counts == {**before, "episodes_run_again": 2, "calls": before["calls"] + 2}     # nor are its calls orphans
    assert_equal_weights(updated[0], tmp_path / "out")                 # bit for bit the round without those tries
    with pytest.raises(BadInput, match=r"stands there twice \(s-0-11-0.r1, s-0-11-0\)"):
        update(tiny_dir, run_again(recorded, tmp_path / "two", None, 0), tmp_path / "two-out")
    with pytest.raises(BadInput, match=r"attempt 2 at s/1, state 12 stands there twice"):  # one invalid episode, twice
        twice = changed(recorded, tmp_path / "twice", lambda e, c: None)
        lines = (twice / "episodes.jsonl").read_text().splitlines(keepends=True)
        (twice / "episodes.jsonl").write_text("".join([*lines, next(x for x in lines if "s-1-12-2" in x)]))
        update(tiny_dir, twice, tmp_path / "twice-out")


def test_attempt_without_a_valid_try_stays_invalid(tiny_dir, recorded, tmp_path):
    folder = run_again(recorded, tmp_path / "round", None)
    lines = [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]
    for e in lines:
        if e["episode_id"] == "s-0-11-0":
            e.update(valid=False, reward=None, reason="worker_lost")
    (folder / "episodes.jsonl").write_text("".join(json.dumps(e) + "\n" for e in lines))
    counts = update(tiny_dir, folder, tmp_path / "out", "--lr", 0)["counts"]
    assert (counts["episodes"], counts["episodes_invalid"], counts["episodes_run_again"]) == (18, 4, 1)


def test_failed_invalid_and_gated_are_told_apart(tiny_dir, tmp_path):
    """Through the adapter: a failure votes, an invalid attempt does not, a gated call weighs 0 and its reward votes."""
    folder, version = tmp_path / "round", policy_version(tiny_dir)
    played, calls = record_round(folder, tiny_dir, {("s/0", 11): [1, 0, 0, 1, 1, 0]}, turns=(3, 3))
    calls = [copy.deepcopy(c) for c in calls]                          # one by one: nothing shared
    by_id, adapter, episodes = {c.call_id: c for c in calls}, adapters.ADAPTERS["skills"](), []
    for old, end in zip(played, ("finish", "turns", None, "finish", "finish", "time"), strict=True):
        solved = old.reward == 1
        outcome = {"lost": True} if end is None else {
            "end": end, "start_state": "same", "success_latched": solved, "success_final": solved, "finished": solved,
            "success_turn": 1 if solved else None, "seconds": 9.0, "turns": 3}
        spec = {"episode_id": old.episode_id, "suite": "s", "index": 0, "init": 11, "attempt": old.attempt}
        episodes.append(adapter.episode(spec, outcome, [by_id[c] for c in old.calls], version))
    assert [(e.reward, e.valid, e.reason) for e in episodes] == [
        (1, True, None), (0, True, None), (None, False, "worker_lost"), (1, True, None), (1, True, None),
        (0, True, None)]
    for call_id in ("s-0-11-0/1", *(f"s-0-11-4/{t}" for t in range(3))):    # the record says other text than was sent
        by_id[call_id].messages[0]["content"] += "!"
    write_round(folder, episodes, calls)
    counts = update(tiny_dir, folder, tmp_path / "out", "--lr", 0, "--max-mismatch", 1)["counts"]
    assert (counts["episodes_invalid"], counts["groups_used"], counts["calls_post_success"]) == (1, 1, 3)
    # attempt 0: turns 0 and 1, 1 gated | 1 and 5: all three turns | 3: turns 0 and 1 | 4: turns 0 and 1, both gated
    assert (counts["calls_compared"], counts["calls_gated"], counts["calls_trained"]) == (12, 3, 9)
    tensors = load_file(tmp_path / "out/batch/batch.safetensors")
    index = json.loads((tmp_path / "out/batch/batch.json").read_text())
    trained = {}
    for r, a, k in zip(index["responses"], tensors["advantage"].tolist(), tensors["k"].tolist(), strict=True):
        trained.setdefault(r["episode_id"], []).append((r["turn"], k, round(a, 6)))
    # rewards that vote: 1 0 1 1 0, attempt 4's among them although none of its calls trains; A = R - mean of the others
    assert trained == {
        "s-0-11-0": [(0, 1, 0.5)], "s-0-11-1": [(t, 3, -0.75) for t in range(3)],
        "s-0-11-3": [(t, 2, 0.5) for t in range(2)], "s-0-11-5": [(t, 3, -0.75) for t in range(3)]}
    _, data = rl.load_batch(tmp_path / "out" / "batch", index, [])
    assert data["u"].sum().item() == pytest.approx(4)                  # each episode that trains weighs 1


def spoil(field, value):
    def change(episodes, calls):
        call = calls["s-0-11-0/1"]
        setattr(call, field, value(getattr(call, field)))
    return change


@pytest.mark.parametrize("change, count", [
    (spoil("logprobs", lambda x: [float("nan"), *x[1:]]), "calls_incomplete"), (spoil("logprobs", lambda x: [-9999.0, *x[1:]]), "calls_incomplete"),
    (spoil("logprobs", lambda x: x[1:]), "calls_incomplete"), (spoil("token_ids", lambda x: []), "calls_incomplete"),
    (spoil("delivered", lambda x: False), "calls_incomplete"), (spoil("error", lambda x: "timeout"), "calls_incomplete"),
    (spoil("policy_version_end", lambda x: "other"), "calls_incomplete"),
    (lambda e, c: [setattr(c["s-0-11-0/1"], n, "other") for n in ("policy_version", "policy_version_end")], "calls_policy"),
    (lambda e, c: e["s-0-11-0"].__setattr__("success_turn", len(e["s-0-11-0"].calls) - 2), "calls_post_success"),
    (lambda e, c: e["s-0-11-0"].calls.remove("s-0-11-0/1"), "calls_orphaned"),
    (lambda e, c: e["s-0-11-0"].calls.append("s-0-11-0/99"), "calls_lost")])
def test_calls_that_must_not_train_are_counted_and_leave_k(tiny_dir, recorded, tmp_path, change, count):
    report = update(tiny_dir, changed(recorded, tmp_path / "round", change), tmp_path / "out", "--lr", 0)
    lost = 0 if count == "calls_lost" else 1
    episode = next(e for e in recorded[1] if e.episode_id == "s-0-11-0")
    all_used = sum(len(e.calls) for e in recorded[1] if e.valid and e.task in ("s/0", "s/1", "s/4"))
    assert report["counts"][count] == 1 and report["counts"]["calls_trained"] == all_used - lost
    tensors, index = load_file(tmp_path / "out/batch/batch.safetensors"), json.loads((tmp_path / "out/batch/batch.json").read_text())
    k = {r["episode_id"]: n for r, n in zip(index["responses"], tensors["k"].tolist())}
    assert k["s-0-11-0"] == len(episode.calls) - lost


def test_gated_calls_leave_k_and_too_many_stop_the_round(tiny_dir, recorded, tmp_path, capsys):
    def rewrite(episodes, calls):                                      # the record says other text than the tokens
        calls["s-0-11-0/1"].messages[0]["content"] += "!"
    def picture(episodes, calls):
        calls["s-0-11-0/1"].messages[0]["content"] = [{"type": "image", "sha256": "0" * 64}]
    for name, change in (("text", rewrite), ("picture", picture)):
        folder = changed(recorded, tmp_path / name, change)
        with pytest.raises(BadInput, match="more than --max-mismatch"):
            update(tiny_dir, folder, tmp_path / f"{name}-stop", "--lr", 0)
        counts = update(tiny_dir, folder, tmp_path / f"{name}-out", "--lr", 0, "--max-mismatch", 0.5)["counts"]
        assert counts["calls_gated"] == 1 and counts["calls_trained"] == counts["calls_compared"] - 1
        assert 0 < counts["gate_mismatch"] < 0.1


def test_all_calls_gated_is_no_update(tiny_dir, recorded, tmp_path):
    def rewrite(episodes, calls):
        for call in calls.values():
            call.messages[0]["content"] += "!"
    report = update(tiny_dir, changed(recorded, tmp_path / "round", rewrite), tmp_path / "out", "--max-mismatch", 1)
    assert not report["trained"] and report["counts"]["calls_trained"] == 0 and not (tmp_path / "out" / "config.json").exists()


def test_cap_draws_without_replacement_and_the_same_again(tiny_dir, recorded, tmp_path):
    listed = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        update(tiny_dir, recorded[0], tmp_path / name, "--lr", 0, "--max-responses", 2, "--seed", seed)
        tensors, index = load_file(tmp_path / name / "batch/batch.safetensors"), json.loads((tmp_path / name / "batch/batch.json").read_text())
        ids = [r["call_id"] for r in index["responses"]]
        assert len(set(ids)) == len(ids) and set(tensors["k"].tolist()) == {2}
        listed.append(ids)
    assert listed[0] == listed[1] != listed[2]


def test_different_start_states_drop_the_group(tiny_dir, recorded, tmp_path):
    def move(episodes, calls):
        episodes["s-0-11-0"].start_state = "elsewhere"
        episodes["s-3-14-1"].start_state = "never mind: this attempt is invalid"
    counts = update(tiny_dir, changed(recorded, tmp_path / "round", move), tmp_path / "out", "--lr", 0)["counts"]
    assert counts["groups_start_state"] == 1 and counts["groups_used"] == 2 and counts["groups_too_small"] == 1


@pytest.mark.parametrize("change, says", [
    (lambda e, c: c["s-0-11-0/1"].sampling.update(top_p=0.95), "top_p 0.95 instead of 1.0"),
    (lambda e, c: c["s-0-11-0/1"].sampling.pop("min_p"), "min_p nothing instead of 0.0"),
    (lambda e, c: e["s-0-11-1"].__setattr__("attempt", 0), "attempt 0 at s/0, state 11 stands there twice"),
    (lambda e, c: c["s-0-11-0/1"].__setattr__("call_id", "s-0-11-0/0"), "stands there twice")])
def test_records_of_another_kind_are_refused(tiny_dir, recorded, tmp_path, change, says):
    with pytest.raises(BadInput, match=says):
        update(tiny_dir, changed(recorded, tmp_path / "round", change), tmp_path / "out")


def test_too_long_calls_are_left_out(tiny_dir, recorded, tmp_path):
    longest = max(len(c.prompt_token_ids) + len(c.token_ids) for c in recorded[2])
    counts = update(tiny_dir, recorded[0], tmp_path / "out", "--lr", 0, "--max-length", longest - 1)["counts"]
    assert counts["calls_too_long"] >= 1


def test_batch_flags_exclude_each_other(tiny_dir, recorded, tmp_path):
    done = run_script("rl.py", "--model", tiny_dir, "--rollouts", recorded[0], "--output", tmp_path / "out", "--steps-per-round", 2,
                      "--global-batch", 64, check=2)
    assert "give one" in done.stderr


def test_noisy_rollout_probabilities_are_weighted_not_ignored(tiny_dir, tmp_path):
    folder = tmp_path / "round"
    record_round(folder, tiny_dir, {("s/0", 11): [1, 0, 1]}, noise=1.0)
    update(tiny_dir, folder, tmp_path / "out", "--lr", 0)
    row = rows(tmp_path / "out")[0]
    assert row["pi_b_min"] == row["pi_b_max"] == 1 and row["gap_qb_abs"] > 0.3 and row["w_capped"] > 0 and row["ratio_max"] > 1.28
    assert row["clip_low"] > 0 and row["clip_high"] > 0
