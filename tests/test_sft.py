"""sft.py as a user runs it: two steps, ranks, kill and resume, bad input."""

import json
import random
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

import batches
import checkpoint
import gate
import sft
from records import BadInput
from test_trainer import ROOT, TOOLS, assert_equal_weights, conversation, run_main, run_ranks, run_script, weights


@pytest.fixture(scope="module")
def data(tiny_dir, tmp_path_factory):
    """sft.jsonl of 16 append-only episodes (some 55 rows), one of them kept out by an empty target."""
    path, rng, tokenizer = tmp_path_factory.mktemp("data") / "sft.jsonl", random.Random(2), gate.load_tokenizer(tiny_dir)
    with open(path, "w") as f:
        for e in range(16):
            for turn, (messages, reply) in enumerate(conversation(rng, rng.randint(2, 5))):
                prompt, output = gate.render_target(tokenizer, messages, TOOLS, reply, {})
                row = {"messages": messages, "tools": TOOLS, "prompt_token_ids": prompt, "token_ids": output,
                       "source": rng.choice(["kept", "rewritten"]), "episode_id": f"e{e:02}", "turn": turn, "evidence": []}
                f.write(json.dumps(row) + "\n")
        f.write(json.dumps({**row, "turn": 9, "token_ids": []}) + "\n")
    return path


def train(data, tiny_dir, output, *more):
    run_main(sft.main, "--model", tiny_dir, "--data", data, "--output", output, "--lr", 1e-3, "--global-batch", 8, *more)


def rows(output):
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(data, tiny_dir, tmp_path_factory):
    output = tmp_path_factory.mktemp("sft") / "one"
    train(data, tiny_dir, output, "--schedule", "wsd", "--warmup", 2, "--max-steps", 6, "--epochs", 2)
    return output


def test_help():
    start = time.perf_counter()
    out = run_script("sft.py", "--help").stdout
    assert "Departures from the paper" in out and "--micro-tokens" in out and "torchrun" in out
    assert time.perf_counter() - start < 20                              # transformers is not imported for it (busy machines are slow)


def test_run_learns_logs_and_tells_when_whole(trained, data, tiny_dir, capsys):
    log, manifest = rows(trained), json.loads((trained / "manifest.json").read_text())
    assert [r["step"] for r in log] == [1, 2, 3, 4, 5, 6] and log[-1]["loss"] < log[0]["loss"]
    assert log[0]["lr"] == pytest.approx(5e-4) and log[-1]["lr"] == pytest.approx(1e-3 * (1 / 6) / 0.3)
    assert manifest["counts"]["empty"] == 1 and manifest["counts"]["steps"] == 6 and not (trained / "resume").exists()
    before = (trained / "model.safetensors").stat().st_mtime_ns
    same = ["--schedule", "wsd", "--warmup", 2, "--max-steps", 6]
    train(data, tiny_dir, trained, *same, "--epochs", 2)
    assert "already whole" in capsys.readouterr().out and (trained / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(BadInput, match="finished run with epochs=2, this command says 3"):
        train(data, tiny_dir, trained, *same, "--epochs", 3)


def test_batches_hold_whole_episodes_and_every_response_once_an_epoch(data, tiny_dir):
    argv = ["sft", "--model", "x", "--data", str(data), "--output", "y", "--global-batch", "8", "--epochs", "2"]
    sys.argv, saved = argv, sys.argv
    args = sft.parse_args()
    sys.argv = saved
    responses, counts = sft.read_data(args)
    made = sft.make_batches(responses, args)
    half = len(made) // 2
    flat = [s for b in made for s in b]
    assert sorted(flat) == sorted(list(range(counts["used"])) * 2) and made[:half] != made[half:]
    for batch in made:
        held = {responses.episodes[s] for s in batch}
        assert sum(e in held for e in responses.episodes) == len(batch)  # no episode is cut
    assert all(len(b) >= 8 for b in made[:half - 1])


def test_denominator_is_the_whole_batch_however_it_is_cut(data, tiny_dir, tmp_path, trained):
    """One big micro-batch, one row at a time, and no prefix merge: the same weights after one step, and the loss of full logits."""
    for name, more in (("big", ()), ("small", ("--micro-tokens", 1)), ("apart", ("--no-prefix-merge",))):
        train(data, tiny_dir, tmp_path / name, "--max-steps", 1, "--optimizer", "adamw", *more)
    assert_equal_weights(tmp_path / "big", tmp_path / "small", 2e-5)      # Adam's first step is lr·sign(g): tiny g may differ
    assert_equal_weights(tmp_path / "big", tmp_path / "apart", 2e-5)
    first = [rows(tmp_path / name)[0] for name in ("big", "small", "apart")]
    for r in first[1:]:
        assert r["loss"] == pytest.approx(first[0]["loss"], abs=1e-6) and r["tokens"] == first[0]["tokens"]
        assert r["grad_norm"] == pytest.approx(first[0]["grad_norm"], rel=1e-5)


def test_two_ranks_give_the_weights_of_one(data, tiny_dir, tmp_path):
    argv = {name: ["--model", tiny_dir, "--data", data, "--lr", 1e-3, "--global-batch", 8, "--optimizer", name, "--max-steps", 2]
            for name in ("adamw", "muon")}
    for name in argv:
        run_main(sft.main, *argv[name], "--output", tmp_path / f"{name}-1")
    run_ranks(tmp_path, "sft", *[[*argv[name], "--output", tmp_path / f"{name}-2"] for name in argv])
    for name, share in (("adamw", 1e-3), ("muon", 5e-2)):                # Muon orthogonalises in bfloat16: percents, not 1e-7
        one, two = rows(tmp_path / f"{name}-1"), rows(tmp_path / f"{name}-2")
        for a, b in zip(one, two, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], abs=1e-5) and a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
            assert a["tokens"] == b["tokens"] and a["responses"] == b["responses"]
        a, b, start = weights(tmp_path / f"{name}-1"), weights(tmp_path / f"{name}-2"), weights(tiny_dir)
        for key in a:
            moved, gap = (a[key] - start[key]).norm(), (a[key] - b[key]).norm()
            assert gap < share * moved, f"{name} {key}: {gap:.1e} apart of {moved:.1e} moved"


