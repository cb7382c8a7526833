"""The gate: every change of context is caught and explained, and no valid variant of the same context raises an alarm."""

import copy
import json
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

import gate
from records import Call, ImageStore, JsonlWriter, run_main, to_line

PNG = [b"\x89PNG\r\n\x1a\n" + bytes([i] * 40) for i in range(3)]


def tool(name, *parameters):
    return {"type": "function", "function": {"name": name, "description": f"{name} it", "parameters": {
        "type": "object", "properties": {p: {"type": "integer"} for p in parameters}}}}


def use(id, name, arguments):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.fixture(scope="module")
def tokenizer(tiny_dir):
    return gate.load_tokenizer(tiny_dir)


@pytest.fixture(scope="module")
def qwen(tiny_dir):
    """The same vocabulary under a large model's kind of template: JSON tools, parts, old reasoning dropped."""
    tokenizer = gate.load_tokenizer(tiny_dir)
    tokenizer.chat_template = """\
{%- if tools %}<|im_start|>system
# Tools
{% for t in tools %}{{ t | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('system message must be first') }}{% endif %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}
{%- if m.reasoning_content and loop.index0 > ns.last %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}
{%- endif %}
{%- if m.content is string %}{{ m.content }}{% else %}
{%- for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% else %}<|image|>{% endif %}{% endfor %}{% endif %}
{%- for c in m.tool_calls or [] %}
<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v }}{% endfor %}</tool_call>{% endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"""
    return tokenizer


@pytest.fixture
def images(tmp_path):
    store = ImageStore(tmp_path / "images")
    for data in PNG[:2]:
        store.put(data)
    return store


def messages(images):
    picture = {"type": "image", "sha256": images.put(PNG[0])}
    return [
        {"role": "system", "content": "You move objects on a table."},
        {"role": "user", "content": "Task: Put the red mug on the blue tray."},
        {"role": "assistant", "content": "I look.", "reasoning": "where is it?",
         "tool_calls": [use("a", "locate", '{"name": "red mug"}')]},
        {"role": "tool", "tool_call_id": "a", "content": "red mug at x 412 y -133"},
        {"role": "user", "content": [{"type": "text", "text": "camera: "}, picture]},
        {"role": "assistant", "content": "I pick.", "reasoning": "dy twenty",
         "tool_calls": [use("b", "pick", '{"x": 412, "y": -133, "dy": 20}')]},
        {"role": "tool", "tool_call_id": "b", "content": "Held: red mug."},
        {"role": "assistant", "content": "Now the tray.", "tool_calls": [use("c", "place", '{"name": "blue tray"}')]},
        {"role": "tool", "tool_call_id": "c", "content": "Placed the red mug  on the blue tray. é→漢"},
    ]


TOOLS = [tool("locate", "name"), tool("pick", "x", "y", "dy"), tool("place", "name"), tool("finish", "status")]


def record(tokenizer, messages, tools=TOOLS, kwargs=None, call_id="c1"):
    """A complete call whose prompt ids are what the server rendered for exactly these messages."""
    ids = gate.render_prompt(tokenizer, messages, tools, kwargs)
    return Call(call_id, "e", 0, "v", "v", "m", messages, tools, kwargs or {}, {}, ids, [5, 2], [-0.1, -0.2], "stop",
                {"role": "assistant", "content": "x"}, delivered=True)


