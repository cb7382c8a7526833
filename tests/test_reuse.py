"""reuse.py: recorded replies of a teacher without memory become targets as they are, byte for byte where their ids are the student's."""

import json
import re
import signal
import subprocess
import sys
import time
import types

import pytest
from conftest import ROOT, TEXTS
from fakes import png
from test_rewrite import call as tool_call
from test_rewrite import tool
from test_rewrite_command import shard

import gate
import reuse
import sft
from batches import merge_prefix
from pictures import load_pictures
from records import BadInput, Call, Episode, ImageStore, JsonlWriter, read_jsonl, run_main, to_line
from rewrite import Report

SYSTEM = "You control a robot by writing Python.\nget_object_pose(object_name)\n    Position and orientation.\ngoto_pose(position)"
TASK = "Task: Put the red mug on the blue tray."
# An episode as the code harness plays it: two messages a call, no history. Success at turn 1.
REPLIES = ["I look first.\n```python\np, q = get_object_pose('red mug')\nprint(p)\n```",
           "REGENERATE\n```python\ngoto_pose(p)\n```",
           "REGENERATE\n```python\nprint(get_object_pose('red mug'))\n```",
           "FINISH"]
SUCCESS_TURN = 1
ROW = {"episode_id", "call_id", "turn", "task", "source", "evidence", "messages", "tools", "message", "chat_template_kwargs",
       "prompt_token_ids", "token_ids", "pictures"}


@pytest.fixture(scope="module")
def tokenizer(tiny_dir):
    return gate.load_tokenizer(tiny_dir)


@pytest.fixture(scope="module")
def foreign():
    """Another vocabulary of the same size, trained on other text."""
    from tiny import train_tokenizer
    return train_tokenizer(["def goto(position): return reach(position)", "while True: print(observation)"] * 50, 400, ["goto"])


def sampled(tokenizer, text):
    """Ids of a reply as a model may sample them: the right text in other tokens than the tokenizer would cut, end token included."""
    return [i for c in re.split(r"(<.*?>|.)", text) for i in gate.encode(tokenizer, c)] + [tokenizer.eos_token_id]


def play(episode_id="e0", tokenizer=None, replies=REPLIES, **changes):
    """Recorded calls; with a tokenizer their ids too, as a server records them."""
    calls, ran = [], []
    for turn, text in enumerate(replies):
        user = TASK + "".join(f"\nProgram so far:\n{r}" for r in ran)
        c = Call(f"{episode_id}/{turn}", episode_id, turn, message={"role": "assistant", "content": text}, delivered=True,
                 messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}], finish_reason="stop", **changes)
        if tokenizer:
            c.prompt_token_ids = gate.render_prompt(tokenizer, c.messages, c.tools, c.chat_template_kwargs)
            c.token_ids = sampled(tokenizer, text)
            c.logprobs = [-0.5] * len(c.token_ids)
        calls.append(c)
        ran.append(text)
    return calls


def episode(episode_id="e0", calls=(), **kw):
    defaults = dict(episode_id=episode_id, harness="code", task="tabletop/0", init=11, attempt=0, reward=1, valid=True,
                    success_turn=SUCCESS_TURN, finished=True, end="finish", calls=[c.call_id for c in calls])
    return Episode(**{**defaults, **kw})


def rows_of(tokenizer, calls, ep=None, images=None, pictures=None, **kw):
    args = types.SimpleNamespace(**{**dict(teacher="T", student="S", after_success="finish", max_tokens=4096, chat_template_kwargs=None,
                                           other_vocabulary="refuse"), **kw})
    report = Report()
    rows = reuse.episode_rows(ep or episode(calls=calls), calls, tokenizer, args, report, images, pictures)
    assert sum(report.outcomes.values()) == len(calls) and report.targets[len(rows)] == 1
    return rows, report


def first(tokenizer, **changes):
    """One recorded call with changes, and what becomes of it: (rows, report)."""
    calls = play(tokenizer=tokenizer)[:1]
    for name, value in changes.items():
        setattr(calls[0], name, value)
    return rows_of(tokenizer, calls)


