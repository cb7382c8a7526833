"""--chat-template-kwargs: what is refused; that requests, records, gate and SFT rows carry them; that a run keeps them."""

import json
import os
import shutil
import sys

import pytest
from test_adapters import arguments
from test_endpoints import teacher_run
from test_rewrite import options, play, rows_of
from test_skills import call, planner, run as play_skills  # noqa: F401 (planner: a fixture)

import adapters
import collect
import eval as ev
import gate
import records
import rewrite
import rollout
import template_kwargs
from records import BadInput

OFF = '{"enable_thinking": false}'
BLOCK = "<think></think>"


@pytest.fixture(scope="module")
def thinking(tiny_dir, tmp_path_factory):
    """The tiny checkpoint with a template that closes an empty block where enable_thinking is false, as Qwen3.5's does."""
    folder = tmp_path_factory.mktemp("thinking") / "base"
    shutil.copytree(tiny_dir, folder)
    template, off = gate.load_tokenizer(folder).chat_template, "enable_thinking is defined and not enable_thinking"
    for place, closed in (("</think>{%- endif -%}", "</think>{%- elif " + off + " -%}" + BLOCK + "{%- endif -%}"),          # of a past response
                          ("assistant\\n' }}{%- endif -%}", "assistant\\n' }}{%- if " + off + " -%}" + BLOCK + "{%- endif -%}{%- endif -%}")):
        assert template.count(place) == 1
        template = template.replace(place, closed)
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture
def command(monkeypatch, capsys):
    """command(module, *argv) in this process -> (exit code, stdout, stderr)"""
    def command(module, *argv):
        monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *map(str, argv)])
        with pytest.raises(SystemExit) as end:
            records.run_main(module.main)
        return end.value.code, *capsys.readouterr()
    return command


# ---------------------------------------------------------------------------------------------- what is refused

@pytest.mark.parametrize("text, words", [
    ("{enable_thinking: false}", "not JSON"), ("[1]", "expected an object such as '{\"enable_thinking\": false}', found list"),
    ("null", "found NoneType"), ("[" * 99999, "not JSON"), ('{"tools": []}', "tools is no variable of a chat template"),
    ('{"add_generation_prompt": false}', "add_generation_prompt is no variable"), ('{"return_dict": true}', "return_dict is no variable"),
    ('{"enable_thinking": null}', "enable_thinking=null stands for the template's own default"), ('{"a": "auto"}', 'a="auto" stands for'),
])
def test_bad_input_is_one_line(text, words, command, tmp_path):
    code, out, err = command(rollout, "--model", tmp_path, "--output", tmp_path / "o", "--chat-template-kwargs", text)
    assert code == 2 and err.startswith("error: --chat-template-kwargs") and err.count("\n") == 1 and len(err) < 400 and words in err
    assert template_kwargs.parse(OFF) == {"enable_thinking": False} and template_kwargs.parse("{}") == {}


def test_a_variable_that_the_template_lacks_would_be_ignored(command, tiny_dir, thinking, tmp_path):
    teacher_run(tmp_path / "teacher", 1)
    tasks = ["--suites", "tabletop_base", "--inits", "100", "--output", tmp_path / "o", "--chat-template-kwargs", OFF]
    for module, argv in ((rollout, ["--model", tiny_dir, *tasks, "--groups", 1]), (ev, ["run", "--model", tiny_dir, *tasks]),
                         (collect, ["--teacher", "model", "--model", tiny_dir, *tasks]),
                         (rewrite, ["--teacher", tmp_path / "teacher", "--student", tiny_dir, *tasks[-4:]])):
        code, _, err = command(module, *argv)
        last = err.splitlines()[-1]
        assert code == 2 and last == f"error: --chat-template-kwargs: the chat template of {tiny_dir} has no variable enable_thinking; leave it out"
    template_kwargs.check({"enable_thinking": False}, thinking)
    with pytest.raises(BadInput, match="has no variable enable_thin;"):
        template_kwargs.check({"enable_thin": True}, thinking)


@pytest.mark.parametrize("teacher, words", [([], "scripted"), (["--teacher", "http://127.0.0.1:9/v1"], "with --teacher-api openai")])
def test_a_teacher_that_would_not_take_them_is_told_so(teacher, words, command, tmp_path):
    """The proxy records what the harness sends; endpoint.py sends OpenAI's own fields alone: the record would be of another context."""
    code, _, err = command(collect, *teacher, "--output", tmp_path / "o", "--chat-template-kwargs", OFF)
    assert code == 2 and f"a teacher {words} has no chat template that takes it" in err.splitlines()[-1] and not (tmp_path / "o").exists()


def test_other_kwargs_do_not_continue_a_run(tmp_path):
    args = arguments(tmp_path, chat_template_kwargs={"b": 1, "a": True})
    records.write_json(tmp_path / "args.json", adapters.check_resume(tmp_path, "rollout", args, "v"))
    adapters.check_resume(tmp_path, "rollout", arguments(tmp_path, chat_template_kwargs={"a": True, "b": 1}), "v")
    for other in (None, {"a": True}, {"a": False, "b": 1}):
        with pytest.raises(BadInput, match=r"holds a run with chat_template_kwargs={'b': 1, 'a': True}, this command says"):
            adapters.check_resume(tmp_path, "rollout", arguments(tmp_path, chat_template_kwargs=other), "v")