def drop_message(c): del c.messages[3]
def reorder(c): c.messages[6], c.messages[8] = c.messages[8], c.messages[6]
def content_whitespace(c): c.messages[8]["content"] = c.messages[8]["content"].replace("  ", " ")
def trailing_newline(c): c.messages[3]["content"] += "\n"
def drop_reasoning(c): del c.messages[5]["reasoning"]
def change_reasoning(c): c.messages[5]["reasoning"] = "dy thirty"
def remove_tool(c): del c.tools[2]
def remove_last_tool(c): del c.tools[-1]
def rename_tool(c): c.tools[1]["function"]["name"] = "grasp"
def add_parameter(c): c.tools[2]["function"]["parameters"]["properties"]["speed"] = {}
def no_tools(c): c.tools = []
def shorten_tool_output(c): c.messages[3]["content"] = c.messages[3]["content"][:10] + "…"
def change_argument(c): c.messages[5]["tool_calls"][0]["function"]["arguments"] = '{"x": 412, "y": 133, "dy": 20}'
def reorder_arguments(c): c.messages[5]["tool_calls"][0]["function"]["arguments"] = '{"y": -133, "x": 412, "dy": 20}'
def drop_tool_call(c): del c.messages[7]["tool_calls"]
def change_role(c): c.messages[4]["role"] = "tool"
def change_system(c): c.messages[0]["content"] = "You move objects on the table."
def drop_system(c): del c.messages[0]
def add_message(c): c.messages.append({"role": "user", "content": "Go on."})
def drop_last_message(c): del c.messages[-1]
def drop_picture(c): del c.messages[4]["content"][1]
def add_picture(c): c.messages[4]["content"].append(dict(c.messages[4]["content"][1]))
def unicode_lookalike(c): c.messages[8]["content"] = c.messages[8]["content"].replace("é", "e\u0301")
def change_one_token(c): c.prompt_token_ids[40] = (c.prompt_token_ids[40] + 1) % 300
def extra_token(c): c.prompt_token_ids.insert(17, 0)
def extra_last_token(c): c.prompt_token_ids.append(2)
def missing_last_token(c): c.prompt_token_ids.pop()
def strange_token(c): c.prompt_token_ids[12] = 10 ** 6


MUTATIONS = {  # mutation -> causes that explain it
    drop_message: "assistant tool user", reorder: "tool", content_whitespace: "tool", trailing_newline: "tool",
    drop_reasoning: "assistant", change_reasoning: "assistant", remove_tool: "tools", remove_last_tool: "tools",
    rename_tool: "tools", add_parameter: "tools", no_tools: "tools system", shorten_tool_output: "tool",
    change_argument: "assistant", reorder_arguments: "assistant", drop_tool_call: "assistant", change_role: "tool",
    change_system: "system", drop_system: "system user tools", add_message: "user",
    drop_last_message: "end tool", drop_picture: "user", add_picture: "user", unicode_lookalike: "tool",
    change_one_token: "system user assistant tool tools", extra_token: "system tools", extra_last_token: "end",
    missing_last_token: "end", strange_token: "vocabulary",
}


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda f: f.__name__)
def test_mutation_is_caught(tokenizer, qwen, images, mutate):
    for tok in (tokenizer, qwen):
        call = record(tok, messages(images), copy.deepcopy(TOOLS))
        assert gate.check(tok, call, images) is None
        mutated = copy.deepcopy(call)
        mutate(mutated)
        found = gate.check(tok, mutated, images)
        assert found is not None, mutate.__name__
        assert found.token is not None and str(found).startswith(f"token {found.token} of ")
        if tok is tokenizer:
            assert found.cause in MUTATIONS[mutate].split(), (found.cause, str(found))


def test_explanation_names_token_message_and_both_texts(tokenizer, images):
    call = record(tokenizer, messages(images))
    text = gate.render_text(tokenizer, call.messages[:6], TOOLS, {}, generation_prompt=False)
    before = len(gate.encode(tokenizer, text))
    call.messages[6]["content"] = "Lost: red mug."
    found = gate.check(tokenizer, call)
    assert (found.message, found.role, found.cause) == (6, "tool", "tool")
    assert before <= found.token < before + 8              # in the first tokens of message 6
    assert "Held" in found.recorded and "Lost" in found.rendered
    assert "message 6 (tool)" in str(found) and "Held" in str(found) and "Lost" in str(found)