# ---------------------------------------------------------------------------------------------- one episode

def test_recorded_ids_are_reused_as_they_are(tokenizer):
    calls = play(tokenizer=tokenizer)
    calls[0].message["tool_calls"] = []                    # as some servers say it
    rows, report = rows_of(tokenizer, calls[::-1])         # concurrent calls are written in the order in which they end
    del calls[0].message["tool_calls"]
    assert dict(report.outcomes) == {"reused": 3, "dropped: after_success": 1} and report.errors == []
    assert [(r["turn"], r["source"]) for r in rows] == [(0, "reused"), (1, "reused"), (3, "reused")]
    for row in rows:
        c = calls[row["turn"]]
        assert row["token_ids"] == c.token_ids
        assert row["prompt_token_ids"] == c.prompt_token_ids and gate.check(tokenizer, c) is None
        assert row.keys() == ROW and row["messages"] == c.messages and row["message"] == c.message and row["evidence"] == []
    assert rows[0]["token_ids"] != rows_of(tokenizer, play())[0][0]["token_ids"]          # its own tokenizer would cut the text otherwise
    assert report.numbers["prompt_as_recorded"] == 3 and report.numbers["other_vocabulary"] == 0


def test_text_is_tokenized_once_where_no_ids_are_recorded(tokenizer):
    rows, report = rows_of(tokenizer, play())
    assert [(r["turn"], r["source"]) for r in rows] == [(0, "tokenized"), (1, "tokenized"), (3, "tokenized")]
    for row in rows:
        assert (row["prompt_token_ids"], row["token_ids"]) == gate.render_target(tokenizer, row["messages"], [], row["message"], {})
        rebuilt = Call("c", "e", 0, messages=row["messages"], prompt_token_ids=row["prompt_token_ids"], token_ids=row["token_ids"])
        assert gate.check(tokenizer, rebuilt) is None
        assert tokenizer.decode(row["token_ids"]) == row["message"]["content"] + tokenizer.eos_token
    assert report.examples["tokenized"]["why_tokenized"] == "the record has no token ids" and report.numbers["prompt_as_recorded"] == 0


def test_calls_after_success(tokenizer):
    calls = play(tokenizer=tokenizer)
    assert [r["turn"] for r in rows_of(tokenizer, calls, after_success="none")[0]] == [0, 1]
    assert [r["turn"] for r in rows_of(tokenizer, calls, episode(calls=calls, success_turn=None))[0]] == [0, 1, 2, 3]
    assert [r["turn"] for r in rows_of(tokenizer, calls, episode(calls=calls, success_turn=0))[0]] == [0, 3]
    # --single-turn: the harness ended it after the only program, so that no reply says it
    assert [r["turn"] for r in rows_of(tokenizer, calls, episode(calls=calls, finished=False))[0]] == [0, 1]
    assert [r["turn"] for r in rows_of(tokenizer, calls, episode(calls=calls, finished=False, end="text"))[0]] == [0, 1, 3]
    calls[3].delivered = False                             # what the harness never got ended nothing
    assert [r["turn"] for r in rows_of(tokenizer, calls)[0]] == [0, 1, 2]


def test_calls_that_the_harness_never_got(tokenizer):
    calls = play(tokenizer=tokenizer)
    calls[0].delivered, calls[1].error = False, "504"
    rows, report = rows_of(tokenizer, calls)
    assert [r["turn"] for r in rows] == [3] and report.outcomes["dropped: not_delivered"] == 2
    calls = play()
    calls[1].message = None
    assert rows_of(tokenizer, calls)[1].outcomes["dropped: not_delivered"] == 1


