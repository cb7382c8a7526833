"""Does a response lean on removed text? Detectors, rewriter and judge of rewrite.py: pure functions of text.

    word      a memory-related word (MEMORY_WORDS) in reasoning or text
    quote     eight consecutive words of the removed text in reasoning or text; case and punctuation do not matter
    number    a number in reasoning or text that stands only in removed results; compared by value, sign respected
    argument  such a number or quote in tool-call arguments: they stay byte for byte, so it cannot be rewritten away

Rewriter and judge are rules, or models that rewrite.py hands in as functions ask(chat messages) -> answer. The rules guard either way:
what a model wrote passes the same detectors, and tool calls have to come back byte for byte.

Source: SPEC.md §2, "Stage 1". Choices (ours): a quote or number that also stands in the student's own context
is no evidence. Numbers in words ("twenty") or in other units (0.412 m for 412 mm) are not recognised. The sources print no prompts and no
number of attempts: both are ours. A model never sees the removed text, only the student's context, the response and what was found in it.
"""

import functools
import json
import re

from records import BadInput

MEMORY_WORDS = (                                           # whole words, upper and lower case alike
    r"memor(?:y|ies|i[sz](?:e|es|ed|ing))", r"remember(?:s|ed|ing)?", r"recall(?:s|ed|ing)?",
    r"note (?:says?|from|tells|shows)", r"notes", r"previously", r"last time", r"(?:from|past) experience",
    r"learn(?:ed|t) (?:before|earlier)",
    r"(?:past|earlier|previous|prior|other|last) (?:episode|attempt|run|trial|demonstration)s?",
)
QUOTE = 8                                                  # consecutive words

_SECTION = re.compile(r"(?:^|\n)[ \t]*\[memory\][ \t]*\n(.*?)[ \t]*\[/memory\][ \t]*(?=\n|$)", re.S)
_MARK = re.compile(r"^[ \t]*\[/?memory\][ \t]*$", re.M)
_MEMORY_WORD = re.compile(rf"\b(?:{'|'.join(MEMORY_WORDS)})\b", re.I)
# A sign belongs to the number unless a digit or letter precedes it: "10-20" is 10 and 20. "20mm" is one, "mug_1" is none.
_NUMBER = re.compile(r"(?<![\w.])[-+−]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
_WORD = re.compile(r"[^\W_]+")
_LINK = r"because|since|so|but|and|as|which|while|then|where|hence"
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\s*\n\s*")
_CLAUSE_END = re.compile(rf"(?<=[,;:])\s+|\s+[—–-]\s+|\s+(?=(?:{_LINK})\b)")
_CONCLUSION = re.compile(r"(?:so|then|therefore)\b", re.I)
_LEADING = re.compile(rf"^(?:[\s,;:—–-]+|(?:{_LINK}|therefore)\b)+", re.I)


def text_of(content):
    """Content of a message (string, parts or None) -> its text; pictures have none."""
    if isinstance(content, list):
        return "\n".join(p.get("text") or "" for p in content if isinstance(p, dict))
    return content or ""


def strip_sections(text, call_id):
    """Prompt text -> (text without its [memory] … [/memory] sections, [removed sections])."""
    if not _MARK.search(text):
        return text, []
    removed = [m.group(1).strip("\n") for m in _SECTION.finditer(text)]
    rest = _SECTION.sub("", text)
    if text.lstrip(" \t").startswith("[memory]"):
        rest = rest.removeprefix("\n")                     # a section at the very start takes its line end along
    if _MARK.search(rest):
        raise BadInput(f"calls.jsonl: call {call_id}: a [memory] section without its end; each mark needs its own line")
    return rest, removed


def arguments_text(tool_call):
    """The arguments of a tool call as text, byte for byte if they were recorded as a string."""
    arguments = tool_call["function"].get("arguments")
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)


def reasoning_keys(message):
    """The names under which a message carries its reasoning."""
    return [k for k in ("reasoning_content", "reasoning") if isinstance(message.get(k), str)]


def texts_of(message):
    """Content, reasoning and arguments of a message: list of str."""
    return [text_of(message.get("content")), *(message[k] for k in reasoning_keys(message)),
            *map(arguments_text, message.get("tool_calls") or [])]


def _value(number):
    return float(number.replace("−", "-"))


@functools.lru_cache(maxsize=1 << 15)
def numbers_in(text):
    """frozenset of the values of all numbers in a text: 0.020 and .02 are one, 20 and -20 are two."""
    return frozenset(_value(m.group()) for m in _NUMBER.finditer(text))


