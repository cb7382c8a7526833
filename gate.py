"""Prompt gate: renders every recorded prompt again and compares it token by token with the record (SPEC.md §2).

A response is only worth training on under the very context it was sampled in. So the trainer renders messages,
tools and pictures of each call with the checkpoint's own tokenizer and chat template; where the result is not
the recorded prompt, the call's weight is 0.

Reads   DIR/calls.jsonl, DIR/images/ (or those of its shards), tokenizer, chat template and picture processor of a
        checkpoint (no weights)
Writes  DIR/gate-report.json: counts, share of mismatches, histogram of causes, explanations, the gated call_ids
Exit    0; 3 when the share of mismatches is above --max-mismatch (a wrong template or a changed harness: stop
        and look, do not train on what is left); 2 on bad input. Incomplete calls (records.call_problem) are
        counted apart.

`render_prompt` is the one renderer of the project: the in-process engine, rewrite.py and rl.py call it too. It
repeats what vLLM's server does to messages and tools before its template sees them, so that a prompt served by vLLM
and one rendered here have the same ids (tests/test_vllm_gate.py: thousands of odd chats through real vLLM).

Departures and limits
 1. A picture must be in images/ with the bytes of its hash, and decode. With a vision-language checkpoint its placeholder
    is expanded as the processor does it, so that a picture of another size, another order of sizes or other processor
    settings are seen. A reference to another stored picture with as many placeholders gives the same ids and cannot be seen; a
    text-only checkpoint renders every picture as its template's one placeholder, and cannot see any such swap.
 2. Some templates take content as text alone. vLLM then puts its placeholders of pictures into that text; here such
    a picture stays a part, and the call is gated.
 3. A server's own --chat-template, --default-chat-template-kwargs or --exclude-tools-when-tool-choice-none are not
    known here; every call that they change is gated.

    python gate.py --calls run/round-1 --model run/sft
    torchrun …    not needed: one process does 1,400 calls/s of 500 tokens, 4,000 of 200
"""

import argparse
import functools
import json
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer

from pictures import load_pictures
from records import BadInput, Formatter, ImageStore, call_problem, folders, read_calls, run_main, write_json

WINDOW = 16                      # tokens shown before and after the first difference
RENDER_ERRORS = (TemplateError, ValueError, TypeError, KeyError, AttributeError, RecursionError)     # what broken messages can raise
# How vLLM reads a request (checked against 0.32 by tests/test_vllm_gate.py)
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
PART_FIELDS = set("""audio_embeds audio_url closed data file image_embeds image_pil image_url input_audio name prompt_cache_breakpoint
                     refusal text thinking type uuid video_embeds video_url""".split())
RESERVED = {"tokenize", "chat_template", "tools", "conversation"}            # template kwargs that would replace the recorded context
OVERRIDDEN = {"add_generation_prompt", "continue_final_message", "return_dict"}      # … that vLLM sets itself


class PictureError(ValueError):
    """A picture is missing or has not the bytes of its hash, does not decode, or pictures and placeholders do not pair up."""


@dataclass
class Mismatch:
    """The first difference between the recorded prompt and the rendered one."""
    cause: str                   # picture, template, tools, end, tokens, vocabulary, or the role of the message
    text: str                    # the explanation, one line
    token: int | None = None     # index of the first token that differs
    message: int | None = None   # index of the message it falls in
    role: str | None = None
    recorded: str = ""           # decoded window of the record around the difference
    rendered: str = ""           # … of the rendering

    def __str__(self):
        return self.text


# ---------------------------------------------------------------------------------------------- rendering

def load_tokenizer(checkpoint):
    """Checkpoint folder (or hub name) -> tokenizer with a chat template; BadInput if it has none."""
    folder = Path(checkpoint)
    if folder.exists() and not any((folder / n).exists() for n in ("tokenizer.json", "tokenizer_config.json")):
        raise BadInput(f"{folder}: no tokenizer.json; give a checkpoint folder with tokenizer and chat template")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(checkpoint))
    except (OSError, ValueError) as e:
        raise BadInput(f"{checkpoint}: cannot load a tokenizer ({str(e).splitlines()[0]})") from None
    if not tokenizer.chat_template:
        raise BadInput(f"{checkpoint}: no chat template (chat_template.jinja); the planner is a chat model")
    return tokenizer