def test_replies_without_an_end_token_are_no_targets(tokenizer):
    ids = sampled(tokenizer, REPLIES[0])
    assert first(tokenizer, finish_reason="length", token_ids=ids[:-1])[1].outcomes == {"dropped: cut": 1}
    assert first(tokenizer, finish_reason="length", token_ids=[])[1].outcomes == {"dropped: cut": 1}      # of an API, without ids
    for end in ([], [tokenizer.pad_token_id]):             # a stop string; a second end token
        rows, report = first(tokenizer, token_ids=ids[:-1] + end)
        assert rows == [] and report.outcomes == {"dropped: no_end_token": 1} and "e0/0: the reply ends with" in report.errors[0]
    assert first(tokenizer, message={"role": "assistant", "content": " "})[1].outcomes == {"dropped: empty": 1}
    assert first(tokenizer, message={"role": "assistant", "content": None}, token_ids=ids[-1:])[1].outcomes == {"dropped: empty": 1}


def test_too_long(tokenizer):
    calls = play(tokenizer=tokenizer)
    sizes = [len(c.prompt_token_ids) + len(c.token_ids) for c in calls]
    rows, report = rows_of(tokenizer, calls, max_tokens=sizes[0])
    assert sizes[0] < sizes[1] and [r["turn"] for r in rows] == [0] and report.outcomes["dropped: too_long"] == 2
    assert rows_of(tokenizer, calls, max_tokens=sizes[0] - 1)[0] == []


def test_template_kwargs(tiny_dir):
    tokenizer = gate.load_tokenizer(tiny_dir)              # its own: the template changes
    tokenizer.chat_template += "{%- if add_generation_prompt and thinking -%}<think>{%- endif -%}"
    plain, thinking = play(tokenizer=tokenizer), play(tokenizer=tokenizer, chat_template_kwargs={"thinking": True})
    for c in thinking:                                     # a reasoning parser took the thought out of the content
        c.message["reasoning"] = "The mug is red."
        c.token_ids = sampled(tokenizer, "The mug is red.</think>\n" + c.message["content"])
    assert {r["source"] for r in rows_of(tokenizer, plain)[0]} == {r["source"] for r in rows_of(tokenizer, thinking)[0]} == {"reused"}
    rows, _ = rows_of(tokenizer, thinking)
    assert rows[0]["prompt_token_ids"] == thinking[0].prompt_token_ids and rows[0]["chat_template_kwargs"] == {"thinking": True}
    for calls, kwargs in ((plain, {"thinking": True}), (thinking, {})):      # what was sampled there does not continue the prompt here
        with pytest.raises(BadInput, match="they continue '.*assistant.n.*the student's prompt ends with"):
            rows_of(tokenizer, calls, chat_template_kwargs=kwargs)
    rows, report = rows_of(tokenizer, thinking, chat_template_kwargs={}, other_vocabulary="tokenize")
    assert [r["source"] for r in rows] == ["tokenized"] * 3 and report.numbers["other_vocabulary"] == 3
    assert tokenizer.decode(rows[2]["token_ids"]) == "<think>The mug is red.</think>FINISH" + tokenizer.eos_token


# ---------------------------------------------------------------------------------------------- whose ids are they?

def test_another_vocabulary(tokenizer, foreign):
    calls = play(tokenizer=foreign)
    with pytest.raises(BadInput, match="T: call e0/0: its recorded token ids are none of S: .*--other-vocabulary tokenize"):
        rows_of(tokenizer, calls)
    rows, report = rows_of(tokenizer, calls, other_vocabulary="tokenize")
    assert rows == rows_of(tokenizer, play())[0] and report.numbers["other_vocabulary"] == 3
    for strange in (len(tokenizer), -1, 3.5, None):
        with pytest.raises(BadInput, match="is not in its vocabulary of 400"):
            first(tokenizer, token_ids=[strange, tokenizer.eos_token_id])
        with pytest.raises(BadInput, match="is not in its vocabulary of 400"):
            first(tokenizer, prompt_token_ids=[strange])


