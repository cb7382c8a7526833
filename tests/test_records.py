"""The data contract: JSONL repair and errors, completeness of a call, pictures, policy version, manifests."""

import argparse
import base64
import json
import math
import shutil
import subprocess
import sys

import pytest

import records
from conftest import ROOT
from records import BadInput, Call, Episode, ImageStore, JsonlWriter, call_problem

PNG = b"\x89PNG\r\n\x1a\nrest"


def call(**changes):
    fields = dict(call_id="c", episode_id="e", turn=0, policy_version="v", policy_version_end="v", prompt_token_ids=[1],
                  token_ids=[2, 3], logprobs=[-0.5, 0.0], delivered=True, finish_reason="stop",
                  message={"role": "assistant", "content": "ok"})
    return Call(**{**fields, **changes})


def episode(**changes):
    fields = dict(episode_id="e", harness="skills", task="tabletop/1", init=1, attempt=0, reward=1, valid=True,
                  end="finish")
    return Episode(**{**fields, **changes})


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"):
        (folder / name).write_text(name)
    return folder


def write(path, *rows):
    with JsonlWriter(path) as f:
        for row in rows:
            f.append(row)


# ---------------------------------------------------------------------------------------------- JSONL

def test_calls_and_episodes_round_trip_with_unknown_fields(tmp_path):
    one = call(extra={"asked": {"temperature": 0.2}, "später": [1, {"ü": None}]},
               messages=[{"role": "user", "content": "ß 漢 \u2028"}])
    write(tmp_path / "calls.jsonl", records.to_line(one))
    assert list(records.read_calls(tmp_path / "calls.jsonl")) == [one]
    two = episode(extra={"instruction": "Put …", "failure": None})
    write(tmp_path / "episodes.jsonl", records.to_line(two))
    assert list(records.read_episodes(tmp_path / "episodes.jsonl")) == [two]
    row = json.loads((tmp_path / "calls.jsonl").read_bytes())
    assert row["später"] == [1, {"ü": None}] and "extra" not in row


def test_an_unknown_field_cannot_shadow_a_known_one():
    assert records.to_line(call(extra={"turn": 9, "x": 1}))["turn"] == 0


@pytest.mark.parametrize("tail", [b"", b'{"a": 3', b"x" * 200_000])
def test_a_truncated_last_line_is_left_out_when_read_and_repaired_on_append(tmp_path, capfd, tail):
    path = tmp_path / "x.jsonl"
    write(path, {"a": 1}, {"a": 2})
    with open(path, "ab") as f:
        f.write(tail)
    assert [row["a"] for _, row in records.read_jsonl(path)] == [1, 2]
    noted = capfd.readouterr().err
    assert (f"{path}:3" in noted and f"{len(tail)} bytes" in noted) == bool(tail)
    write(path, {"a": 4})
    assert ("repaired" in capfd.readouterr().err) == bool(tail)
    assert path.read_bytes() == b'{"a":1}\n{"a":2}\n{"a":4}\n'


def test_a_file_that_is_one_truncated_line_becomes_empty(tmp_path, capfd):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a"')
    JsonlWriter(path).close()
    assert path.read_bytes() == b"" and "4 bytes" in capfd.readouterr().err


@pytest.mark.parametrize("line, said", [
    (b"{not json}\n", "not JSON"), (b"[1]\n", "list"), (b"\n", "not JSON"), (b'{"call_id": "\xff"}\n', "not JSON"),
    (b'{"call_id": "c"}\n', "'episode_id'"),
    (json.dumps({**records.to_line(call()), "token_ids": None}).encode() + b"\n", "'token_ids'"),
    (json.dumps({**records.to_line(call()), "turn": "0"}).encode() + b"\n", "'turn'"),
])
def test_a_corrupt_line_names_file_line_and_field(tmp_path, line, said):
    path = tmp_path / "calls.jsonl"
    write(path, records.to_line(call()))
    with open(path, "ab") as f:
        f.write(line)
    with pytest.raises(BadInput) as e:
        list(records.read_calls(path))
    assert f"{path}:2" in str(e.value) and said in str(e.value) and "\n" not in str(e.value)