def _arguments(value):
    """Arguments of a tool call as a template sees them: an object; invalid or non-object JSON becomes {} (as vLLM)."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return value if isinstance(value, dict) else {}


def _parts(content):
    """Message content -> [{"type": "text", "text": …} | {"type": "image"}]; fields that vLLM does not know stay (cache_control)."""
    out = []
    for part in [content] if isinstance(content, str) else content or []:
        kind = "text" if isinstance(part, str) else part["type"]
        if kind in ("image", "image_url"):
            out.append({"type": "image"})
        elif kind not in TEXT_PARTS:
            raise ValueError(f"content part of type {kind!r}; expected image_url, {', '.join(TEXT_PARTS)}")
        else:
            text = part if isinstance(part, str) else part.get(TEXT_PARTS[kind])
            if text is not None:
                extra = {} if isinstance(part, str) else {k: v for k, v in part.items() if k not in PART_FIELDS}
                out.append({"type": "text", "text": text, **extra})
    return out


def _without_billing(parts):
    """Claude Code's first system line differs in every request; vLLM drops it from system text."""
    for part in parts:
        if part.get("text", "").startswith("x-anthropic-billing-header"):
            part["text"] = part["text"].partition("\n")[2]
            if not part["text"]:
                continue
        yield part


def normalise(messages, parts=True):
    """OpenAI chat messages -> the messages that vLLM gives a template. The input is left as it is.

    parts: the template walks through content parts, so that every content is a list of them (one that prints strings
    gets the texts joined by a newline; so does any tool result without pictures). Tool-call arguments become objects, empty
    tool_calls vanish, reasoning stands under both of its names, fields that vLLM does not know are dropped.
    """
    out = []
    for m in messages:
        content = _parts(m.get("content"))
        if m["role"] == "system":
            content = list(_without_billing(content))
        if all(p["type"] == "text" for p in content) and (m["role"] == "tool" or not parts):
            content = "\n".join(p["text"] for p in content if p["text"] or parts)       # vLLM's string form leaves empty texts out
        new = {"role": m["role"], "content": content}
        if m["role"] == "assistant":
            if m.get("tool_calls"):
                new["tool_calls"] = [{**c, "function": {**f, "arguments": _arguments(f.get("arguments"))}}
                                     for c in m["tool_calls"] for f in [c["function"]]]
            reasoning = m.get("reasoning")                 # "" is kept: templates ask whether it is a string
            reasoning = m.get("reasoning_content") if reasoning is None else reasoning
            if reasoning is not None:
                new["reasoning"] = new["reasoning_content"] = reasoning
        if m["role"] == "tool" and "tool_call_id" in m:
            new["tool_call_id"] = m["tool_call_id"]
        if m["role"] == "developer":
            new["tools"] = m.get("tools")
        out.append(new | {k: m[k] for k in ("name", "task") if isinstance(m.get(k), str)})
    return out


def _merge_system(messages):
    """For templates without a developer role: those messages are system text, and all system text is one first message."""
    if not any(m["role"] == "developer" for m in messages):
        return messages
    system, rest = [], []
    for m in messages:
        if m["role"] not in ("developer", "system"):
            rest.append(m)
        elif text := m["content"] if isinstance(m["content"], str) else "\n".join(p.get("text", "") for p in m["content"]):
            system.append(text)
    if len(messages) - len(rest) == 1 and messages[0]["role"] == "developer":      # alone and first: only its name changes
        return [{**messages[0], "role": "system"}, *rest]
    return [{"role": "system", "content": "\n\n".join(system)}, *rest]


def normalise_tools(tools):
    """OpenAI tools -> the tools that vLLM gives a template: its fields in its order, null where one is missing."""
    out = []
    for t in tools:
        f = t["function"]
        defer = {} if t.get("defer_loading") is None else {"defer_loading": t["defer_loading"]}
        shown = {"name": f["name"], "description": f.get("description"), "parameters": f.get("parameters")}
        shown |= {k: v for k, v in (("strict", f.get("strict")), ("defer_loading", f.get("defer_loading"))) if v is not None}
        out.append({"type": "function", "function": {**shown, **({} if "defer_loading" in shown else defer)}, **defer})
    return out