@pytest.mark.parametrize("message, spoken, own", [
    ({"content": "I pick."}, "  I pick.\n", True),                                         # white space around it is free
    ({"content": "I pick."}, "I place.", False),
    ({"content": "I pick.", "reasoning": "It is red."}, "<think>It is red.</think>I pick.", True),
    ({"content": "I pick.", "reasoning": "It is red.", "reasoning_content": "It is red."}, "It is red.</think>I pick.", True),
    ({"content": "I pick.", "reasoning": "It is red."}, "I pick.<think>It is red.</think>", False),      # another order
    ({"content": "<think>It is red.</think>I pick."}, "<think>It is red.</think>I pick.", True),         # a server without a parser
    ({"content": [{"type": "text", "text": "I pick."}]}, "I pick.", True),
    ({"content": None, "tool_calls": [tool_call("a", "pick", '{"x": 1.0}')]}, '<tool_call>{"name": "pick", "arguments": {"x":1.0}}</tool_call>', True),
    ({"content": "", "tool_calls": [tool_call("a", "pick", "{}")]}, '<tool_call>{"name": "place", "arguments": {}}</tool_call>', False),
    ({"content": "a\ufffdb"}, "ab", True),                                                 # a byte that is no character
    ({"content": "\nI pick. "}, "I pick.", True),
    ({"content": "a<|endoftext|>b"}, "a<|endoftext|>b", True),                             # a server that shows special tokens …
    ({"content": "ab"}, "a<|endoftext|>b", True),                                          # … and one that does not
])
def test_ids_say_what_the_message_says(tokenizer, message, spoken, own):
    message = {"role": "assistant", **message}
    if not own:
        with pytest.raises(BadInput, match="its tokenizer reads them as"):
            first(tokenizer, message=message, token_ids=sampled(tokenizer, spoken))
        return
    rows, _ = first(tokenizer, message=message, token_ids=sampled(tokenizer, spoken))
    assert [r["token_ids"] for r in rows] == [sampled(tokenizer, spoken)] and isinstance(rows[0]["message"]["content"], str)


def test_replies_of_the_engine_are_its_own(tiny_dir, tokenizer):
    """What an untrained planner samples: bytes that are no character, special tokens, half-open marks, calls that are none."""
    import asyncio

    from engine import Engine
    from wire import read_reply
    calls = play(replies=REPLIES[:1] * 24)

    async def answer():
        engine = Engine(tiny_dir, slots=8, batch=8)
        async def one(c):
            read_reply(c, await engine.chat({"messages": c.messages, "max_tokens": 300, "seed": c.turn}))
        await asyncio.gather(*map(one, calls))
        await engine.close()
    asyncio.run(answer())
    rows, report = rows_of(tokenizer, calls, episode(calls=calls, success_turn=None))
    assert report.outcomes["reused"] >= 3 and report.outcomes["reused"] + report.outcomes["dropped: cut"] >= 20, report.outcomes
    assert set(report.outcomes) <= {"reused", "dropped: cut", "dropped: empty", "dropped: no_end_token"} and report.numbers["other_vocabulary"] == 0
    assert all(r["token_ids"] == calls[r["turn"]].token_ids and r["prompt_token_ids"] == calls[r["turn"]].prompt_token_ids for r in rows)


def test_arguments_that_the_template_would_change_are_not_tokenized(tokenizer):
    message = {"role": "assistant", "content": "", "tool_calls": [tool_call("a", "pick", '{"x": 0.50}')]}
    assert first(tokenizer, message=message, token_ids=[])[1].outcomes == {"dropped: arguments_not_preserved": 1}
    message["tool_calls"][0]["function"]["arguments"] = '{"x": 0.5}'
    assert first(tokenizer, message=message, token_ids=[])[1].outcomes == {"tokenized": 1}