def test_sigkill_and_resume_equal_an_uninterrupted_run(data, tiny_dir, tmp_path):
    argv = ["--model", tiny_dir, "--data", data, "--lr", 1e-3, "--global-batch", 4, "--epochs", 12, "--max-steps", 90, "--save-every", 5,
            "--schedule", "linear", "--threads", 1]
    run_main(sft.main, *argv, "--output", tmp_path / "whole")
    output = tmp_path / "killed"
    process = subprocess.Popen([sys.executable, str(ROOT / "sft.py"), *map(str, argv), "--output", str(output)],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list((output / "resume").glob("step-*")):                  # kill it as soon as it has something to continue from
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (output / "manifest.json").exists() and not (output / "config.json").exists()
    run_main(sft.main, *argv, "--output", output)
    assert_equal_weights(tmp_path / "whole", output)                     # bit for bit
    clock = ("seconds", "tokens_per_second")
    strip = lambda log: [{k: v for k, v in r.items() if k not in clock} for r in log]
    assert strip(rows(output)) == strip(rows(tmp_path / "whole"))


def test_other_arguments_or_data_refuse_to_continue(data, tiny_dir, tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(checkpoint, "save_checkpoint", killed)
        train(data, tiny_dir, tmp_path / "out", "--max-steps", 2, "--save-every", 1)
    with pytest.raises(BadInput, match="had other schedule"):
        train(data, tiny_dir, tmp_path / "out", "--max-steps", 2, "--save-every", 1, "--schedule", "linear")
    other = tmp_path / "sft.jsonl"
    other.write_text("".join(data.read_text().splitlines(True)[:20]))
    with pytest.raises(BadInput, match="had other data, data_sha256"):
        train(other, tiny_dir, tmp_path / "out", "--max-steps", 2, "--save-every", 1)


@pytest.mark.parametrize("change, says", [
    (lambda r: r.pop("token_ids"), ":1: field 'token_ids' is missing"), (lambda r: r.update(prompt_token_ids=[]), ":1: field 'prompt_token_ids' is"),
    (lambda r: r.update(token_ids=[10 ** 6]), "token id 1000000"), (lambda r: r.update(token_ids=[]), "none of 1 rows can be used")])
def test_bad_data_is_one_clear_line(data, tiny_dir, tmp_path, change, says):
    row = json.loads(data.read_text().splitlines()[0])
    change(row)
    (tmp_path / "sft.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(BadInput, match=says):
        train(tmp_path / "sft.jsonl", tiny_dir, tmp_path / "out")


def test_missing_checkpoint_exits_2_with_one_line(data, tmp_path):
    done = run_script("sft.py", "--model", tmp_path / "nothing", "--data", data, "--output", tmp_path / "out", check=2)
    assert done.stderr.count("\n") == 1 and "no such checkpoint folder" in done.stderr


def test_bad_data_under_torchrun_is_one_line_and_every_rank_exits_2(tiny_dir, tmp_path):
    """A missing checkpoint is found on rank 0 alone, bad data on all: either way one line, and 2 from each."""
    (tmp_path / "sft.jsonl").write_text('{"turn": 0}\n')
    driver = tmp_path / "driver.py"                                      # both mistakes in one launch, exit codes printed
    argv = [["x", "--model", str(model), "--data", str(tmp_path / "sft.jsonl"), "--output", str(tmp_path / "out")]
            for model in (tmp_path / "nothing", tiny_dir)]
    driver.write_text(f"""import sys; sys.path.insert(0, {str(ROOT)!r})
import os, sft, torch.distributed, records
destroy, torch.distributed.destroy_process_group = torch.distributed.destroy_process_group, lambda: None
for sys.argv in {argv!r}:
    try:
        records.run_main(sft.main)
    except SystemExit as e:
        os.write(1, f"rank {{os.environ['RANK']}} ends with {{e.code}}\\n".encode())      # one write: ranks do not mix lines
import gc; gc.collect(); destroy()           # as records.run_main: or gloo's threads may abort at the exit
""")
    done = run_script(driver, ranks=2)
    errors = [line for line in done.stderr.splitlines() if "error:" in line]
    assert len(errors) == 2 and "no such checkpoint folder" in errors[0], done.stderr
    assert "sft.jsonl:1: field 'prompt_token_ids' is missing" in errors[1]
    assert sorted(re.findall(r"rank (\d) ends with (\d+)", done.stdout)) == [("0", "2")] * 2 + [("1", "2")] * 2, done.stdout


def test_masked_context_carries_no_gradient(data, tiny_dir):
    """Other prompt targets give another loss, but context tokens are never predicted: only target positions are projected."""
    row = json.loads(data.read_text().splitlines()[0])
    r = batches.Responses([torch.tensor(row["prompt_token_ids"]).numpy()], [torch.tensor(row["token_ids"]).numpy()], ["e"])
    micro = batches.pack(batches.merge_prefix(r, [0]), r, torch.device("cpu"))
    assert micro.targets.tolist() == row["token_ids"] and row["token_ids"][-1] == 2      # the end token is a target
