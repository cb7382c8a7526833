"""sft.py and rl.py on two ranks: stopped together, gone on with by another number of ranks, refusing and failing together."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

import rl
import sft
from test_resume import points, rl_argv, rows, sft_argv, stopped_after_two, write_rows
from test_trainer import ROOT, record_round, run_main, weights, write_round


@pytest.fixture(scope="module")
def data(tiny_dir, tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("data"), tiny_dir, 12)               # 36 rows: 6 steps of two episodes


@pytest.fixture(scope="module")
def recorded(tiny_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("round") / "round-1"
    return folder, *record_round(folder, tiny_dir, {("s/0", 11): [1, 0, 1, 0], ("s/1", 12): [0, 1]}, turns=(2, 3))


@pytest.fixture(scope="module")
def whole(data, recorded, tiny_dir, tmp_path_factory):
    """{"sft": output, "rl": output}: the runs of one process that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    assert run_main(sft.main, *sft_argv(tiny_dir, data, folder / "sft")) == run_main(rl.main, *rl_argv(tiny_dir, recorded[0], folder / "rl")) == 0
    return {"sft": folder / "sft", "rl": folder / "rl"}


# Runs stages one after the other in one torchrun launch; result of run i on rank r in <folder>/<i>-<r>.json.
RANKS = """import contextlib, io, json, os, pathlib, signal, sys, time
sys.path.insert(0, {root!r})
import torch.distributed, loss, records, rl, sft, trainer
destroy, torch.distributed.destroy_process_group = torch.distributed.destroy_process_group, lambda: None      # one group for all runs
rank, folder = int(os.environ["RANK"]), pathlib.Path({folder!r})
log, sft_loss = trainer.Metrics.log, loss.sft_loss
def signalled(self, row, work):                                     # to rank 1 alone
    log(self, row, work)
    if rank == 1 and row["step"] == 2:
        os.kill(os.getpid(), signal.SIGTERM)
def held(self, row, work):                                          # rank 0, until its signal is there
    log(self, row, work)
    if rank == 0 and row["step"] == 2:
        (folder / "flag").touch()
        while not signal.getsignal(signal.SIGTERM).__self__.signal:
            time.sleep(0.005)
def spoiled(logp, *rest):                                           # a gradient of rank 1 alone
    part, metrics = sft_loss(logp, *rest)
    return (part * float("nan") if rank == 1 else part), metrics
for i, (stage, hook, argv) in enumerate(json.loads((folder / "runs.json").read_text())):
    sys.argv, err = ["x", *argv], io.StringIO()
    trainer.Metrics.log = {{"signalled": signalled, "held": held}}.get(hook, log)
    loss.sft_loss = spoiled if hook == "spoiled" else sft_loss
    with contextlib.redirect_stderr(err):
        try:
            records.run_main({{"sft": sft, "rl": rl}}[stage].main)
        except SystemExit as end:
            code = end.code
    (folder / f"{{i}}-{{rank}}.json").write_text(json.dumps([code, err.getvalue()]))
import gc; gc.collect(); destroy()           # as records.run_main: or gloo's threads may abort at the exit
sys.exit(code)
"""


@pytest.fixture(scope="module")
def pair(data, recorded, tiny_dir, tmp_path_factory):
    """Two ranks, one launch: {run: [(exit code, stderr) of each rank]}, then SIGTERM to torchrun itself. "folder": where."""
    folder, runs = tmp_path_factory.mktemp("pair"), {}
    with pytest.MonkeyPatch.context() as m:                                # what one process leaves for two to go on with
        stopped_after_two(m, sft.main, sft_argv(tiny_dir, data, folder / "one-two"))
    episodes, calls = ([type(r)(**vars(r)) for r in part] for part in recorded[1:])
    for call in calls:                                                     # other text than was sent: the gate rejects every call
        call.messages = [{**call.messages[0], "content": call.messages[0]["content"] + "!"}, *call.messages[1:]]
    write_round(folder / "gated-round", episodes, calls)
    runs = {"two-one": ("sft", "signalled", sft_argv(tiny_dir, data, folder / "two-one")),
            "one-two": ("sft", "", sft_argv(tiny_dir, data, folder / "one-two")),
            "few": ("sft", "", [*sft_argv(tiny_dir, data, folder / "few"), "--global-batch", 1]),
            "spoiled": ("sft", "spoiled", sft_argv(tiny_dir, data, folder / "spoiled")),
            "gated": ("rl", "", rl_argv(tiny_dir, folder / "gated-round", folder / "gated", "--max-mismatch", 1)),
            "rl": ("rl", "held", rl_argv(tiny_dir, recorded[0], folder / "rl"))}
    (folder / "runs.json").write_text(json.dumps([(s, hook, [str(a) for a in argv]) for s, hook, argv in runs.values()]))
    (folder / "driver.py").write_text(RANKS.format(root=str(ROOT), folder=str(folder)))
    torchrun = subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(folder / "driver.py")],
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True)
    try:
        deadline = time.monotonic() + 150
        while not (folder / "flag").exists():
            assert torchrun.poll() is None and time.monotonic() < deadline, torchrun.communicate()
            time.sleep(0.02)
        torchrun.send_signal(signal.SIGTERM)
        out, err = torchrun.communicate(timeout=60)
    finally:
        if torchrun.poll() is None:
            os.killpg(torchrun.pid, signal.SIGKILL)
            torchrun.communicate()
    ends = {name: [json.loads((folder / f"{i}-{rank}.json").read_text()) for rank in (0, 1)] for i, name in enumerate(runs)}
    return {"folder": folder, "argv": {name: argv for name, (_, _, argv) in runs.items()}, "torchrun": (torchrun.returncode, out, err), **ends}


