"""Stage 1a: what the student would have seen, and what it should respond (SPEC.md §2, "Stage 1, SFT").

The teacher reads memory; the student has none. For every call of a successful teacher episode this rebuilds the
student's context (memory tools, memory calls, their results and [memory] sections of prompts removed), looks
for evidence that the response leans on what was removed (evidence.py: word, quote, number, argument), and makes
the response a target, rewrites it first, or keeps it as history only. Outcomes: kept, rewritten, history_only and
dropped (by reason); they add up to the number of calls read.

Reads   TEACHER/{calls,episodes}.jsonl, TEACHER/images/ (or those of its shards), tokenizer, chat template and picture
        processor of the student checkpoint; a rewriter's and a judge's answers, where models are asked (--rewriter URL, --judge URL)
Writes  OUTPUT/sft.jsonl            messages, tools, message, prompt_token_ids, token_ids (with end token), source, …
        OUTPUT/images/              the pictures of those prompts (rows name them: "pictures", sha256 in order)
        OUTPUT/answers.jsonl        paid answers of models: a killed command does not pay twice
        OUTPUT/rewrite-report.json  counts per evidence and outcome, per-episode numbers, an example per evidence, cost
        OUTPUT/manifest.json        last. Repeating the command does the same work again (deterministic; models are
                                    asked at temperature 0, and answers already paid for are read from their file)

Departures and choices (ours)
 1. A quote or number that also stands in the student's own context (prompt, tool results, tool specifications,
    its earlier responses) is no evidence. Numbers which an earlier history-only response leaked do not count as the
    student's own.
 2. --rewriter rules drops dependent clauses and sentences and writes nothing new. The paper's rewriter and judge are
    models (--rewriter URL, --judge URL); the rules guard them: same detectors, tool calls byte for byte. After
    --rewrite-attempts refusals (the sources give no number), or where the server refuses the request (400: too long,
    a content filter), the response is history only. A model is asked for possible targets alone: not for calls after
    success, nor where an argument leans on memory.
 3. --mode mask leaves flagged responses out as targets. History is the same in both modes (earlier responses as the
    student would have given them; with models, give both arms one --answers file and only the first pays), so mask's
    rows are a subset of rewrite's and the two arms differ in coverage alone. In a refused response, whatever the
    rules could drop is dropped; if nothing is left, it leaves the history.
 4. Calls after success are dropped, but --after-success finish keeps the one that ends the episode: a student
    that never sees `finish` does not learn to stop.
 5. What the harness changed between calls (shortened results, dropped reasoning) stays as recorded in each call.

    python rewrite.py --teacher run/teacher --student run/base --output run/rewrite
    python rewrite.py … --rewriter http://127.0.0.1:8000/v1 --judge http://127.0.0.1:8000/v1
    torchrun …    not needed: one process does about 1,000 calls/s; torchrun sft.py splits the rows
"""

import argparse
import contextlib
import functools
import json
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jinja2.exceptions import TemplateError
from tqdm import tqdm

import adapters
import endpoint
import gate
import protocol
import template_kwargs
from evidence import (Dependence, arguments_survive, arguments_text, numbers_in, reasoning_keys, rewrite_by_models,
                      rewrite_by_rules, strip_sections, text_of, texts_of)
from pictures import load_pictures
from records import (BadInput, Formatter, ImageStore, JsonlWriter, at_least, folders, lock_folder, read_calls, read_episodes, run_main,
                     save_args, write_json, write_manifest, writing)

MEMORY_PREFIX = "memory_"                                  # tools whose name starts so are the teacher's alone
NORMAL_ENDS = ("finish", "text")


# By rules alone, which cost nothing: responses that cannot become targets stand in the history of those that can.
rewrite_alone = functools.partial(rewrite_by_models, ask_rewriter=None, ask_judge=None, attempts=1)


def is_memory(tool_call):
    return tool_call["function"]["name"].startswith(MEMORY_PREFIX)


# ---------------------------------------------------------------------------------------------- the student's context