@functools.lru_cache(maxsize=16)
def _takes_parts(template, tokenizer):
    """True if the template walks through content parts; one that only prints a string gets the joined text instead."""
    text = "pro\nbe"                                       # a list that is printed as a whole shows its newline as \\n
    try:
        return text in tokenizer.apply_chat_template([{"role": "user", "content": [{"type": "text", "text": text}]}], tokenize=False)
    except (TemplateError, TypeError):
        return False


def render_text(tokenizer, messages, tools=None, chat_template_kwargs=None, generation_prompt=True):
    """The chat template's text. One of RENDER_ERRORS if it refuses the messages or a kwarg is reserved."""
    # vLLM drops these values; add_generation_prompt and continue_final_message come from the request, never from here
    kwargs = {k: v for k, v in (chat_template_kwargs or {}).items() if v not in (None, "auto") and k not in OVERRIDDEN}
    wrong = RESERVED & kwargs.keys()
    if wrong:
        raise ValueError(f"chat_template_kwargs must not hold {', '.join(sorted(wrong))}")
    template = tokenizer.chat_template
    messages = normalise(messages, _takes_parts(template, tokenizer))
    if "'developer'" not in template and '"developer"' not in template:
        messages = _merge_system(messages)
    return tokenizer.apply_chat_template(messages, tools=normalise_tools(tools or []) or None, tokenize=False,
                                         **kwargs, add_generation_prompt=generation_prompt)