def test_kwargs_and_template_and_vocabulary(tokenizer, qwen, images):
    call = record(qwen, messages(images), kwargs={"enable_thinking": False})
    assert gate.check(qwen, call) is None
    call.chat_template_kwargs = {}
    assert gate.check(qwen, call).cause == "end"           # the empty thinking block is the last thing in the prompt
    call.chat_template_kwargs = {"chat_template": "x"}
    assert gate.check(qwen, call).cause == "template"
    assert gate.check(tokenizer, record(qwen, messages(images))) is not None     # another template
    for kwargs in ({"add_generation_prompt": False}, {"enable_thinking": None}, {"enable_thinking": "auto"}, {"unknown": 1}):
        assert gate.check(qwen, record(qwen, messages(images), kwargs=kwargs)) is None
        assert record(qwen, messages(images), kwargs=kwargs).prompt_token_ids == record(qwen, messages(images)).prompt_token_ids
    from tiny import SCAFFOLD, train_tokenizer
    other = train_tokenizer(["Put the mug on a tray, then another thing."] * 5 + SCAFFOLD, 300, [])
    assert gate.check(other, record(tokenizer, messages(images))) is not None    # another vocabulary, same template


def test_same_text_in_other_tokens(tokenizer, images):
    call = record(tokenizer, messages(images))
    words = [tokenizer.decode([t]) for t in call.prompt_token_ids]
    i = next(i for i, w in enumerate(words) if len(w) == 2 and w.isalpha())
    call.prompt_token_ids[i:i + 1] = [gate.encode(tokenizer, ch)[0] for ch in words[i]]
    found = gate.check(tokenizer, call)
    assert found.cause == "tokens" and found.token == i and "cut into other tokens" in str(found)


def test_pictures(tokenizer, images):
    call = record(tokenizer, messages(images))
    sha = call.messages[4]["content"][1]["sha256"]
    path = images.folder / f"{sha}.png"
    other = images.folder / f"{images.put(PNG[1])}.png"
    assert gate.check(tokenizer, call, images) is None
    path.write_bytes(PNG[0][:-1] + b"!")                   # one byte changed
    assert str(gate.check(tokenizer, call, images)) == f"picture {sha} missing"
    shutil.copy(other, path)                               # another picture under its name
    assert gate.check(tokenizer, call, images).cause == "picture"
    path.unlink()                                          # gone
    assert gate.check(tokenizer, call, images).cause == "picture"
    call.messages[4]["content"][1]["sha256"] = "0" * 64    # reference to a picture that was never stored
    assert gate.check(tokenizer, call, images).cause == "picture"
    with pytest.raises(gate.PictureError):
        gate.render_prompt(tokenizer, call.messages, TOOLS, {}, images)


def test_broken_record_is_a_mismatch_not_a_crash(qwen, images):
    call = record(qwen, messages(images))
    call.messages.append({"role": "system", "content": "late"})
    assert gate.check(qwen, call).cause == "template"      # the template raises
    call.messages[-1] = {"role": "assistant", "tool_calls": [{"id": "x"}]}
    assert gate.check(qwen, call).cause == "template"      # no function


def as_dict(ms): ms[5]["tool_calls"][0]["function"]["arguments"] = {"x": 412, "y": -133, "dy": 20}
def odd_spaces(ms): ms[5]["tool_calls"][0]["function"]["arguments"] = '{"x": 412,   "y":-133,\n"dy":20 }'
def tool_parts(ms): ms[3]["content"] = [{"type": "text", "text": ms[3]["content"]}]
def user_parts(ms): ms[1]["content"] = [{"type": "text", "text": ms[1]["content"]}]
def other_name(ms): ms[5]["reasoning_content"] = ms[5].pop("reasoning")
def both_names(ms): ms[5]["reasoning_content"] = ms[5]["reasoning"]
def empty_reasoning(ms): ms[7]["reasoning"] = None
def extra_fields(ms): ms[7].update(refusal=None, annotations=[], function_call=None)
def raw_picture(ms): ms[4]["content"][1] = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
def call_index(ms): ms[7]["tool_calls"][0]["index"] = 0