def test_missing_file_and_a_valid_episode_without_reward(tmp_path):
    with pytest.raises(BadInput, match="run the stage that writes it"):
        list(records.read_calls(tmp_path / "none.jsonl"))
    write(tmp_path / "e.jsonl", records.to_line(episode(valid=False, reward=None, reason="worker_lost")))
    assert len(list(records.read_episodes(tmp_path / "e.jsonl"))) == 1
    write(tmp_path / "e.jsonl", records.to_line(episode(reward=None)))
    with pytest.raises(BadInput, match="reward is None"):
        list(records.read_episodes(tmp_path / "e.jsonl"))


def test_nan_and_lone_surrogates_survive_a_line(tmp_path):
    write(tmp_path / "c.jsonl", records.to_line(call(logprobs=[math.nan, 0.0], messages=[{"content": "\udc80ü"}])))
    (tmp_path / "c.jsonl").read_text(encoding="utf-8")             # the file itself stays UTF-8
    [back] = records.read_calls(tmp_path / "c.jsonl")
    assert math.isnan(back.logprobs[0]) and back.messages == [{"content": "\udc80ü"}]


def test_killed_writers_leave_whole_lines(tmp_path):
    """A process that appends in a loop, killed at once: every line but perhaps the last parses, and none is missing."""
    code = ("import sys; sys.path.insert(0, sys.argv[1]); import records; w = records.JsonlWriter(sys.argv[2]); i = 0\n"
            "while True: w.append({'i': i, 'pad': 'x' * 3000}); print(i, flush=True); i += 1")
    path = tmp_path / "x.jsonl"
    process = subprocess.Popen([sys.executable, "-c", code, str(ROOT), str(path)], stdout=subprocess.PIPE)
    while int(process.stdout.readline()) < 50:
        pass
    process.kill()
    told = [int(line) for line in process.stdout.read().split(b"\n")[:-1]]
    process.wait(), process.stdout.close()
    found = [row["i"] for _, row in records.read_jsonl(path)]
    assert found == list(range(len(found))) and len(found) > max(told, default=50)


# ---------------------------------------------------------------------------------------------- completeness

@pytest.mark.parametrize("changes, said", [
    ({}, None), ({"logprobs": [-0.5, 5e-4]}, None), ({"logprobs": [-8999.0, -1e-9]}, None),
    ({"logprobs": [-0.5, math.nan]}, "log-prob nan"), ({"logprobs": [-9999.0, 0.0]}, "log-prob -9999.0"),
    ({"logprobs": [-math.inf, 0.0]}, "log-prob -inf"), ({"logprobs": [0.5, 0.0]}, "log-prob 0.5"),
    ({"logprobs": [None, 0.0]}, "log-prob None"),
    ({"token_ids": [], "logprobs": []}, "empty response"), ({"logprobs": []}, "2 token ids but 0 logprobs"),
    ({"logprobs": [0.0] * 3}, "2 token ids but 3 logprobs"), ({"prompt_token_ids": []}, "no prompt token ids"),
    ({"delivered": False}, "not delivered"), ({"error": "upstream 500: x"}, "error: upstream 500: x"),
    ({"policy_version_end": "w"}, "policy version changed during the call"),
])
def test_call_problem(changes, said):
    assert call_problem(call(**changes)) == said


# ---------------------------------------------------------------------------------------------- pictures