class History:
    """One teacher episode, call by call: the student's context of each call, the student's version of each response.

    For every delivered call in order: context(call), then respond(call.message, …). rewriter: f(message, Dependence,
    context, tools) -> (student's version, verdict of each attempt), as evidence.rewrite_by_models gives.
    """

    def __init__(self, rewriter):
        self.rewriter, self.attempts = rewriter, Counter() # verdict -> attempts of a model to rewrite
        self.responses = []                                  # (teacher's message, student's version or None), in order
        self.removed, self.results = {}, {}                # removed texts so far (dicts as ordered sets)
        self.leaked = set()                                # numbers that history-only responses took from memory
        self.unmatched = 0                                 # history messages that no recorded response explains

    def context(self, call):
        """(student's messages, student's tools, Dependence) of a call; remembers what was removed."""
        messages, edited, pointer, memory_ids = [], [], 0, set()
        for m in call.messages:
            if m["role"] == "tool":
                if m.get("tool_call_id") in memory_ids or str(m.get("name", "")).startswith(MEMORY_PREFIX):
                    self._remove(text_of(m.get("content")), result=True)
                    m = None
            elif m["role"] == "assistant":
                for c in m.get("tool_calls") or []:        # ids may repeat from turn to turn: the latest use counts
                    (memory_ids.add if is_memory(c) else memory_ids.discard)(c.get("id"))
                m, pointer, changed = self._past_response(m, pointer)
                edited += [len(messages)] if changed and m else []
            else:
                m = self._prompt(m, call.call_id)
            if m is not None:
                messages.append(m)
        tools = [t for t in call.tools if not is_memory(t)]
        outside = [text_of(m.get("content")) for m in messages if m["role"] != "assistant"]
        own = [t for i, m in enumerate(messages) if m["role"] == "assistant" and i not in edited for t in texts_of(m)]
        dependence = Dependence(self.removed, self.results, [*outside, json.dumps(tools, ensure_ascii=False)], own,
                                self.leaked)
        for i in edited:                                   # the harness changed the text: clean it as it stands
            messages[i] = rewrite_by_rules(messages[i], dependence)
        return messages, tools, dependence

    def respond(self, message, dependence, context, tools, target=True):
        """(student's version or None, evidence, judge's verdict or None, number of memory calls taken out).

        The version stands in the history of later calls, whether it becomes a target or not. target: it may become one.
        """
        calls = message.get("tool_calls") or []
        kept = [c for c in calls if not is_memory(c)]
        for c in calls:
            if is_memory(c):
                self._remove(arguments_text(c))
        own = {k: v for k, v in message.items() if k != "tool_calls"}
        own.update(role="assistant", content=text_of(message.get("content")))
        if calls and not kept:
            for text in texts_of(own):
                self._remove(text)
            self.responses.append((message, None))
            return None, [], None, len(calls)
        if kept:
            own["tool_calls"] = kept
        evidence, verdict, student = dependence.evidence(own), None, own
        if evidence:
            argument = any(e["kind"] == "argument" for e in evidence)
            possible = target and not argument and all(arguments_survive(c["function"].get("arguments")) for c in kept)
            student, verdicts = (self.rewriter if possible else rewrite_alone)(own, dependence, context, tools)
            verdict = "argument" if argument else verdicts[-1]
            self.attempts.update((v or "accepted" for v in verdicts) if possible else ())
            if verdict:
                self.leaked.update(*(numbers_in(e["found"]) for e in evidence if e["kind"] in ("number", "argument")))
                student = {**student, "tool_calls": kept} if kept else student
        nothing = not kept and not student["content"].strip()
        self.responses.append((message, None if nothing else student))
        return student, evidence, verdict, len(calls) - len(kept)

    def _remove(self, text, result=False):
        self.removed[text] = None
        if result:
            self.results[text] = None

    def _prompt(self, m, call_id):
        """A system or user message without memory sections; None if it was nothing else."""
        whole, content, removed = m.get("content"), [], []
        for part in whole if isinstance(whole, list) else [{"type": "text", "text": whole or ""}]:
            if isinstance(part.get("text"), str):
                text, cut = strip_sections(part["text"], call_id)
                removed += cut
                part = {**part, "text": text} if text or not cut else None
            content += [part] if part else []
        for text in removed:
            self._remove(text, result=True)
        if not removed:
            return m
        return {**m, "content": content if isinstance(whole, list) else content[0]["text"]} if content else None

    def _past_response(self, m, pointer):
        """(student's version or None, next pointer, was the text changed). Responses before `pointer` are used up."""
        calls = m.get("tool_calls") or []
        teacher, student = {}, {}
        for j in range(pointer, len(self.responses)):
            if _same_response(self.responses[j][0], m):
                (teacher, student), pointer = self.responses[j], j + 1
                break
        else:
            self.unmatched += 1
        kept = [c for c in calls if not is_memory(c)]
        if student is None or (calls and not kept):
            return None, pointer, False
        new = {k: v for k, v in m.items() if k != "tool_calls"}
        if kept:
            new["tool_calls"] = kept
        changed = False
        for key in ["content", *reasoning_keys(m)]:        # reasoning that the harness dropped stays dropped
            if _field(teacher, key) == text_of(m.get(key)):
                new[key] = _field(student, key)
            else:
                new[key], changed = text_of(m.get(key)), True
        return new, pointer, changed