VARIANTS = [as_dict, odd_spaces, tool_parts, user_parts, other_name, both_names, empty_reasoning, extra_fields, raw_picture,
            call_index]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda f: f.__name__)
def test_valid_variant_raises_no_alarm(tokenizer, qwen, images, variant):
    for tok in (tokenizer, qwen):
        call = record(tok, messages(images))
        variant(call.messages)
        assert gate.check(tok, call, images) is None


def test_more_valid_variants(tokenizer, qwen):
    for tok in (tokenizer, qwen):
        plain = [{"role": "user", "content": "Task: Put 漢字 → the red mug."}, {"role": "assistant", "content": "Ok."},
                 {"role": "user", "content": "Go on."}]
        ids = gate.render_prompt(tok, plain, [], {})
        assert ids == gate.render_prompt(tok, plain, None, None)                                         # no tools, twice
        assert ids == gate.render_prompt(tok, [plain[0], {**plain[1], "tool_calls": []}, plain[2]], None, {})
        assert ids == gate.render_prompt(tok, [plain[0], {**plain[1], "tool_calls": None}, plain[2]], None, {})
        acts = [plain[0], {"role": "assistant", "content": None, "tool_calls": [use("a", "locate", "{}")]}]
        for content in ("", []):
            empty = [acts[0], {**acts[1], "content": content}]
            assert gate.render_prompt(tok, acts, None, {}) == gate.render_prompt(tok, empty, None, {})
        bare = [acts[0], {k: v for k, v in acts[1].items() if k != "content"}]
        assert gate.render_prompt(tok, acts, None, {}) == gate.render_prompt(tok, bare, None, {})
        for bad in ("", "not json", "[1]", "3", None):     # as vLLM does: an object or nothing
            broken = [acts[0], {**acts[1], "tool_calls": [use("a", "locate", bad)]}]
            assert gate.render_prompt(tok, acts, None, {}) == gate.render_prompt(tok, broken, None, {})
        parts = [{"type": "text", "text": "x 1"}, {"type": "text", "text": "y 2"}]
        two = [*acts, {"role": "tool", "tool_call_id": "a", "content": parts}]
        one = [*acts, {"role": "tool", "tool_call_id": "a", "content": "x 1\ny 2"}]
        assert gate.render_prompt(tok, two, None, {}) == gate.render_prompt(tok, one, None, {})


def test_messages_become_what_vllm_gives_a_template():
    """Expected values were read off vLLM 0.32's own parser; test_vllm_gate.py compares with a running one."""
    call = use("a", "locate", '{"b": 1,  "a":2}')
    given = [
        {"role": "system", "content": "x-anthropic-billing-header: 1\nBe brief."},
        {"role": "user", "content": [{"type": "text", "text": ""}, {"type": "text", "text": "see", "cache_control": 1, "name": "n"},
                                     {"type": "image_url", "image_url": {"url": "…"}}], "name": "bob", "foo": 1},
        {"role": "assistant", "content": None, "reasoning": "", "reasoning_content": "old", "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": ""}], "tool_call_id": "a", "name": 3},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}, {"type": "thinking", "thinking": "hm"}], "tool_calls": None,
         "reasoning_content": "new"},
        {"role": "user", "content": [{"type": "text", "text": ""}, {"type": "text", "text": None}, "bare"], "reasoning": "not an assistant"}]
    arguments = {**call, "function": {"name": "locate", "arguments": {"b": 1, "a": 2}}}
    text = lambda *texts: [{"type": "text", "text": t} for t in texts]
    assert gate.normalise(given) == [
        {"role": "system", "content": text("Be brief.")},
        {"role": "user", "content": [*text(""), {"type": "text", "text": "see", "cache_control": 1}, {"type": "image"}], "name": "bob"},
        {"role": "assistant", "content": [], "tool_calls": [arguments], "reasoning": "", "reasoning_content": ""},
        {"role": "tool", "content": "a\n", "tool_call_id": "a"},
        {"role": "assistant", "content": text("no", "hm"), "reasoning": "new", "reasoning_content": "new"},
        {"role": "user", "content": text("", "bare")}]
    strings = gate.normalise(given, parts=False)
    assert [m["content"] for m in strings if m["role"] != "user"] == ["Be brief.", "", "a", "no\nhm"] and strings[5]["content"] == "bare"
    for part in ({"text": "no type"}, {"type": "video_url", "video_url": {"url": "…"}}, 3):
        with pytest.raises(gate.RENDER_ERRORS):
            gate.normalise([{"role": "user", "content": [part]}])


