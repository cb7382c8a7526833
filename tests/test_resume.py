"""sft.py and rl.py ended from outside and gone on with: signals, STOP, kills, another run's arguments; and two rounds as one run."""

import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

import checkpoint
import gate
import loss
import model
import records
import rl
import sft
import trainer
from pictures import load_pictures
from records import Call, Episode, ImageStore, policy_version
from test_trainer import ROOT, TOOLS, arguments, assert_equal_weights, conversation, record_round, run_main, weights, write_round

CLOCKS = ("seconds", "tokens_per_second")


# ---------------------------------------------------------------------------------------------- recorded data

def write_rows(folder, model_dir, episodes, seed=0, shown=()):
    """sft.jsonl of `episodes` append-only episodes; shown: pictures (bytes), which stand in the second turn of every other one."""
    rng, tokenizer, pictures = random.Random(seed), gate.load_tokenizer(model_dir), load_pictures(model_dir)
    store = ImageStore(folder / "images")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "sft.jsonl", "w") as f:
        for e in range(episodes):
            for turn, (messages, reply) in enumerate(conversation(rng, 3)):
                if shown and e % 2 and turn:
                    part = {"type": "image", "sha256": store.put(shown[e % len(shown)])}
                    messages = [messages[0], {"role": "user", "content": [{"type": "text", "text": "Look."}, part]}, *messages[1:]]
                prompt, output = gate.render_target(tokenizer, messages, TOOLS, reply, {}, images=store, pictures=pictures)
                f.write(json.dumps({"prompt_token_ids": prompt, "token_ids": output, "episode_id": f"e{e:02}", "turn": turn,
                                    "pictures": gate.picture_hashes(messages)}) + "\n")
    return folder / "sft.jsonl"


def png(width, height, colour="red"):
    out = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(out, "PNG")
    return out.getvalue()


@pytest.fixture(scope="module")
def data(tiny_dir, tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("data"), tiny_dir, 12)               # 36 rows: 6 steps of two episodes