# ---------------------------------------------------------------------------------------------- where they go

@pytest.mark.parametrize("kwargs", [None, {}, {"enable_thinking": False}])
def test_every_request_of_the_harness_carries_them(planner, kwargs):  # noqa: F811
    play_skills(planner, [call("push", n=1), call("finish", status="success")], chat_template_kwargs=kwargs)
    assert [body.get("chat_template_kwargs") for body in planner.bodies] == [kwargs or None] * 2


def test_a_rollout_samples_records_and_keeps_them(command, thinking, tmp_path):
    argv = ["--model", thinking, "--suites", "tabletop_base", "--inits", "100", "--groups", 1, "--attempts", 2, "--turns", 2,
            "--max-tokens", 4, "--workers", 1, "--output", tmp_path / "round"]
    code, out, err = command(rollout, *argv, "--chat-template-kwargs", OFF)
    assert code == 0, err
    calls, tokenizer = list(records.read_calls(tmp_path / "round/calls.jsonl")), gate.load_tokenizer(thinking)
    assert calls and all(c.chat_template_kwargs == {"enable_thinking": False} for c in calls)
    assert all(tokenizer.decode(c.prompt_token_ids).endswith("assistant\n" + BLOCK) and gate.check(tokenizer, c) is None for c in calls)
    calls[0].chat_template_kwargs = {}
    assert gate.check(tokenizer, calls[0]).cause == "end"
    assert records.read_json(tmp_path / "round/args.json")["chat_template_kwargs"] == {"enable_thinking": False}
    code, _, err = command(rollout, *argv)
    assert code == 2 and "holds a run with chat_template_kwargs={'enable_thinking': False}, this command says None" in err


def test_an_evaluation_says_with_which_it_sampled(command, thinking, tmp_path):
    argv = ["run", "--model", thinking, "--suites", "tabletop_base", "--tasks", "0", "--inits", "1", "--turns", 1, "--max-tokens", 4, "--workers", 1]
    for name, more in (("a", []), ("b", ["--chat-template-kwargs", OFF])):
        assert command(ev, *argv, "--output", tmp_path / name, *more)[0] == 0
    shown = [records.read_json(tmp_path / name / "report.json")["sampling"] for name in "ab"]
    assert shown[1] == {**shown[0], "chat_template_kwargs": {"enable_thinking": False}}
    assert "the two were sampled differently" in command(ev, "compare", tmp_path / "a", tmp_path / "b")[1]


def test_rows_are_rendered_with_those_of_the_option_or_of_the_record(thinking):
    tokenizer, calls = gate.load_tokenizer(thinking), play()
    plain, _ = rows_of(tokenizer, calls)
    closed, _ = rows_of(tokenizer, calls, chat_template_kwargs={"enable_thinking": False})
    for c in calls:
        c.chat_template_kwargs = {"enable_thinking": False}
    recorded, _ = rows_of(tokenizer, calls)
    opened, _ = rows_of(tokenizer, calls, chat_template_kwargs={})
    assert recorded == closed and opened == plain and options().chat_template_kwargs is None
    silent = [row for row in plain if not row["message"].get("reasoning")]                 # a closed block leaves no room for reasoning
    assert 2 <= len(silent) < len(plain)
    for a, b in zip(silent, closed, strict=True):
        assert (a["chat_template_kwargs"], b["chat_template_kwargs"]) == ({}, {"enable_thinking": False}) and a["token_ids"] == b["token_ids"]
        assert tokenizer.decode(b["prompt_token_ids"]).endswith("assistant\n" + BLOCK) and a["call_id"] == b["call_id"]


# ---------------------------------------------------------------------------------------------- a checkpoint that was trained with others

def test_a_note_says_with_which_the_checkpoint_was_trained(tmp_path, capsys):
    sft, rl, off = tmp_path / "sft", tmp_path / "rl", {"enable_thinking": False}
    for folder, args in ((sft, {"stage": "sft", "data": str(tmp_path / "sft.jsonl")}), (rl, {"stage": "rl", "rollouts": [str(tmp_path / "round")]})):
        folder.mkdir()
        records.write_json(folder / "args.json", args)
    for checkpoint in (sft, rl, tmp_path):                          # the data is gone; no args.json
        template_kwargs.note_training(off, checkpoint)
    assert capsys.readouterr().out == ""
    os.makedirs(tmp_path / "round/shard-0-of-1")
    for path in (tmp_path / "sft.jsonl", tmp_path / "round/shard-0-of-1/calls.jsonl"):
        path.write_text(json.dumps({"call_id": "c", "chat_template_kwargs": off}) + "\n")
    for checkpoint in (sft, rl):
        template_kwargs.note_training(off, checkpoint)
        assert capsys.readouterr().out == ""
        template_kwargs.note_training(None, checkpoint)
        said = capsys.readouterr().out
        assert said.startswith(f'note: {checkpoint} was trained on contexts with chat_template_kwargs {{"enable_thinking": false}} (')
        assert said.endswith("this command samples with {}\n") and said.count("\n") == 1