@functools.lru_cache(maxsize=1 << 13)
def quotes_in(text):
    """frozenset of all runs of QUOTE words, lower case, punctuation left out."""
    words = [m.group().lower() for m in _WORD.finditer(text)]
    return frozenset(tuple(words[i:i + QUOTE]) for i in range(len(words) - QUOTE + 1))


class Dependence:
    """What one response could lean on: the removed texts, less what the student's own context offers.

    removed   all removed texts (for quotes)
    results   removed results and prompt sections (for numbers; what the teacher itself wrote to memory is no source)
    context   texts of the student's context, its own responses apart
    own       texts of its own earlier responses; `leaked` numbers in them came from memory and are no excuse
    """

    def __init__(self, removed, results, context, own=(), leaked=frozenset()):
        self.removed_quotes = [quotes_in(t) for t in removed]
        self.result_numbers = frozenset().union(*map(numbers_in, results))
        self.context, self.own, self.leaked = list(context), list(own), leaked

    def only_removed(self, number):
        """True if the value stands in a removed result and nowhere in the student's context."""
        if number not in self.result_numbers or any(number in numbers_in(t) for t in self.context):
            return False
        return number in self.leaked or not any(number in numbers_in(t) for t in self.own)

    def words(self, text):
        return [("word", m.group(), *m.span()) for m in _MEMORY_WORD.finditer(text)]

    def quotes(self, text):
        words = [(m.group().lower(), *m.span()) for m in _WORD.finditer(text)] if self.removed_quotes else []
        found = []
        for i in range(len(words) - QUOTE + 1):
            run = tuple(w for w, _, _ in words[i:i + QUOTE])
            if not any(run in q for q in self.removed_quotes):
                continue
            if any(run in quotes_in(t) for t in self.context + self.own):
                continue
            start, end = words[i][1], words[i + QUOTE - 1][2]
            if found and start <= found[-1][3]:            # overlapping runs are one quote
                start = found.pop()[2]
            found.append(("quote", text[start:end], start, end))
        return found

    def numbers(self, text):
        return [("number", m.group(), *m.span()) for m in _NUMBER.finditer(text)
                if self.only_removed(_value(m.group()))]

    def find(self, text):
        """[(kind, what was found, start, end)] in reasoning or text; empty: it does not lean on memory."""
        return self.words(text) + self.quotes(text) + self.numbers(text)

    def evidence(self, message):
        """Everything found in one response: [{"kind", "where": text | reasoning | arguments, "found"}]."""
        fields = [("text", text_of(message.get("content"))),
                  *(("reasoning", message[k]) for k in reasoning_keys(message)[:1])]
        rows = [{"kind": kind, "where": where, "found": found}
                for where, text in fields for kind, found, _, _ in self.find(text)]
        return rows + [{"kind": "argument", "where": "arguments", "found": found}
                       for text in map(arguments_text, message.get("tool_calls") or [])
                       for _, found, _, _ in self.numbers(text) + self.quotes(text)]


# ---------------------------------------------------------------------------------------------- rewriter

def _edit_pieces(text, border, edit):
    """Cuts a text at `border` and joins the pieces again by their own separators, each replaced by edit(start, end).

    A piece that becomes '' is dropped together with the separator before it.
    """
    cuts = [m.span() for m in border.finditer(text)]
    out = ""
    for (before, start), (end, _) in zip([(0, 0), *cuts], [*cuts, (len(text), 0)], strict=True):
        piece = edit(start, end)
        if piece:
            out += (text[before:start] if out else "") + piece
    return out


def _without_clauses(sentence, spans):
    """A sentence less its dependent clauses; '' if fewer than three words are left.

    A clause depends if it touches a span, and so do the clauses after it ("From memory, the rim holds"): what memory
    said follows where memory is named. A conclusion ("…, so I pick up the mug") stands again for itself.
    """
    dependent = False

    def edit(start, end):
        nonlocal dependent
        clause = sentence[start:end]
        touched = any(a < end and start < b for a, b in spans)
        dependent = touched or (dependent and not _CONCLUSION.match(clause))
        return "" if dependent else clause
    text = _LEADING.sub("", _edit_pieces(sentence, _CLAUSE_END, edit)).rstrip(" ,;:—–-")
    if len(_WORD.findall(text)) < 3:
        return ""
    if sentence[:1].isupper():
        text = text[:1].upper() + text[1:]
    end = sentence.rstrip()[-1:]
    return text + end if end in ".!?" and text[-1] not in ".!?" else text


def rewrite_text(text, dependence):
    """Drops dependent clauses, and sentences of which nothing is left; writes nothing new.

    Joining what is left can make a new run of QUOTE words: up to three passes. The judge says whether it is clean.
    """
    for _ in range(3):
        spans = [(start, end) for _, _, start, end in dependence.find(text)]
        if not spans:
            break

        def edit(s, e):
            hit = [(a - s, b - s) for a, b in spans if a < e and s < b]
            return _without_clauses(text[s:e], hit) if hit else text[s:e]
        text = _edit_pieces(text, _SENTENCE_END, edit).strip()
    return text