def _field(message, key):
    """Content or reasoning of a response, under whichever name it has."""
    names = ["content"] if key == "content" else reasoning_keys(message)[:1]
    return text_of(message.get(names[0])) if names else ""


def _same_response(teacher, m):
    """Whether history message m is the recorded response `teacher`: by tool-call ids and names, else by its text."""
    a, b = ([(c.get("id"), c["function"]["name"]) for c in x.get("tool_calls") or []] for x in (teacher, m))
    return a == b and (bool(a) or text_of(teacher.get("content")) == text_of(m.get("content")))


# ---------------------------------------------------------------------------------------------- episodes to rows

class Report:
    """Counts and examples. Every call read ends in exactly one outcome."""

    def __init__(self):
        self.outcomes, self.evidence, self.numbers = Counter(), Counter(), Counter()
        self.targets = Counter()                           # number of targets of an episode -> episodes
        self.attempts = Counter()                          # verdict -> attempts of rewriters
        self.examples, self.errors = {}, []

    def flagged(self, evidence, before, after, outcome, call):
        self.numbers["flagged"] += 1
        for kind in sorted({e["kind"] for e in evidence}):
            self.evidence[kind] += 1
            shown = [{k: m[k] for k in ("content", "reasoning", "reasoning_content", "tool_calls") if k in m}
                     for m in (before, after)]
            self.examples.setdefault(kind, {"call_id": call.call_id, "outcome": outcome, "evidence": evidence,
                                            "before": shown[0], "after": shown[1]})

    def as_dict(self):
        used = sum(self.targets.values())
        total = sum(k * n for k, n in self.targets.items())
        return {"calls": sum(self.outcomes.values()), "targets": total,
                "outcomes": dict(sorted(self.outcomes.items())),
                "evidence": {k: self.evidence[k] for k in ("word", "quote", "number", "argument")},
                "numbers": dict(sorted(self.numbers.items())), "attempts": dict(sorted(self.attempts.items())),
                "episodes": {"used": used, "without_target": self.targets[0],
                             "targets_mean": round(total / used, 3) if used else None,
                             "targets_histogram": {str(k): self.targets[k] for k in sorted(self.targets)}},
                "examples": self.examples, "errors": self.errors[:5]}


def is_end(message, episode):
    """The call that ends an episode: `finish`, or the last words where an episode ends by text."""
    names = [c["function"]["name"] for c in message.get("tool_calls") or []]
    return "finish" in names or (not names and episode.end == "text")


def replay(episode, calls, rewriter, args):
    """Recorded calls of one usable episode -> (its History, [(call, why it is dropped or None, version)]).

    version: (student's messages, tools, *History.respond). An episode's calls follow one another here: what the student
    would have answered is context of the next call. No tokenizer: it is not for several threads at once.
    """
    history, turns = History(rewriter), []
    for call in sorted(calls, key=lambda c: c.turn):
        if not call.delivered or call.error or call.message is None or call.finish_reason == "length":
            turns.append((call, "cut" if call.finish_reason == "length" else "not_delivered", None))     # cut: has no end token
            continue
        messages, tools, dependence = history.context(call)
        late = adapters.after_success(episode, call) and not (args.after_success == "finish" and is_end(call.message, episode))
        version = history.respond(call.message, dependence, messages, tools, target=not late)
        turns.append((call, "after_success" if late else "memory_only" if version[0] is None else None, (messages, tools, *version)))
    return history, turns