def test_tools_become_what_vllm_gives_a_template(qwen):
    given = [{"function": {"parameters": {"z": 1, "a": None}, "name": "f", "strict": True, "foo": 1}, "type": "function", "bar": 2},
             {"function": {"name": "g", "strict": None}}]
    shown = gate.normalise_tools(given)
    assert json.dumps(shown) == json.dumps([        # the order of fields counts: templates print them
        {"type": "function", "function": {"name": "f", "description": None, "parameters": {"z": 1, "a": None}, "strict": True}},
        {"type": "function", "function": {"name": "g", "description": None, "parameters": None}}])
    assert json.dumps(shown[0]) in gate.render_text(qwen, [{"role": "user", "content": "x"}], given)


def test_developer_text_becomes_system_text_unless_the_template_knows_the_role(qwen):
    m = lambda role, content: {"role": role, "content": content}
    render = lambda *messages: gate.render_text(qwen, list(messages))
    assert render(m("developer", "a"), m("user", "u")) == render(m("system", "a"), m("user", "u"))
    assert render(m("user", "u"), m("developer", [{"type": "text", "text": "a"}]), m("system", "b")) == render(m("system", "a\n\nb"), m("user", "u"))
    qwen.chat_template += "{# 'developer' #}"
    try:
        assert "<|im_start|>developer\na" in render(m("developer", "a"), m("user", "u"))
    finally:
        qwen.chat_template = qwen.chat_template.removesuffix("{# 'developer' #}")


def test_arguments_nested_too_deep_are_a_mismatch_not_a_crash(qwen, images):
    call = record(qwen, messages(images))
    call.messages[5]["tool_calls"][0]["function"]["arguments"] = '{"a":' * 100_000
    assert gate.check(qwen, call).cause == "template"
    call.messages[5]["tool_calls"][0]["function"]["arguments"] = '{"a": "\\ud800"}'      # a lone surrogate is no text
    assert gate.check(qwen, call).cause == "template"


def test_normalise_leaves_its_input(images):
    ms = messages(images)
    before = copy.deepcopy(ms)
    out = gate.normalise(ms)
    assert ms == before
    assert out[5]["tool_calls"][0]["function"]["arguments"] == {"x": 412, "y": -133, "dy": 20}
    assert out[5]["reasoning"] == out[5]["reasoning_content"] == "dy twenty"


def test_template_that_prints_strings_only(tiny_dir):
    tokenizer = gate.load_tokenizer(tiny_dir)
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.role + '\\n' + m.content }}<|im_end|>\n{% endfor %}" \
                              "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    parts = [{"role": "user", "content": [{"type": "text", "text": "red"}, {"type": "text", "text": "mug"}]}]
    joined = [{"role": "user", "content": "red\nmug"}]
    assert gate.render_prompt(tokenizer, parts, None, {}) == gate.render_prompt(tokenizer, joined, None, {})


