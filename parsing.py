"""Generated text -> content, reasoning, tool calls: what vLLM's parsers do for its replies, here for engine.py's.

A call stands between <tool_call> and </tool_call>, in one of two forms. The chat template says which (`xml_calls`): it writes the
history in one form alone, so that a call read from the other would come back in other tokens than were sampled.

    JSON    {"name": NAME, "arguments": {…}}                                                  Qwen3, tiny.py    (vLLM: hermes)
    XML     <function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n</function>                Qwen3.5 and up    (vLLM: qwen3_coder)

What the templates write is read as vLLM 0.32 reads it (tests/test_parsing.py asks it). Of malformed XML vLLM's parser makes what it can
(half-open calls run, text behind a call vanishes); here it stays content, as vLLM itself does with JSON, and the harness says so.

Reasoning stands between <think> and </think>. Some templates write the opening one into the prompt (`opened`), others leave it to the
planner: only the prompt's end tells, since enable_thinking decides from call to call.
"""

import json
import math
import re

_JSON_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_JSON_ARGUMENTS = re.compile(r'^\{\s*"name"\s*:\s*"([^"]*)"\s*,\s*"arguments"\s*:\s*(\{.*\})\s*\}$', re.DOTALL)
_XML_CALL = re.compile(r"<tool_call>\s*<function=([^>]+)>(.*?)</function>\s*</tool_call>", re.DOTALL)
_XML_PARAMETER = re.compile(r"<parameter=([^>]*)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=))", re.DOTALL)
_THINK = re.compile(r"^\s*<think>(.*?)</think>", re.DOTALL)
_UNREADABLE = (TypeError, ValueError, RecursionError)    # no call, no JSON, brackets a thousand deep, half a surrogate pair
_KINDS = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def xml_calls(chat_template):
    """True if this chat template writes tool calls in the XML form."""
    return "<function=" in chat_template


def opened(prompt):
    """True if a prompt (or its end) leaves a <think> block open."""
    return prompt.rstrip().endswith("<think>")


def parse_output(text, xml=False, opened=False, tools=None):
    """Generated text -> (content or None, reasoning or None, [(tool name, arguments as JSON text)]).

    Unreadable calls stay content, all of them: also with text between or after calls, or one left open. tools: as in the request; XML
    has no types, a tool's schema gives them. From JSON `arguments` is the exact substring generated: the history re-renders to the same
    text where that is canonical JSON.
    """
    reasoning = None
    if opened:                                           # a call ends reasoning, too; without either, all of it is reasoning
        end = re.search(r"</think>|(?=<tool_call>)|\Z", text)
        reasoning, text = text[:end.start()].removeprefix("<think>") or None, text[end.end():]
    elif m := _THINK.match(text):
        reasoning, text = m[1], text[m.end():]
    form = _XML_CALL if xml else _JSON_CALL
    try:
        calls = [_xml_call(*m.groups(), tools) if xml else _json_call(m[1]) for m in form.finditer(text)]
    except _UNREADABLE:
        calls = []
    content, mark, rest = text.partition("<tool_call>")
    if not calls or form.sub("", mark + rest).strip() or text.count(mark) != len(calls):
        return text or None, reasoning, []
    return (content.strip() if xml else content) or None, reasoning, calls


def _json_call(text):
    m = _JSON_ARGUMENTS.match(text)
    if not m or not isinstance(json.loads(m[2]), dict):
        raise ValueError(text)
    return m[1], m[2]


def _xml_call(name, body, tools):
    known = next((t["function"] for t in tools or [] if t["function"]["name"] == name.strip()), {})
    schemas = (known.get("parameters") or {}).get("properties") or {}
    values = {key: _value(text, _types(schemas.get(key))) for key, text in _XML_PARAMETER.findall(body)}
    return name.strip(), json.dumps(values, ensure_ascii=False)


def _types(schema):
    """The types that a JSON schema allows; a value without a schema is a string."""
    if not isinstance(schema, dict):
        return {"string"}
    said = schema.get("type") or []
    types = {said} if isinstance(said, str) else set(said)
    types.update(_KINDS[type(value)] for value in schema.get("enum") or [])
    types.update(*(_types(choice) for name in ("anyOf", "oneOf", "allOf") for choice in schema.get(name) or []))
    return types or {"string"}


def _value(text, types):
    """A parameter's text as a value of the first type that fits, in vLLM's order; what fits none stays text, and the tool refuses it.

    Qwen3.5's template prints a null as None: with vLLM and here that comes back as the string "None" (Qwen3.6 prints null).
    """
    if "null" in types and text.lower() == "null":
        return None
    for kind in ("integer", "number", "boolean", "object", "array", "string", "any"):
        if kind not in types | {"any"}:
            continue
        if kind == "string":
            return text
        try:
            if kind == "integer":
                return int(text)
            if kind == "number" and math.isfinite(x := float(text)):
                return int(x) if x == int(x) else x      # 2.0 comes back as 2
            if kind == "boolean":
                return {"true": True, "1": True, "false": False, "0": False}[text.lower().strip()]
            if kind in ("object", "array", "any"):
                value = json.loads(text)
                json.dumps(value, ensure_ascii=False, allow_nan=False).encode()          # what no history could say
                return value
        except (*_UNREADABLE, KeyError):
            continue
    return text