def test_image_store(tmp_path):
    store = ImageStore(tmp_path / "images")
    sha = store.put(PNG)
    assert store.put(PNG) == sha and store.get(sha) == PNG and len(list((tmp_path / "images").iterdir())) == 1
    for data, suffix in ((b"\xff\xd8\xffjpeg", "jpg"), (b"RIFF1234WEBP", "webp")):
        assert (tmp_path / "images" / f"{store.put(data)}.{suffix}").read_bytes() == data
    (tmp_path / "images" / f"{sha}.png").write_bytes(PNG + b"!")
    assert store.get(sha) is None and store.get("0" * 64) is None
    for data in (b"GIF89a", b"", b"<svg/>"):
        with pytest.raises(ValueError, match="neither"):
            store.put(data)


def test_a_tampered_picture_is_written_anew_by_put(tmp_path):
    store = ImageStore(tmp_path)
    sha = store.put(PNG)
    (tmp_path / f"{sha}.png").write_bytes(b"")
    assert store.put(PNG) == sha and store.get(sha) == PNG


def test_decode_data_uri():
    assert records.decode_data_uri("data:image/png;base64," + base64.b64encode(PNG).decode()) == PNG
    for wrong in ("http://example.org/a.png", "data:text/plain;base64,aaaa", "data:image/png;base64,a b",
                  "data:image/png;base64,abc", ""):
        with pytest.raises(ValueError):
            records.decode_data_uri(wrong)


# ---------------------------------------------------------------------------------------------- checkpoints, manifests

def test_policy_version_follows_the_content_alone(tmp_path, checkpoint):
    version = records.policy_version(checkpoint)
    folder = tmp_path / "copy"
    shutil.copytree(checkpoint, folder)
    for name in ("manifest.json", "args.json", "metrics.jsonl"):   # a stage's bookkeeping: no part of the policy
        (folder / name).write_text("{}")
    (folder / "state").mkdir()
    assert records.policy_version(folder) == version and len(version) == 12
    found = {version}
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"):
        (folder / name).write_text("changed")
        found.add(records.policy_version(folder))
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    assert len(found | {records.policy_version(folder)}) == 6
    with pytest.raises(BadInput, match="not a checkpoint folder"):
        records.policy_version(tmp_path / "none")


def test_write_json_is_atomic(tmp_path):
    path = tmp_path / "deep" / "x.json"
    records.write_json(path, {"a": 1})
    with pytest.raises(ValueError):                                # circular: fails before the old file is touched
        circular = []
        circular.append(circular)
        records.write_json(path, circular)
    assert records.read_json(path) == {"a": 1}
    (path.parent / "x.json.part").write_text("half of")            # a killed writer's rest is overwritten
    records.write_json(path, {"a": "ü"})
    assert records.read_json(path) == {"a": "ü"} and [p.name for p in path.parent.iterdir()] == ["x.json"]
    path.write_text("{")
    with pytest.raises(BadInput, match="not JSON"):
        records.read_json(path)
    with pytest.raises(BadInput, match="no such file"):
        records.read_json(tmp_path / "none.json")


def test_manifest(tmp_path):
    (tmp_path / "calls.jsonl").write_text("{}\n")
    records.write_manifest(tmp_path, "collect", argparse.Namespace(seed=3, out=tmp_path), {"episodes": 2}, ["calls.jsonl"])
    found = records.read_json(tmp_path / "manifest.json")
    assert found["stage"] == "collect" and found["arguments"]["seed"] == 3 and found["counts"] == {"episodes": 2}
    assert found["files"]["calls.jsonl"] == records.sha256_file(tmp_path / "calls.jsonl")
    assert found["versions"]["torch"]


def test_run_main_turns_bad_input_into_one_line_and_exit_code_2(capsys):
    def bad():
        raise BadInput("calls.jsonl:3: field 'turn' is missing")

    for main, code in ((bad, 2), (lambda: None, 0), (lambda: 3, 3)):
        with pytest.raises(SystemExit) as e:
            records.run_main(main)
        assert e.value.code == code
    assert capsys.readouterr().err == "error: calls.jsonl:3: field 'turn' is missing\n"