def rewrite_by_rules(message, dependence):
    """A response -> the same response with dependent reasoning and text dropped; tool calls are passed on untouched."""
    new = {**message, "content": rewrite_text(text_of(message.get("content")), dependence)}
    return {**new, **{key: rewrite_text(message[key], dependence) for key in reasoning_keys(message)}}


# ---------------------------------------------------------------------------------------------- judge

def judge(original, candidate, dependence):
    """None if the candidate may stand in for the original, else tool_calls_changed, emptied or still_dependent."""
    if (candidate.get("tool_calls") or []) != (original.get("tool_calls") or []):   # ids, names, argument strings
        return "tool_calls_changed"
    if not text_of(candidate.get("content")).strip() and not candidate.get("tool_calls"):
        return "emptied"
    if any(e["where"] != "arguments" for e in dependence.evidence(candidate)):
        return "still_dependent"
    return None


def arguments_survive(arguments):
    """True if a template that parses the arguments and prints them again changes nothing but blanks and escapes.

    Not so for invalid JSON (nested a thousand deep and half surrogate pairs, too), non-objects, doubled keys, and numbers that print
    otherwise (0.020, 1e3).
    """
    if not isinstance(arguments, str) or not arguments.strip():
        return True
    as_written = functools.partial(json.loads, parse_float=lambda s: "float " + s, parse_int=lambda s: "int " + s,
                                   object_pairs_hook=list)
    try:
        value = json.loads(arguments)
        printed = json.dumps(value, ensure_ascii=False)
        printed.encode()                                   # half of a surrogate pair: no tokenizer takes it
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and as_written(arguments) == as_written(printed)


# ---------------------------------------------------------------------------------------------- models as rewriter and judge

REWRITE_PROMPT = """\
You edit training data for a robot planner. A teacher that can read a memory gave a response. A student without memory will learn from it.
Rewrite the teacher's reasoning and text so that they follow from what the student can see, and from nothing else.

- Keep the decision, the language, the style and about the length. The tool calls stay as they are.
- Do not mention memory, notes, earlier episodes or anything remembered.
- Use no number and no phrase that stands neither in the student's context nor in the tool calls.
- Give a reason only if the student can check it in its context; otherwise state the step alone. Add no facts.

Answer with one JSON object that has exactly the keys of the teacher's response, and nothing else."""

JUDGE_PROMPT = """\
You check training data for a robot planner. A teacher that can read a memory gave a response; it was rewritten for a student without one.
Accept the rewritten response only if all of this holds:

- Only reasoning and text were changed; the tool calls are the same.
- Reasoning and text follow from the student's context and mention or use nothing remembered.
- They still explain the same step, and add no facts.

Answer with one JSON object, {"accept": true or false, "reason": "one sentence"}, and nothing else."""

# A rewrite that writes the chat template's own marks would become a second tool call, or end the turn, once rendered.
_MARKUP = re.compile(r"<\|[^|<>]*\|>|</?(?:think|tool_call|tool_response|tools)>")


def transcript(messages):
    """Chat messages as plain text, for a model that reads about them."""
    out = []
    for m in messages:
        out += [f"[{m['role']}]", *(f"(reasoning) {m[k]}" for k in reasoning_keys(m)[:1]), text_of(m.get("content"))]
        out += [f"(calls {c['function']['name']} with {arguments_text(c)})" for c in m.get("tool_calls") or []]
    return "\n".join(filter(None, out))


def fields_of(message):
    """What a rewriter may write anew: {"reasoning", "content"}, without the empty ones."""
    fields = {"reasoning": next((message[k] for k in reasoning_keys(message)), ""), "content": text_of(message.get("content"))}
    return {k: v for k, v in fields.items() if v.strip()}


def _case(message, messages, tools):
    calls = [f"{c['function']['name']} {arguments_text(c)}" for c in message.get("tool_calls") or []]
    return (f"Student's tools:\n{json.dumps(tools, ensure_ascii=False)}\n\nStudent's context:\n{transcript(messages)}\n\n"
            f"Tool calls of the response:\n{chr(10).join(calls) or 'none'}\n\n"
            f"Teacher's response:\n{json.dumps(fields_of(message), ensure_ascii=False)}\n\n")


def describe(evidence):
    return "; ".join(f"{e['kind']} {e['found']!r} in {e['where']}" for e in evidence)