@pytest.mark.parametrize("change, found", [
    (lambda c: c.tools.append(tool("memory_read", "key")), "memory tools"),
    (lambda c: c.message.update(tool_calls=[tool_call("a", "memory_write", "{}")]), "memory calls"),
    (lambda c: c.messages.append({"role": "assistant", "content": "", "tool_calls": [tool_call("a", "memory_read", "{}")]}), "memory calls"),
    (lambda c: c.messages.append({"role": "tool", "name": "memory_read", "content": "x"}), "memory calls"),
    (lambda c: c.messages[0].update(content="A\n[memory]\nx\n[/memory]\nB"), "[memory] section"),
    (lambda c: c.messages[1].update(content=[{"type": "text", "text": "[memory]\nx\n[/memory]"}]), "[memory] section"),
])
def test_memory_is_seen(change, found):
    c = play()[0]
    assert reuse.memory_in(c) is None
    c.messages[1]["content"] += "\nI keep [memory] in mind."
    assert reuse.memory_in(c) is None
    change(c)
    assert found in reuse.memory_in(c)


# ---------------------------------------------------------------------------------------------- the command

@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command in this process: (exit code, stdout, stderr)."""
    def run(*args):
        monkeypatch.setattr(sys, "argv", ["reuse.py", *map(str, args)])
        with pytest.raises(SystemExit) as end:
            run_main(reuse.main)
        return end.value.code, *capsys.readouterr()
    return run


def write_teacher(folder, tokenizer, change=lambda calls: None):
    """Six usable or unusable episodes, their calls interleaved as concurrent workers write them; e4 has no ids, e5 lost a call."""
    kinds = {"e0": {}, "e1": {"reward": 0}, "e2": {"reward": None, "valid": False, "reason": "worker_lost", "end": "infrastructure"},
             "e3": {"end": "turns", "finished": False}, "e4": {}, "e5": {}}
    calls = {e: play(e, None if e == "e4" else tokenizer) for e in kinds}
    calls["e4"][0].finish_reason = "length"
    calls["e0"].append(Call("e0/retry", "e0", 2, message={"role": "assistant", "content": "x"}, delivered=True))
    change(calls)
    with JsonlWriter(folder / "calls.jsonl") as w:
        for turn in range(5):
            for e in kinds:
                if turn < len(calls[e]) and (e, turn) != ("e5", 3):
                    w.append(to_line(calls[e][turn]))
        w.append(to_line(Call("stray", "nobody", 0)))
    with JsonlWriter(folder / "episodes.jsonl") as w:
        for e, kw in kinds.items():
            w.append(to_line(episode(e, [c for c in calls[e] if c.call_id != "e0/retry"], **kw)))
    return folder


def test_command(run, tmp_path, tiny_dir, tokenizer):
    teacher, output = write_teacher(tmp_path / "teacher", tokenizer), tmp_path / "out"
    args = ["--teacher", teacher, "--student", tiny_dir, "--output", output]
    code, out, err = run(*args)
    assert code == 0, err
    report = json.loads((output / "reuse-report.json").read_text())
    assert report["outcomes"] == {
        "reused": 3, "tokenized": 2, "dropped: after_success": 2, "dropped: cut": 1, "dropped: episode_failed": 4,
        "dropped: episode_invalid": 4, "dropped: episode_abnormal_end": 4, "dropped: episode_incomplete": 3, "dropped: no_episode": 1,
        "dropped: not_in_episode": 1}
    rows = [r for _, r in read_jsonl(output / "sft.jsonl")]
    assert report["calls"] == sum(report["outcomes"].values()) == sum(1 for _ in read_jsonl(teacher / "calls.jsonl")) == 25
    assert report["targets"] == len(rows) == 5 and report["episodes"] == {
        "used": 2, "without_target": 0, "targets_mean": 2.5, "targets_histogram": {"2": 1, "3": 1}}
    for name, key in (("prompt", "prompt_token_ids"), ("target", "token_ids")):
        sizes = [len(r[key]) for r in rows]
        assert report["tokens"][name] == {"mean": round(sum(sizes) / 5, 1), "max": max(sizes)}
    example = report["examples"]["reused"]
    assert example["call_id"] == "e0/0" and example["target"] == REPLIES[0] + "<|im_end|>" and example["prompt_tail"].endswith("assistant\n")
    assert "reused" in out and "target: " in out and "memory" not in json.dumps(report["numbers"])
    assert json.loads((output / "args.json").read_text())["stage"] == "reuse"
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["counts"]["targets"] == 5 and not (output / "sft.jsonl.part").exists()

    before = (output / "sft.jsonl").read_bytes()
    assert run(*args)[0] == 0 and (output / "sft.jsonl").read_bytes() == before      # again: the same file
    assert run(*args, "--limit-episodes", 1)[0] == 0
    report = json.loads((output / "reuse-report.json").read_text())
    assert report["episodes"]["used"] == 1 and report["calls"] == 25 and report["outcomes"]["dropped: episode_limit"] == 7

    with JsonlWriter(output / "sft.jsonl") as w:           # a row that sft.py must leave out
        w.append({**rows[0], "token_ids": []})
    responses, counts = sft.read_data(types.SimpleNamespace(data=output / "sft.jsonl", max_length=4096))
    assert counts == {"rows": 4, "empty": 1, "used": 3, "source_reused": 3, "episodes": 1, "target_tokens": sum(len(r["token_ids"]) for r in rows[:3])}
    for row, made in zip(rows, merge_prefix(responses, [0, 1, 2]), strict=False):
        (begin, end, _), = made.spans
        assert made.tokens.tolist() == row["prompt_token_ids"] + row["token_ids"] and (begin, end) == (len(row["prompt_token_ids"]), len(made.tokens))


def test_sharded_teacher_gives_the_rows_of_the_whole_one(run, tmp_path, tiny_dir, tokenizer):
    teacher = write_teacher(tmp_path / "teacher", tokenizer)
    made = []
    for name, folder in (("a", teacher), ("b", shard(teacher, tmp_path / "shards", 3))):
        code, _, err = run("--teacher", folder, "--student", tiny_dir, "--output", tmp_path / name)
        assert code == 0, err
        report = json.loads((tmp_path / name / "reuse-report.json").read_text())
        made.append((sorted((r for _, r in read_jsonl(tmp_path / name / "sft.jsonl")), key=lambda r: r["call_id"]),
                     [report[k] for k in ("outcomes", "numbers", "episodes", "tokens")]))
    assert made[0] == made[1] and len(made[0][0]) == 5


def test_pictures_travel(run, tmp_path, tiny_dir, tokenizer):
    from tiny import picture_processor, train_tokenizer
    student, sha = tmp_path / "student", ImageStore(tmp_path / "teacher" / "images").put(png())

    def show(calls):
        for c in calls["e0"] + calls["e4"]:
            c.messages.append({"role": "user", "content": [{"type": "image", "sha256": sha}]}) if c.messages else None
            c.prompt_token_ids, c.token_ids = [], []
        calls["e4"][3].messages[-1]["content"][0]["sha256"] = "0" * 64
    args = ["--teacher", write_teacher(tmp_path / "teacher", tokenizer, show), "--output", tmp_path / "out", "--student"]
    code, _, err = run(*args, tiny_dir)
    assert code == 2 and "has no vision tower, but 4 calls of episode e0 hold pictures" in err
    vision = train_tokenizer(TEXTS * 20, 400, [], vision=True)
    vision.save_pretrained(student)
    picture_processor().save_pretrained(student)
    pad = vision.convert_tokens_to_ids("<|image_pad|>")
    (student / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "image_token_id": pad, "vision_config": {
        "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}}))
    code, _, err = run(*args, student)
    assert code == 0, err
    rows = [r for _, r in read_jsonl(tmp_path / "out" / "sft.jsonl")]
    assert [r["pictures"] for r in rows] == [[sha]] * 4 and all(r["prompt_token_ids"].count(pad) == 4 for r in rows)
    assert ImageStore(tmp_path / "out" / "images").get(sha) == png()
    assert json.loads((tmp_path / "out" / "reuse-report.json").read_text())["outcomes"]["dropped: picture"] == 1
    responses, _ = sft.read_data(types.SimpleNamespace(data=tmp_path / "out" / "sft.jsonl", max_length=4096))
    assert responses.picture(sha) == png()
    calls, pictures = play(tokenizer=vision), load_pictures(student)
    calls[0].message["content"], calls[0].token_ids = "I see .", [*gate.encode(vision, "I see "), pad, *sampled(vision, ".")]
    assert rows_of(vision, calls, pictures=pictures)[1].outcomes == {"reused": 2, "dropped: after_success": 1, "dropped: picture": 1}


def test_refusals_are_one_line_and_leave_nothing_whole(run, tmp_path, tiny_dir, tokenizer, foreign):
    good = write_teacher(tmp_path / "good", tokenizer)
    (tmp_path / "out").mkdir()

    def fails(words, teacher, *more):
        (tmp_path / "out" / "manifest.json").write_text("{}")            # an older output lies there
        code, _, err = run("--teacher", teacher, "--student", tiny_dir, "--output", tmp_path / "out", *more)
        assert code == 2 and words in err and err.strip().count("\n") == 0, err
        return (tmp_path / "out" / "manifest.json").exists()
    assert not fails("--other-vocabulary tokenize", write_teacher(tmp_path / "foreign", foreign))
    assert run("--teacher", tmp_path / "foreign", "--student", tiny_dir, "--output", tmp_path / "out", "--other-vocabulary", "tokenize")[0] == 0

    def remember(calls):
        calls["e4"][1].tools.append(tool("memory_read", "key"))
    assert not fails("call e4/1 has memory tools: ", write_teacher(tmp_path / "memory", tokenizer, remember))
    assert not fails("use rewrite.py", tmp_path / "memory")

    def breaks(calls):
        calls["e0"][0].message["tool_calls"] = [{"id": "x"}]
    assert not fails("episode e0: a message or tool is not in OpenAI's chat format", write_teacher(tmp_path / "broken", tokenizer, breaks))

    def cut(calls):
        for c in calls["e0"] + calls["e4"]:
            c.finish_reason = "length"
    assert not fails("no target in 25 calls", write_teacher(tmp_path / "cut", tokenizer, cut))
    assert not fails("episodes.jsonl: no such file", tmp_path / "none")
    assert fails("has no variable enable_thinking", good, "--chat-template-kwargs", '{"enable_thinking": false}')     # nothing was begun
    with JsonlWriter(tmp_path / "held" / "episodes.jsonl") as w:
        w.append(to_line(episode("h", init=3)))
    assert not fails("starts from state 3", tmp_path / "held")


@pytest.mark.slow
def test_sigkill_leaves_nothing_that_looks_whole_and_the_same_command_repairs_it(run, tmp_path, tiny_dir, tokenizer):
    teacher = tmp_path / "teacher"
    with JsonlWriter(teacher / "calls.jsonl") as calls, JsonlWriter(teacher / "episodes.jsonl") as episodes:
        mine = play("e", tokenizer)
        for e in range(300):
            for c in mine:
                calls.append({**to_line(c), "episode_id": f"e{e}", "call_id": f"e{e}/{c.turn}"})
            episodes.append({**to_line(episode(f"e{e}")), "calls": [f"e{e}/{c.turn}" for c in mine]})
    args = ["--teacher", teacher, "--student", tiny_dir, "--output"]
    assert run(*args, tmp_path / "whole")[0] == 0
    output = tmp_path / "out"
    process = subprocess.Popen([sys.executable, str(ROOT / "reuse.py"), *map(str, args), str(output)],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    part, deadline = output / "sft.jsonl.part", time.monotonic() + 60
    while not part.exists() or not part.stat().st_size:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not any((output / name).exists() for name in ("sft.jsonl", "reuse-report.json", "manifest.json"))
    assert 0 < part.stat().st_size < (tmp_path / "whole" / "sft.jsonl").stat().st_size
    assert run(*args, output)[0] == 0
    assert (output / "sft.jsonl").read_bytes() == (tmp_path / "whole" / "sft.jsonl").read_bytes() and not part.exists()