def assert_close_run(a, b, start, rtol=1e-3):
    """Counts, steps and lr equal; weights within 1e-5 (AdamW; rounding differs with the number of ranks)."""
    for x, y in zip(rows(a), rows(b), strict=True):
        assert x.keys() == y.keys() and all(x[k] == y[k] for k in ("step", "lr", "tokens", "responses"))
        assert x["loss"] == pytest.approx(y["loss"], abs=1e-5) and x["grad_norm"] == pytest.approx(y["grad_norm"], rel=rtol)
    x, y, start = weights(a), weights(b), weights(start)
    for name in x:
        assert (x[name] - y[name]).abs().max() < 1e-5 and (x[name] - start[name]).abs().max() > 1e-3, (name, (x[name] - y[name]).abs().max())
    states = [json.loads((folder / "state" / "trainer_state.json").read_text()) for folder in (a, b)]
    assert states[0]["steps"] == states[1]["steps"] and states[0]["lr"] == states[1]["lr"]


def test_two_ranks_stopped_by_a_signal_to_one_of_them_go_on_as_one_process(pair, whole, tiny_dir):
    assert pair["two-one"] == [[4, ""], [4, ""]]
    output = pair["folder"] / "two-one"
    assert points(output) == ["step-00000002"] and len(rows(output)) == 2
    assert run_main(sft.main, *pair["argv"]["two-one"]) == 0
    assert_close_run(whole["sft"], output, tiny_dir)


def test_one_process_stopped_goes_on_as_two_ranks(pair, whole, tiny_dir):
    assert pair["one-two"] == [[0, ""], [0, ""]]
    assert_close_run(whole["sft"], pair["folder"] / "one-two", tiny_dir)
    assert all(row["mfu"] is None for folder in (whole["sft"], pair["folder"] / "one-two") for row in rows(folder))


def test_sigterm_to_torchrun_stops_both_ranks_together(pair, whole, tiny_dir):
    code, out, err = pair["torchrun"]
    assert [end[0] for end in pair["rl"]] == [4, 4] and code != 0 and out.count("rl: ended by SIGTERM after step 2 of 6") == 1, (code, out, err)
    output = pair["folder"] / "rl"
    assert points(output) == ["step-00000002"] and not (output / "config.json").exists()
    assert run_main(rl.main, *pair["argv"]["rl"]) == 0
    assert [list(r) for r in rows(output)] == [list(r) for r in rows(whole["rl"])]                  # frozen, in one order
    assert_close_run(whole["rl"], output, tiny_dir, rtol=1e-2)


def test_two_ranks_refuse_and_fail_together(pair, tiny_dir):
    (code, err), other = pair["few"]
    assert code == 2 and other == [2, ""] and err.count("\n") == 1 and "--global-batch 1 on 2 ranks" in err
    (code, err), other = pair["spoiled"]
    assert code == 2 and other == [2, ""] and err.count("\n") == 1 and "step 1: the gradient norm is nan" in err
    assert not (pair["folder"] / "spoiled" / "resume").exists() and not (pair["folder"] / "spoiled" / "config.json").exists()


def test_round_without_any_eligible_call_is_skipped_by_both_ranks(pair, recorded):
    assert pair["gated"] == [[0, ""], [0, ""]]
    output = pair["folder"] / "gated"
    report = json.loads((output / "round.json").read_text())
    assert not report["trained"] and report["counts"]["calls_gated"] == report["counts"]["calls_compared"] == len(recorded[2])
    assert not (output / "config.json").exists() and (output / "manifest.json").exists()