@pytest.fixture(scope="module")
def recorded(tiny_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("round") / "round-1"
    return folder, *record_round(folder, tiny_dir, {("s/0", 11): [1, 0, 1, 0], ("s/1", 12): [0, 1]}, turns=(2, 3))


def sft_argv(model_dir, data, output, *more):
    return ["--model", model_dir, "--data", data, "--output", output, "--lr", 1e-3, "--global-batch", 6, "--threads", 1,
            "--schedule", "linear", "--warmup", 2, *more]


def rl_argv(model_dir, rollouts, output, *more):
    return ["--model", model_dir, "--rollouts", rollouts, "--output", output, "--lr", 1e-3, "--steps-per-round", 6, "--threads", 1,
            "--schedule", "linear", "--rounds", 2, *more]


@pytest.fixture(scope="module")
def whole(data, recorded, tiny_dir, tmp_path_factory):
    """{"sft": output, "rl": output}: the runs that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    assert run_main(sft.main, *sft_argv(tiny_dir, data, folder / "sft")) == run_main(rl.main, *rl_argv(tiny_dir, recorded[0], folder / "rl")) == 0
    return {"sft": folder / "sft", "rl": folder / "rl"}


def rows(output, clocks=False):
    log = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return log if clocks else [{k: v for k, v in row.items() if k not in CLOCKS} for row in log]


def assert_same_run(a, b):
    """Weights, optimizer state, metrics but clocks, counts: bit for bit."""
    assert_equal_weights(a, b)
    assert rows(a) == rows(b)
    assert (json.loads((a / "state" / "trainer_state.json").read_text()) == json.loads((b / "state" / "trainer_state.json").read_text()))
    assert (json.loads((a / "manifest.json").read_text())["counts"] == json.loads((b / "manifest.json").read_text())["counts"])
    assert not (b / "resume").exists() and not (b / "part").exists()


def points(output):
    return sorted(p.name for p in (output / "resume").glob("*"))


# ---------------------------------------------------------------------------------------------- runs that end early

def at_step(monkeypatch, step, act):
    """Calls act() as soon as the row of `step` is in metrics.jsonl."""
    log = trainer.Metrics.log

    def logged(self, row, work):
        log(self, row, work)
        if row["step"] == step:
            act()
    monkeypatch.setattr(trainer.Metrics, "log", logged)


def killed():
    raise KeyboardInterrupt


# The stage as a user starts it, but for one thing: once step HOLD is logged it says so and waits for a signal.
DRIVER = """import os, pathlib, runpy, signal, sys, time
sys.path.insert(0, {root!r})
import trainer
log = trainer.Metrics.log
def logged(self, row, work):
    log(self, row, work)
    if row["step"] == {hold} and self.main:
        pathlib.Path({flag!r}).touch()
        while not signal.getsignal(signal.SIGTERM).__self__.signal:
            time.sleep(0.005)
trainer.Metrics.log = logged
sys.argv[0] = {script!r}
runpy.run_path({script!r}, run_name="__main__")
"""


class Held:
    """A stage in a process of its own that waits after step `hold`, as a context: it is killed at the end whatever happened."""

    def __init__(self, folder, script, hold, argv, launch=()):
        folder.mkdir(exist_ok=True)
        self.flag, driver = folder / "flag", folder / "driver.py"
        self.flag.unlink(missing_ok=True)
        driver.write_text(DRIVER.format(root=str(ROOT), hold=hold, flag=str(self.flag), script=str(ROOT / script)))
        self.process = subprocess.Popen([sys.executable, *launch, str(driver), *map(str, argv)], text=True, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True)

    def __enter__(self):
        deadline = time.monotonic() + 120
        while not self.flag.exists():
            assert self.process.poll() is None and time.monotonic() < deadline, self.process.communicate()
            time.sleep(0.01)
        return self

    def send(self, number):
        """Sends the signal; returns (exit code, stdout, stderr)."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out, err

    def __exit__(self, *_):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()


def test_sigterm_ends_sft_after_its_step_and_the_same_command_goes_on(data, tiny_dir, whole, tmp_path):
    argv = sft_argv(tiny_dir, data, tmp_path / "out")
    with Held(tmp_path / "held", "sft.py", 2, argv) as held:
        code, out, err = held.send(signal.SIGTERM)
    assert code == 4 and "ended by SIGTERM after step 2 of 6; repeat the command to go on" in out, (code, out, err)
    assert err == "", err                                                  # no progress bars, no warnings, no traceback
    assert points(tmp_path / "out") == ["step-00000002"] and not (tmp_path / "out" / "config.json").exists()
    assert run_main(sft.main, *argv) == 0
    assert_same_run(whole["sft"], tmp_path / "out")


def test_rl_survives_sigkill_then_sigterm(recorded, tiny_dir, whole, tmp_path):
    """SIGKILL in the middle of a round goes on from the newest whole point; SIGTERM then from its own."""
    argv, output = rl_argv(tiny_dir, recorded[0], tmp_path / "out"), tmp_path / "out"
    with Held(tmp_path / "held", "rl.py", 3, [*argv, "--save-every", 1, "--keep", 1]) as held:
        code, *_ = held.send(signal.SIGKILL)
    assert code == -signal.SIGKILL and points(output) == ["step-00000002"] and len(rows(output)) == 3
    batch = (output / "batch" / "batch.safetensors").read_bytes()
    shutil.copytree(output / "resume" / "step-00000002", output / "resume" / "part")               # half of a later point
    (output / "resume" / "part" / "trainer_state.json").unlink()
    with Held(tmp_path / "held", "rl.py", 5, argv) as held:
        code, out, err = held.send(signal.SIGTERM)
    assert code == 4 and err == "" and "rl: continuing after step 2 from" in out and "ended by SIGTERM after step 5 of 6" in out, (out, err)
    assert "step-00000005" in points(output) and "part" not in points(output)
    assert (output / "batch" / "batch.safetensors").read_bytes() == batch
    assert run_main(rl.main, *argv) == 0
    assert_same_run(whole["rl"], output)


@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_stop_file_ends_at_once_as_often_as_it_is_there(stage, data, recorded, tiny_dir, whole, tmp_path, monkeypatch, capsys):
    output = tmp_path / "out"
    main, argv = (sft.main, sft_argv(tiny_dir, data, output)) if stage == "sft" else (rl.main, rl_argv(tiny_dir, recorded[0], output))
    with monkeypatch.context() as m:
        at_step(m, 3, (output / "STOP").touch)
        assert run_main(main, *argv) == 4
    assert points(output) == ["step-00000003"] and f"ended by {output}/STOP (delete it) after step 3 of 6" in capsys.readouterr().out
    before = {p: p.read_bytes() for p in output.rglob("*") if p.is_file()}
    for _ in range(2):
        assert run_main(main, *argv) == 4 and "after step 3 of 6" in capsys.readouterr().out
    assert {p: p.read_bytes() for p in output.rglob("*") if p.is_file()} == before                  # nothing lost, nothing written
    (output / "STOP").unlink()
    assert run_main(main, *argv) == 0
    assert_same_run(whole[stage], output)


def test_stop_file_before_the_first_step(data, tiny_dir, whole, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "STOP").touch()
    assert run_main(sft.main, *sft_argv(tiny_dir, data, tmp_path / "out")) == 4
    assert "after step 0 of 6" in capsys.readouterr().out and not (tmp_path / "out" / "resume").exists()
    (tmp_path / "out" / "STOP").unlink()
    assert run_main(sft.main, *sft_argv(tiny_dir, data, tmp_path / "out")) == 0
    assert_same_run(whole["sft"], tmp_path / "out")


def test_second_signal_ends_at_once_but_not_within_two_seconds(tmp_path, monkeypatch):
    ended, now = [], [100.0]
    monkeypatch.setattr(trainer.os, "_exit", ended.append)
    monkeypatch.setattr(trainer.time, "monotonic", lambda: now[0])
    steps = trainer.Steps(0, 3, tmp_path, trainer.Ranks(), "sft")
    for after in (0.0, 0.1, 1.9):                                          # torchrun and a scheduler both pass one on
        now[0] = 100 + after
        steps._arrived(signal.SIGTERM, None)
    assert not ended
    now[0] = 102.1
    steps._arrived(signal.SIGINT, None)
    assert ended == [128 + signal.SIGINT]


def test_signal_repeated_while_the_resume_point_is_written_does_not_tear_it(data, tiny_dir, tmp_path, monkeypatch):
    """torchrun passes on what the terminal or the scheduler has already sent: the second one comes after the step. Nor does a first
    one end the run while its checkpoint is written."""
    killers, save = [], checkpoint.save_state

    def slow(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        save(*args)
    old = signal.signal(signal.SIGTERM, lambda *_: killers.append("the handler was already gone"))
    try:
        with monkeypatch.context() as m:
            at_step(m, 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
            m.setattr(checkpoint, "save_state", slow)
            assert run_main(sft.main, *sft_argv(tiny_dir, data, tmp_path / "out")) == 4
        assert not killers and points(tmp_path / "out") == ["step-00000001"]
        with monkeypatch.context() as m:
            m.setattr(checkpoint, "save_state", slow)
            assert run_main(sft.main, *sft_argv(tiny_dir, data, tmp_path / "out")) == 0
        assert not killers and (tmp_path / "out" / "manifest.json").exists()
        os.kill(os.getpid(), signal.SIGTERM)
        assert killers                                                     # and afterwards the caller's handler is back
    finally:
        signal.signal(signal.SIGTERM, old)


# ---------------------------------------------------------------------------------------------- resume points

def test_newest_k_points_stay_and_nothing_else_is_taken_for_one(data, tiny_dir, whole, tmp_path, monkeypatch):
    output = tmp_path / "out"
    argv = sft_argv(tiny_dir, data, output, "--save-every", 1)
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        at_step(m, 5, killed)
        run_main(sft.main, *argv, "--keep", 3)
    assert points(output) == ["step-00000002", "step-00000003", "step-00000004"]
    for name in ("part", "step-00000004.bak", "step-old", "step-"):        # by hand, or of a copy that was cut short
        (output / "resume" / name).mkdir()
    (output / "resume" / "step-00000009").touch()                          # no folder
    assert checkpoint.newest_resume(output, json.loads((output / "resume/step-00000004/trainer_state.json").read_text())["identity"])[1] == 4
    with open(output / "metrics.jsonl", "a") as f:                         # a row that the kill tore
        f.write('{"step": 6, "lo')
    assert run_main(sft.main, *argv, "--keep", 1) == 0
    assert_same_run(whole["sft"], output)


@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_kill_while_the_checkpoint_moves_in_is_survived(stage, data, recorded, tiny_dir, whole, tmp_path, monkeypatch):
    """Killed before each move out of part/, then before the manifest: no folder of two kinds, no state lost."""
    output, replace, left = tmp_path / "out", Path.replace, [0]
    main, argv = (sft.main, sft_argv(tiny_dir, data, output)) if stage == "sft" else (rl.main, rl_argv(tiny_dir, recorded[0], output))

    def moved(self, target):
        if self.parent.name == "part" and self.parent.parent == output:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
        return replace(self, target)
    with monkeypatch.context() as m:
        at_step(m, 4, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert run_main(main, *argv) == 4
    for moves in (0, 1, 3):
        with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
            left[0] = moves
            m.setattr(Path, "replace", moved)
            run_main(main, *argv)
        assert not (output / "config.json").exists() and points(output) == ["step-00000004"]
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(sft if stage == "sft" else rl, "write_manifest", lambda *_: killed())
        run_main(main, *argv)
    assert (output / "config.json").exists() and not (output / "manifest.json").exists()
    assert run_main(main, *argv) == 0
    assert_same_run(whole[stage], output)


def test_kill_between_manifest_and_cleaning_leaves_no_resume_points_for_good(data, tiny_dir, tmp_path, monkeypatch):
    output = tmp_path / "out"
    argv = sft_argv(tiny_dir, data, output, "--save-every", 2)
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        write = sft.write_manifest
        m.setattr(sft, "write_manifest", lambda *a: (write(*a), killed()))
        run_main(sft.main, *argv)
    assert points(output) == ["step-00000002", "step-00000004"]
    assert run_main(sft.main, *argv) == 0
    assert not (output / "resume").exists()                                # 100 GB each at 9B


# ---------------------------------------------------------------------------------------------- what a run was computed from

def refused(capsys, main, *argv):
    """The one line with which a stage refuses; exit code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        run_main(lambda: records.run_main(main), *argv)
    err = capsys.readouterr().err
    assert end.value.code == 2 and err.count("\n") == 1 and err.startswith("error: "), err
    return err


def stopped_after_two(monkeypatch, main, argv):
    with monkeypatch.context() as m:
        at_step(m, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert run_main(main, *argv) == 4


def snapshot(output):
    return {p.relative_to(output): p.read_bytes() for p in output.rglob("*") if p.is_file()}


def test_sft_refuses_another_run_and_loses_nothing(data, tiny_dir, whole, tmp_path, monkeypatch, capsys):
    shutil.copytree(tiny_dir, tmp_path / "base")
    shutil.copytree(data.parent, tmp_path / "data")
    mine, output = tmp_path / "data" / "sft.jsonl", tmp_path / "out"
    argv = sft_argv(tmp_path / "base", mine, output)
    stopped_after_two(monkeypatch, sft.main, argv)
    before, text = snapshot(output), mine.read_text()
    monkeypatch.setattr(model, "read_weights", lambda *_: pytest.fail("weights were read"))
    for more, says in ((("--lr", 2e-3), "had other lr"), (("--seed", 1), "had other seed"), (("--max-steps", 5), "had other max_steps"),
                       (("--train-vision",), "had other train_vision")):
        assert says in refused(capsys, sft.main, *argv, *more)
    mine.write_text("".join(text.splitlines(True)[:-1]))
    assert "had other data_sha256" in refused(capsys, sft.main, *argv)
    mine.write_text(text)
    weights_file = tmp_path / "base" / "model.safetensors"
    content = weights_file.read_bytes()
    weights_file.write_bytes(content[:-4] + b"\0\0\0\0")                  # another checkpoint under the same path
    assert "had other policy_version" in refused(capsys, sft.main, *argv)
    weights_file.write_bytes(content)
    assert snapshot(output) == before                                      # args.json too says what the interrupted run was
    monkeypatch.undo()
    free = ("--micro-tokens", 64, "--recompute", "on", "--keep", 1, "--save-every", 1, "--log-every", 3, "--no-prefix-merge")
    assert run_main(sft.main, *argv, *free) == 0
    for name, w in weights(whole["sft"]).items():
        moved, gap = (w - weights(tiny_dir)[name]).norm(), (w - weights(output)[name]).norm()
        assert gap < 1e-3 * moved, (name, gap, moved)


def test_rl_refuses_another_round_and_loses_nothing(recorded, tiny_dir, whole, tmp_path, monkeypatch, capsys):
    """Its batch with log b of the policy before the first update cannot be made again once the weights have moved on."""
    shutil.copytree(recorded[0], tmp_path / "round")
    shutil.copytree(tiny_dir, tmp_path / "base")
    mine, output = tmp_path / "round", tmp_path / "out"
    argv = rl_argv(tmp_path / "base", mine, output)
    stopped_after_two(monkeypatch, rl.main, argv)
    before, calls = snapshot(output), (mine / "calls.jsonl").read_text()
    monkeypatch.setattr(model, "read_weights", lambda *_: pytest.fail("weights were read"))
    for more, says in ((("--lr", 2e-3), "had other lr"), (("--seed", 1), "had other seed"), (("--cap", 3), "had other cap"),
                       (("--max-responses", 1), "had other max_responses")):
        assert says in refused(capsys, rl.main, *argv, *more)
    (mine / "calls.jsonl").write_text("".join(calls.splitlines(True)[:-1]))
    assert "had other rollouts_sha256" in refused(capsys, rl.main, *argv)
    (mine / "calls.jsonl").write_text(calls)
    weights_file = tmp_path / "base" / "model.safetensors"
    content = weights_file.read_bytes()
    weights_file.write_bytes(content[:-4] + b"\0\0\0\0")
    assert "had other policy_version" in refused(capsys, rl.main, *argv)
    weights_file.write_bytes(content)
    assert snapshot(output) == before
    monkeypatch.undo()
    assert run_main(rl.main, *argv) == 0
    assert_same_run(whole["rl"], output)


# ---------------------------------------------------------------------------------------------- two rounds as one process

def test_two_rounds_in_two_commands_are_one_run_by_hand(tiny_dir, recorded, tmp_path):
    """Learning rate, warm-up and decay over both, moments, step count, and log b of round 2's own policy: bit for bit."""
    argv = ["--lr", 1e-3, "--warmup", 3, "--schedule", "linear", "--rounds", 3, "--steps-per-round", 2, "--threads", 1]
    first, second = tmp_path / "rl-1", tmp_path / "rl-2"
    assert run_main(rl.main, "--model", tiny_dir, "--rollouts", recorded[0], "--output", first, *argv) == 0
    version, again = policy_version(first), [[type(r)(**vars(r)) for r in records_] for records_ in recorded[1:]]
    for r in (*again[0], *again[1]):                                       # as if the new policy had played the same words
        r.policy_version = version
        if isinstance(r, Call):
            r.policy_version_end = version
    assert isinstance(again[0][0], Episode)
    write_round(tmp_path / "round-2", *again)
    assert run_main(rl.main, "--model", first, "--previous", first, "--rollouts", tmp_path / "round-2", "--output", second, "--round", 2, *argv) == 0

    args, lrs = arguments(), []
    run = trainer.Trainer(model.load_model(tiny_dir, trainer.Ranks(), args), args, trainer.Ranks())
    for number, folder in ((1, first), (2, second)):
        responses, t = rl.load_batch(folder / "batch", json.loads((folder / "batch" / "batch.json").read_text()), [])
        args.seed, args.round, args.steps_per_round = 0, number, 2
        made = rl.make_batches(responses, args)
        log_b = torch.full_like(t["log_q"], torch.nan)                     # (N,)
        with torch.no_grad():
            for micro in (m for batch in made for m in run.micro_batches(responses, batch)):
                log_b[micro.index] = run.logp(micro)
        assert torch.equal(log_b, t["log_b"]) and (number == 1 or not torch.allclose(log_b, t["log_q"], atol=1e-3))
        weight, A = loss.token_weights(responses.lengths, t["u"]), torch.repeat_interleave(t["advantage"], responses.lengths)
        for i, batch in enumerate(made):
            for m in run.micro_batches(responses, batch):
                part, _ = loss.rl_loss(run.logp(m), t["log_q"][m.index], log_b[m.index], A[m.index], weight[m.index], float(t["u"][batch].sum()))
                run.backward(part)
            lrs.append(1e-3 * min(1.0, (len(lrs) + 1) / 3) * (1 - (number - 1 + i / 2) / 3))
            run.step(lrs[-1])
        named = {n: p.detach() for n, p in run.model.named_parameters()}
        assert all(torch.equal(w, named[n]) for n, w in weights(folder).items()), f"round {number}"
    assert [r["lr"] for r in rows(first) + rows(second)] == pytest.approx(lrs) and min(lrs) > 0
    assert [r["total_step"] for r in rows(second)] == [3, 4] and rows(second)[0]["gap_qb_abs"] > 1e-3