def test_render_target_is_the_continuation(tokenizer, qwen, images):
    ms = messages(images)
    for tok in (tokenizer, qwen):
        for i in (5, 7):
            prompt, target = gate.render_target(tok, ms[:i], TOOLS, ms[i], {})
            assert prompt == gate.render_prompt(tok, ms[:i], TOOLS, {})
            assert target[-1] == tok.eos_token_id and target.count(tok.eos_token_id) == 1
            assert tok.decode(target).endswith("<|im_end|>")
            whole = gate.encode(tok, gate.render_text(tok, ms[:i + 1], TOOLS, {}, generation_prompt=False))
            assert whole[:len(prompt) + len(target)] == prompt + target
    with pytest.raises(ValueError, match="does not continue"):       # this prompt ends in an empty thinking block
        gate.render_target(qwen, ms[:7], TOOLS, ms[7], {"enable_thinking": False})


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command in this process (an import of transformers costs seconds): (exit code, stdout, stderr)."""
    def run(*args):
        monkeypatch.setattr(sys, "argv", ["gate.py", *map(str, args)])
        with pytest.raises(SystemExit) as end:
            run_main(gate.main)
        return end.value.code, *capsys.readouterr()
    return run


def test_command(tokenizer, tiny_dir, tmp_path, run, images):
    folder = tmp_path / "round"
    shutil.copytree(images.folder, folder / "images")
    calls = [record(tokenizer, messages(images), call_id=f"c{i}") for i in range(20)]
    calls[3] = copy.deepcopy(calls[3])
    calls[3].messages[8]["content"] = "Placed nothing."
    calls[4].logprobs = [-0.1]                             # incomplete: not the gate's matter
    with JsonlWriter(folder / "calls.jsonl") as w:
        for c in calls:
            w.append(to_line(c))
    code, out, err = run("--calls", folder, "--model", tiny_dir)
    assert code == 3, err
    assert "20 calls | 1 incomplete" in out and "19 compared | 1 mismatched (5.26%)" in out and "c3: token" in out
    report = json.loads((folder / "gate-report.json").read_text())
    assert report["gated"] == ["c3"] and report["causes"] == {"tool": 1}
    code, _, _ = run("--calls", folder, "--model", tiny_dir, "--max-mismatch", 0.1, "--output", tmp_path / "r.json")
    assert code == 0 and (tmp_path / "r.json").exists()


def test_command_reads_every_shard_with_its_own_pictures(tokenizer, tiny_dir, tmp_path, run, images):
    calls = [record(tokenizer, messages(images), call_id=f"c{i}") for i in range(4)]
    for i in range(2):
        shutil.copytree(images.folder, tmp_path / f"shard-{i}-of-2" / "images")
        with JsonlWriter(tmp_path / f"shard-{i}-of-2" / "calls.jsonl") as w:
            for c in calls[i::2]:
                w.append(to_line(c))
    code, out, err = run("--calls", tmp_path, "--model", tiny_dir)
    assert code == 0 and "4 compared | 0 mismatched" in out, err
    shutil.rmtree(tmp_path / "shard-1-of-2" / "images")
    code, out, _ = run("--calls", tmp_path, "--model", tiny_dir)
    report = json.loads((tmp_path / "gate-report.json").read_text())
    assert code == 3 and report["gated"] == ["c1", "c3"] and report["causes"] == {"picture": 2}


def test_command_bad_input(tiny_dir, tmp_path, run, tokenizer, images):
    (tmp_path / "calls.jsonl").write_text('{"call_id": "a"}\n')
    (tmp_path / "empty").mkdir()
    teacher = record(tokenizer, messages(images))
    teacher.prompt_token_ids = []                          # a scripted teacher has no ids
    with JsonlWriter(tmp_path / "teacher" / "calls.jsonl") as w:
        w.append(to_line(teacher))
    for calls, model, words in ((tmp_path, tiny_dir, "calls.jsonl:1: field 'episode_id' is missing"),
                                (tmp_path / "no", tiny_dir, "no such file"),
                                (tmp_path, tmp_path / "empty", "no tokenizer.json"),
                                (tmp_path / "teacher", tiny_dir, "none of 1 calls is complete")):
        code, _, err = run("--calls", calls, "--model", model)
        assert code == 2 and words in err and err.count("\n") == 1, err


def test_help_runs_as_a_script(python):
    r = subprocess.run([*python, str(ROOT / "gate.py"), "--help"], capture_output=True, text=True)
    assert r.returncode == 0 and "--max-mismatch" in r.stdout and "Departures" in r.stdout