def episode_rows(episode, replayed, tokenizer, args, report, images=None, pictures=None):
    """What `replay` made of one usable episode -> rows of sft.jsonl. Every call is counted in `report`.

    images, pictures: the teacher's ImageStore and the student's Pictures, or None for a text-only student.
    """
    history, turns = replayed
    rows, previous = [], None
    for call, dropped, version in turns:
        if dropped:
            report.outcomes[f"dropped: {dropped}"] += 1
            continue
        messages, tools, student, evidence, verdict, memory_calls = version
        report.numbers["mixed"] += bool(memory_calls)
        if not all(arguments_survive(c["function"].get("arguments")) for c in student.get("tool_calls") or []):
            verdict = verdict or "arguments_not_preserved"
        if not student["content"].strip() and not student.get("tool_calls"):
            verdict = verdict or "emptied"                 # the teacher itself said nothing
        if evidence and args.mode == "mask":
            verdict = verdict or "masked"
        source = "rewritten" if evidence else "kept"
        outcome = f"history_only: {verdict}" if verdict else source
        if evidence:
            report.flagged(evidence, call.message, student, outcome, call)
        if not verdict:
            kwargs = call.chat_template_kwargs if args.chat_template_kwargs is None else args.chat_template_kwargs
            try:
                prompt, target = gate.render_target(tokenizer, messages, tools, student, kwargs, images, pictures)
                whole = gate.render_prompt(tokenizer, [*messages, student], tools, kwargs, images, pictures)
            except (TemplateError, ValueError) as e:
                outcome = "dropped: picture" if isinstance(e, gate.PictureError) else "dropped: template"
                report.errors.append(f"{call.call_id}: {e}")
            else:
                ids = prompt + target
                if len(ids) > args.max_tokens:
                    outcome = "dropped: too_long"
        report.outcomes[outcome] += 1
        if outcome != source:
            continue
        # As history the response should be prompt + target again; a merge across their border would make other tokens.
        report.numbers["retokenised"] += whole[:len(ids)] != ids
        if previous is not None:
            report.numbers["extends_previous" if prompt[:len(previous)] == previous else "new_prefix"] += 1
        previous = ids
        rows.append({"episode_id": episode.episode_id, "call_id": call.call_id, "turn": call.turn,
                     "task": episode.task, "source": source, "evidence": evidence, "messages": messages,
                     "tools": tools, "message": student, "chat_template_kwargs": kwargs, "prompt_token_ids": prompt,
                     "token_ids": target, "pictures": gate.picture_hashes(messages)})
    report.targets[len(rows)] += 1
    report.numbers["history_unmatched"] += history.unmatched
    report.attempts.update(history.attempts)
    return rows


def unusable(episode):
    """None if the episode's calls may become targets, else why not."""
    if not episode.valid or episode.reward != 1:
        return "episode_failed" if episode.valid else "episode_invalid"
    return None if episode.end in NORMAL_ENDS else "episode_abnormal_end"


def usable_episodes(teacher, args, report):
    """Yields (path, episode, its calls) of every usable episode, in the order in which they are complete in calls.jsonl.

    teacher: a run folder, sharded or not. Calls are held only until their episode is complete, so memory does not grow
    with the files. What is not used is counted in `report`.
    """
    parts = folders(teacher)
    episodes, reasons, usable = {}, {}, 0
    for path, e in ((f / "episodes.jsonl", e) for f in parts for e in read_episodes(f / "episodes.jsonl")):
        if e.episode_id in episodes:
            raise BadInput(f"{path}: episode {e.episode_id} stands there twice; delete one of the two lines")
        protocol.refuse_held_out(e, path)
        reason = unusable(e)
        usable += reason is None
        if reason is None and args.limit_episodes and usable > args.limit_episodes:
            reason = "episode_limit"
        episodes[e.episode_id], reasons[e.episode_id] = e, reason
    report.numbers["episodes"] = len(episodes)
    pending, done = {}, set()
    for path, call in ((f / "calls.jsonl", c) for f in parts for c in read_calls(f / "calls.jsonl")):
        episode = episodes.get(call.episode_id)
        reason = "no_episode" if episode is None else reasons[call.episode_id]
        if reason is None and call.call_id not in episode.calls:
            reason = "not_in_episode"                      # e.g. of an interrupted attempt that was done again
        if reason:
            report.outcomes[f"dropped: {reason}"] += 1
            continue
        held = pending.setdefault(call.episode_id, {})
        if call.call_id in held or call.episode_id in done:
            raise BadInput(f"{path}: call {call.call_id} stands there twice; delete one of the two lines")
        held[call.call_id] = call
        if len(held) < len(episode.calls):
            continue
        del pending[call.episode_id]
        done.add(call.episode_id)
        yield path, episode, list(held.values())
    for held in pending.values():                          # the episode lists calls that the file does not hold
        report.outcomes["dropped: episode_incomplete"] += len(held)