def encode(tokenizer, text):
    """Text -> ids, special tokens written in the text recognised and none added."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def picture_hashes(messages):
    """The sha256 of every picture part, in order (raw image_url parts, as an engine sees them, have none)."""
    return [part["sha256"] for m in messages if isinstance(m.get("content"), list)
            for part in m["content"] if isinstance(part, dict) and part.get("sha256")]


def _counts(messages, images, pictures):
    """[(message index, placeholder tokens)] of every picture, in order; one token each without `pictures`. PictureError names it."""
    out = []
    if images is None and pictures is None:                # nothing is looked up
        return out
    for n, sha in ((n, sha) for n, m in enumerate(messages) for sha in picture_hashes([m])):
        data = None if images is None else images.get(sha)
        if data is None:
            raise PictureError(f"picture {sha} missing")
        try:
            out.append((n, 1 if pictures is None else pictures.count(data)))
        except ValueError as e:
            raise PictureError(f"message {n}: picture {sha}: {e}") from None
    return out


def _expand(ids, counts, pictures):
    """Ids with every placeholder expanded, where the checkpoint has `pictures`; PictureError if there are not as many of them."""
    try:
        return ids if pictures is None else pictures.expand(ids, [count for _, count in counts])
    except ValueError as e:
        raise PictureError(str(e)) from None


def render_prompt(tokenizer, messages, tools, chat_template_kwargs, images=None, pictures=None):
    """Prompt ids of one call, generation prompt included: list[int].

    images: ImageStore; with it every picture must be there with the bytes of its hash, else PictureError (a ValueError).
    pictures: pictures.Pictures of a vision-language checkpoint; with it every picture's placeholder is expanded.
    """
    counts = _counts(messages, images, pictures)
    return _expand(encode(tokenizer, render_text(tokenizer, messages, tools, chat_template_kwargs)), counts, pictures)


def render_target(tokenizer, messages, tools, message, chat_template_kwargs, images=None, pictures=None):
    """(prompt ids, target ids) of the assistant `message` after `messages`; the target ends with the end token.

    Prompt and target are encoded apart, because a planner samples its response after the encoded prompt. ValueError if
    the template does not continue the prompt with the message, or writes no end token: then there is no target.
    images, pictures: as render_prompt; a message that spells a placeholder is no target either (PictureError).
    """
    counts = _counts(messages, images, pictures)
    prompt = render_text(tokenizer, messages, tools, chat_template_kwargs)
    full = render_text(tokenizer, [*messages, message], tools, chat_template_kwargs, generation_prompt=False)
    if not full.startswith(prompt):
        at = _common(prompt, full)
        was, now = (text[max(0, at - 20):at + 30] for text in (prompt, full))
        raise ValueError(f"the template does not continue the prompt: {was!r} became {now!r}")
    end = full.rfind(tokenizer.eos_token, len(prompt))
    if end < 0:
        raise ValueError(f"the template writes no end token {tokenizer.eos_token!r} after the assistant message")
    target = encode(tokenizer, full[len(prompt):end] + tokenizer.eos_token)
    return _expand(encode(tokenizer, prompt), counts, pictures), _expand(target, [], pictures)


# ---------------------------------------------------------------------------------------------- comparison

def _common(a, b):
    """Length of the common prefix of two sequences."""
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)


def check(tokenizer, call, images=None, pictures=None):
    """None if `call` renders to its recorded prompt_token_ids, else a Mismatch that explains the first difference.

    images, pictures: as render_prompt. A response that holds placeholder tokens is a mismatch as well: no model can score it.
    """
    if pictures is not None and pictures.token in call.token_ids:
        return Mismatch("picture", f"the response holds placeholder tokens of pictures (id {pictures.token}), but no picture")
    try:
        ids = render_prompt(tokenizer, call.messages, call.tools, call.chat_template_kwargs, images, pictures)
    except PictureError as e:
        return Mismatch("picture", str(e))
    except RENDER_ERRORS as e:                             # one broken record stops no round
        return Mismatch("template", f"the template cannot render this call: {type(e).__name__}: {e}")
    if ids == call.prompt_token_ids:
        return None
    return _explain(tokenizer, call, ids, _counts(call.messages, images, pictures), pictures)


def _explain(tokenizer, call, ids, counts, pictures):
    """The slow path: where the first differing token lies, in words."""
    recorded = call.prompt_token_ids
    at = _common(recorded, ids)
    text = render_text(tokenizer, call.messages, call.tools, call.chat_template_kwargs)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    left = iter(counts)                                    # offsets of the expanded ids: a picture's are those of its placeholder
    offsets = [offset for token, offset in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
               for _ in range(next(left)[1] if pictures is not None and token == pictures.token else 1)]
    char = offsets[at][0] if at < len(ids) else len(text)
    index, role = _locate(tokenizer, call, text, char)
    size = len(tokenizer)
    strange = [t for t in recorded if not isinstance(t, int) or not 0 <= t < size]
    start, right = max(0, at - WINDOW), at + WINDOW
    window = tokenizer.decode([t for t in recorded[start:right] if t not in strange])
    expected = tokenizer.decode(ids[start:right])
    cause, note = role, ""
    if strange:
        cause, note = "vocabulary", f"; recorded id {strange[0]} is not in this vocabulary of {size}"
    elif at == len(recorded) or at == len(ids):
        cause, note = "end", f"; the {'record' if at == len(recorded) else 'rendering'} ends there"
    elif wrong := _wrong_count(recorded, ids, at, counts, pictures):
        index, note = wrong
        cause, role = "picture", str(call.messages[index].get("role"))
    elif tokenizer.decode(recorded) == tokenizer.decode(ids):
        cause, note = "tokens", "; the text is the same, cut into other tokens"
    where = f"message {index} ({role})" if index is not None else role
    return Mismatch(cause, f"token {at} of {len(recorded)} recorded / {len(ids)} rendered, in {where}{note}: "
                           f"recorded {window!r}, rendered {expected!r}", at, index, role, window, expected)


def _wrong_count(recorded, ids, at, counts, pictures):
    """(message index, explanation) if the first difference is where the placeholders of one picture end, else None."""
    if pictures is None or not at or ids[at - 1] != pictures.token or pictures.token not in (recorded[at], ids[at]):
        return None
    start = next(i for i in range(at, -1, -1) if i == 0 or ids[i - 1] != pictures.token)
    record, rendering = (next((i for i, t in enumerate(x[start:]) if t != pictures.token), len(x) - start) for x in (recorded, ids))
    before = ids[:at - 1].count(pictures.token)            # placeholders before the last one in common
    n = next(n for n, total in enumerate(accumulate(count for _, count in counts)) if total > before)
    return counts[n][0], (f"; picture {n} has {record} placeholder tokens in the record, {rendering} with this checkpoint's processor: "
                          "another picture, or other settings in preprocessor_config.json")


def _locate(tokenizer, call, text, char):
    """(message index or None, role | 'tools' | 'end') of a character of the rendered prompt.

    A part of the context owns the characters that change when it alone is changed. (Rendering shortened conversations
    would not do: templates treat the last turn in another way.)
    """
    def span(messages, tools):
        other = _try_text(tokenizer, messages, tools, call.chat_template_kwargs)
        if other is None or other == text:
            return None
        start = _common(text, other)
        return start, len(text) - min(_common(text[::-1], other[::-1]), len(text) - start)

    tools = span(call.messages, None) if call.tools else None
    if tools and tools[0] <= char <= tools[1]:
        return None, "tools"
    ends = []
    for n, m in enumerate(call.messages):
        other = {"role": m.get("role"), "content": "\x00"} | {k: "\x00" for k in ("reasoning", "reasoning_content") if m.get(k)}
        found = span([*call.messages[:n], other, *call.messages[n + 1:]], call.tools)
        if found and char <= found[1]:                     # its text, or what the template writes before it
            ends.append((not found[0] <= char, found[1], n))
    if not ends:
        return None, "end"                                 # the generation prompt
    n = min(ends)[2]
    return n, str(call.messages[n].get("role"))


def _try_text(tokenizer, messages, tools, kwargs):
    """render_text, or None where a template refuses changed messages."""
    try:
        return render_text(tokenizer, messages, tools, kwargs)
    except RENDER_ERRORS:
        return None


# ---------------------------------------------------------------------------------------------- the command

def gate_calls(tokenizer, calls, pictures=None):
    """Iterable of (Call, ImageStore or None) -> (report, {call_id: Mismatch}). Incomplete calls are counted by reason
    and not compared. pictures: as render_prompt."""
    counts, incomplete, causes, gated = Counter(), Counter(), Counter(), {}
    for call, images in calls:
        counts["calls"] += 1
        problem = call_problem(call)
        if problem:
            counts["incomplete"] += 1
            incomplete[problem.split(":")[0]] += 1
            continue
        counts["compared"] += 1
        mismatch = check(tokenizer, call, images, pictures)
        if mismatch:
            counts["mismatched"] += 1
            causes[mismatch.cause] += 1
            gated[call.call_id] = mismatch
    share = counts["mismatched"] / counts["compared"] if counts["compared"] else None
    report = {"calls": counts["calls"], "incomplete": counts["incomplete"], "compared": counts["compared"],
              "mismatched": counts["mismatched"], "mismatch_share": share, "causes": dict(causes.most_common()),
              "incomplete_reasons": dict(incomplete.most_common()), "gated": sorted(gated),
              "explanations": [{"call_id": k, **asdict(m)} for k, m in list(gated.items())[:5]]}
    return report, gated


def parse_args():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    p.add_argument("--calls", required=True, help="folder with calls.jsonl and images/, sharded or not")
    p.add_argument("--model", required=True, help="checkpoint whose tokenizer, chat template and picture processor render the prompts")
    p.add_argument("--max-mismatch", type=float, default=0.01,
                   help="share of compared calls (0 to 1) above which the exit code is 3")
    p.add_argument("--output", help="report file; not given: CALLS/gate-report.json")
    args = p.parse_args()
    if not 0 <= args.max_mismatch <= 1:
        p.error(f"--max-mismatch {args.max_mismatch}: expected a share between 0 and 1")
    return args


def main():
    args = parse_args()
    folder = Path(args.calls)
    output = Path(args.output or folder / "gate-report.json")
    tokenizer = load_tokenizer(args.model)
    report, _ = gate_calls(tokenizer, ((call, ImageStore(part / "images")) for part in folders(folder)
                                       for call in read_calls(part / "calls.jsonl")), load_pictures(args.model))
    if not report["compared"]:
        raise BadInput(f"{folder}: none of {report['calls']} calls is complete "
                       f"{report['incomplete_reasons']}; a scripted teacher records no token ids, gate the calls of a "
                       "model")
    write_json(output, {"arguments": vars(args), **report})
    print(f"gate: {report['calls']} calls | {report['incomplete']} incomplete {report['incomplete_reasons'] or ''} | "
          f"{report['compared']} compared | {report['mismatched']} mismatched ({report['mismatch_share']:.2%})")
    for cause, n in report["causes"].items():
        print(f"  {cause:<12} {n}")
    for e in report["explanations"]:
        print(f"  {e['call_id']}: {e['text']}")
    print(f"gate: report -> {output}")
    return 3 if report["mismatch_share"] > args.max_mismatch else 0


if __name__ == "__main__":
    run_main(main)