def rewrite_request(message, dependence, messages, tools, refused=()):
    """Chat messages for the rewriter. refused: earlier answers and why not, so that a repeated request at temperature 0 is a new one."""
    text = _case(message, messages, tools) + f"Found in it, must go: {describe(dependence.evidence(message))}"
    chat = [{"role": "system", "content": REWRITE_PROMPT}, {"role": "user", "content": text}]
    for answer, why in refused:
        chat += [{"role": "assistant", "content": answer or "(no answer)"},
                 {"role": "user", "content": f"Refused: {why}. Write the JSON object again."}]
    return chat


def judge_request(message, candidate, messages, tools):
    text = _case(message, messages, tools) + f"Rewritten response:\n{json.dumps(fields_of(candidate), ensure_ascii=False)}"
    return [{"role": "system", "content": JUDGE_PROMPT}, {"role": "user", "content": text}]


def _json_object(answer):
    """The JSON object in an answer, whatever stands around it (a fence, thinking aloud); ValueError if there is none."""
    answer = answer.rpartition("</think>")[2]
    start, end = answer.find("{"), answer.rfind("}")
    if start < 0 or end < start:
        raise ValueError("the answer holds no JSON object")
    try:
        value = json.loads(answer[start:end + 1])
    except RecursionError:
        raise ValueError("the answer's JSON is nested too deeply") from None
    assert isinstance(value, dict), f"text from {{ to }} parsed as {type(value).__name__}"
    return value


def read_rewrite(answer, message, special=()):
    """A rewriter's answer -> the message with it; ValueError says what is wrong with the answer. special: of the student's tokenizer."""
    value, wanted = _json_object(answer), fields_of(message)
    tool_calls = value.pop("tool_calls", None)             # not asked for; if a model repeats them, the judge compares them
    if value.keys() != wanted.keys() or not all(isinstance(v, str) for v in value.values()):
        raise ValueError(f"expected text under the keys {sorted(wanted)}, found {sorted(value)}")
    for key, text in value.items():
        if len(text) > 3 * len(wanted[key]) + 300:
            raise ValueError(f"{key} has {len(text)} characters, the teacher's {len(wanted[key])}: keep about its length")
        text.encode()                                      # half of a surrogate pair: UnicodeEncodeError is a ValueError
    if mark := next((m for v in value.values() for m in [*_MARKUP.findall(v), *(t for t in special if t in v)]), None):
        raise ValueError(f"{mark} belongs to the chat template, not into a text")
    new = {**message, "content": value.get("content", text_of(message.get("content")))}
    new.update((k, value["reasoning"]) for k in reasoning_keys(message) if "reasoning" in value)
    return new if tool_calls is None else {**new, "tool_calls": tool_calls}


def read_verdict(answer):
    """A judge's answer -> (accepted, its reason)."""
    value = _json_object(answer)
    if not isinstance(value.get("accept"), bool):
        raise ValueError(f"expected accept: true or false, found {value.get('accept')!r}")
    return value["accept"], str(value.get("reason", ""))


def rewrite_by_models(message, dependence, messages, tools, ask_rewriter, ask_judge, attempts, special=()):
    """-> (student's version, [one verdict an attempt; None: accepted]); after `attempts` refusals the rules' version, for history only.

    ask_rewriter, ask_judge: f(chat messages) -> (answer, None) or (None, verdict: the model takes no such request); or None in place of
    the function: the rules alone rewrite (one attempt, for they would write the same again) or judge. special: see read_rewrite.
    """
    by_rules, verdicts, refused = rewrite_by_rules(message, dependence), [], []
    for _ in range(attempts if ask_rewriter else 1):
        candidate, answer, why = by_rules, "", ""
        if ask_rewriter:
            answer, unanswered = ask_rewriter(rewrite_request(message, dependence, messages, tools, refused))
            if unanswered:
                return by_rules, [*verdicts, unanswered]
            try:
                candidate = read_rewrite(answer, message, special)
            except ValueError as e:
                verdicts.append("rewrite_malformed")
                refused.append((answer, str(e)))
                continue
        verdict = judge(message, candidate, dependence)
        if verdict == "still_dependent":
            why = "not in the student's context: " + describe(e for e in dependence.evidence(candidate) if e["where"] != "arguments")
        elif verdict is None and ask_judge:
            told, unanswered = ask_judge(judge_request(message, candidate, messages, tools))
            if unanswered:
                return by_rules, [*verdicts, unanswered]
            try:
                accepted, why = read_verdict(told)
                verdict = None if accepted else "judge_refused"
            except ValueError:
                verdict, why = "judge_malformed", "the judge could not tell; write it more plainly"
        verdicts.append(verdict)
        if verdict is None:
            return candidate, verdicts
        refused.append((answer, why or verdict.replace("_", " ")))
    return by_rules, verdicts