def all_rows(teacher, tokenizer, args, report, rewriter, ahead, pictures, kept):
    """Yields the rows of every usable episode, in the order of `usable_episodes`, however long each one's models take.

    ahead: episodes that are replayed at a time, each in a thread of its own. pictures: as episode_rows; kept: ImageStore
    that gets the pictures of the rows. BadInput before a model is asked if calls hold pictures and `pictures` is None.
    """
    waiting, copied = deque(), set()

    def start(episode, calls):
        shown = sum(bool(gate.picture_hashes(c.messages)) for c in calls) if pictures is None else 0
        if shown:
            raise BadInput(f"{args.student} has no vision tower, but {shown} calls of episode {episode.episode_id} hold pictures; "
                           "give a vision-language checkpoint as --student, or collect without --pictures")
        return replay(episode, calls, rewriter, args)

    def rows():
        path, episode, future = waiting.popleft()
        images = ImageStore(path.parent / "images")
        try:
            made = episode_rows(episode, future.result(), tokenizer, args, report, images, pictures)
        except (KeyError, TypeError, AttributeError) as e:
            raise BadInput(f"{path}: episode {episode.episode_id}: a message or tool is not in OpenAI's chat "
                           f"format ({type(e).__name__}: {e})") from e
        for sha in {sha for row in made for sha in row["pictures"]} - copied:
            copied.add(kept.put(images.get(sha)))
        return made
    pool = ThreadPoolExecutor(ahead)
    try:
        for path, episode, calls in usable_episodes(teacher, args, report):
            waiting.append((path, episode, pool.submit(start, episode, calls)))
            if len(waiting) > 2 * ahead:
                yield from rows()
        while waiting:
            yield from rows()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


# ---------------------------------------------------------------------------------------------- the command

def parse_args():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    g = p.add_argument_group("files")
    g.add_argument("--teacher", required=True, help="folder of the teacher's run, sharded or not")
    g.add_argument("--student", required=True, help="checkpoint whose tokenizer, chat template and picture processor make the rows")
    g.add_argument("--output", required=True, help="folder to write")
    g = p.add_argument_group("method")
    g.add_argument("--mode", choices=["rewrite", "mask"], default="rewrite",
                   help="flagged responses: rewrite them, or leave them out")
    g.add_argument("--rewriter", default="rules", metavar="{rules,URL}",
                   help="who rewrites flagged responses: rules, or an OpenAI-compatible model (http://…/v1, comma-separated)")
    g.add_argument("--judge", default="rules", metavar="{rules,URL}",
                   help="who judges a rewrite that passed the rules: nobody else, or an OpenAI-compatible model")
    g.add_argument("--after-success", choices=["finish", "none"], default="finish",
                   help="calls after success: keep the one that ends the episode, or none")
    template_kwargs.add_argument(g, "of the student's contexts, as rollout.py and eval.py will send it; default: as recorded in each call")
    g = p.add_argument_group("models as rewriter and judge (key: OPENAI_API_KEY)")
    g.add_argument("--rewriter-model", default="", help="name of the model; default: the one that the server offers")
    g.add_argument("--judge-model", default="", help="name of the model; default: the one that the server offers")
    g.add_argument("--rewrite-attempts", type=at_least(1), default=3, help="attempts per response (count); then it is history only")
    g.add_argument("--answer-tokens", type=at_least(16), default=4096, help="tokens per answer, thinking included")
    g.add_argument("--concurrency", type=at_least(1), default=16, help="requests at a time (one per episode)")
    g.add_argument("--request-timeout", type=at_least(1.0, float), default=600, help="time-out of one try (s; five tries)")
    g.add_argument("--answers", default=None, help="file of paid answers; default: OUTPUT/answers.jsonl")
    g = p.add_argument_group("limits")
    g.add_argument("--max-tokens", type=int, default=32768,
                   help="longest prompt + target (tokens); longer rows are dropped")
    g.add_argument("--limit-episodes", type=int, default=0, help="use the first N successful episodes (0: all)")
    args = p.parse_args()
    if args.max_tokens < 2 or args.limit_episodes < 0:
        p.error("--max-tokens must be at least 2, --limit-episodes at least 0")
    for name in ("rewriter", "judge"):
        if getattr(args, name) != "rules" and not getattr(args, name).startswith(("http://", "https://")):
            p.error(f"--{name} {getattr(args, name)!r}: expected rules or a URL (http://…/v1)")
    return args


def print_report(report):
    print(f"rewrite: {report['calls']} calls -> {report['targets']} targets")
    for title in ("outcomes", "evidence", "numbers", "attempts"):
        print(f"  {title}" + (" (responses; one may have several)" if title == "evidence" else ""))
        for name, n in report[title].items():
            print(f"    {name:<40} {n:>8}")
    for kind, x in report["examples"].items():
        found = next(e["found"] for e in x["evidence"] if e["kind"] == kind)
        before, after = (" | ".join(filter(None, texts_of(x[side])))[:110] for side in ("before", "after"))
        print(f"  {kind} {found!r} -> {x['outcome']}\n    before: {before}\n    after:  {after}")


def main():
    args = parse_args()
    urls = {name: (getattr(args, name), getattr(args, f"{name}_model")) for name in ("rewriter", "judge") if getattr(args, name) != "rules"}
    path = args.answers or Path(args.output) / "answers.jsonl"
    with contextlib.ExitStack() as held:
        lock_folder(args.output, held)
        answers = held.enter_context(endpoint.Answers(path, urls, args.answer_tokens, args.request_timeout)) if urls else None
        with writing(args.output):
            make_rows(args, answers)


def make_rows(args, answers):
    """answers: where models are asked, else None."""
    started = time.time()
    teacher, output = Path(args.teacher), Path(args.output)
    tokenizer, pictures = gate.load_tokenizer(args.student), load_pictures(args.student)
    template_kwargs.check(args.chat_template_kwargs, args.student, tokenizer)
    save_args(output, "rewrite", args)
    (output / "manifest.json").unlink(missing_ok=True)     # a kill from here on must not leave an older "whole" behind
    part = output / "sft.jsonl.part"
    part.unlink(missing_ok=True)
    report = Report()
    ask = {name: functools.partial(answers.ask, name) for name in answers.endpoints} if answers else {}
    rewriter = functools.partial(rewrite_by_models, ask_rewriter=ask.get("rewriter"), ask_judge=ask.get("judge"),
                                 attempts=args.rewrite_attempts,
                                 special=[t.content for t in tokenizer.added_tokens_decoder.values() if t.special])
    rows = all_rows(teacher, tokenizer, args, report, rewriter, args.concurrency if answers else 1, pictures,
                    ImageStore(output / "images"))
    with JsonlWriter(part) as writer:
        for row in tqdm(rows, desc="rewrite", unit="row", disable=not answers, mininterval=20):
            writer.append(row)
    result = report.as_dict()
    if answers:
        result["cost"] = answers.cost()
    if not result["targets"]:
        raise BadInput(f"{teacher}: no target in {result['calls']} calls {result['outcomes']}; "
                       + (f"first error: {report.errors[0]}" if report.errors else "collect more successful episodes"))
    part.rename(output / "sft.jsonl")
    write_json(output / "rewrite-report.json", {"arguments": vars(args), **result})
    print_report(result)
    print(f"rewrite: {time.time() - started:.1f} s -> {output / 'sft.jsonl'}")
    counts = {"targets": result["targets"], **result["outcomes"], **({"cost": result["cost"]} if answers else {})}
    write_manifest(output, "rewrite", args, counts, ["sft.jsonl", "rewrite-report.json"])


if __name__ == "__main__":
    run_main(main)
