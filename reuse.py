"""Stage 1a without rewriting: the recorded replies of a teacher without memory become targets as they are (SPEC.md §2, CaP-X branch).

For every call of a successful episode that ended normally: context = the recorded messages and tools, rendered by the student's chat
template; target = the token ids that the teacher sampled, end token included. Where the record has no ids (a scripted teacher, an API),
the reply's text is tokenized once by the student's template, as rewrite.py does. Outcomes: reused, tokenized and dropped (by reason);
they add up to the number of calls read.

Reads   TEACHER/{calls,episodes}.jsonl, TEACHER/images/ (or those of its shards), tokenizer, chat template and picture
        processor of the student checkpoint
Writes  OUTPUT/sft.jsonl            rows as rewrite.py writes them (source: reused or tokenized; evidence: always empty)
        OUTPUT/images/              the pictures of those prompts (rows name them: "pictures", sha256 in order)
        OUTPUT/reuse-report.json    counts per outcome, targets per episode, tokens of prompts and targets, an example per source
        OUTPUT/manifest.json        last. Repeating the command does the same work again (deterministic)

Departures and choices (ours)
 1. Ids are reused only where they are the student's: each is in its vocabulary; its tokenizer reads in them what the message says, in
    order: reasoning, content, names of tools (marks around those and arguments are not compared); and the recorded prompt ended as the
    student's does: ids sampled behind an open <think> are no reply to a prompt with thinking off. The first call where this fails ends
    the command; with --other-vocabulary tokenize its text is tokenized. Ids that are the student's stay as sampled, also where its
    tokenizer would cut the same text into other tokens.
 2. No target: a reply that the token limit cut ("cut"), one whose last id is not the student's end token (a stop string, a second
    end token), one without content and tool calls.
 3. Calls after success are dropped, but --after-success finish keeps the last one of an episode that the planner itself ended (in the
    code harness the reply FINISH): a student that never sees it does not learn to stop.
 4. Nothing is judged beyond the episode's outcome: a program that raised, or a reply that ran nothing, is a target where the episode
    succeeded all the same. Calls of a teacher with memory are refused: rewrite.py is for those.

    python reuse.py --teacher run/teacher --student run/base --output run/reuse
    python sft.py --model run/base --data run/reuse/sft.jsonl --output run/sft
    torchrun …    not needed: one process does 300 calls/s of 600 tokens; torchrun sft.py splits the rows
"""

import argparse
import contextlib
import re
import time
from pathlib import Path

from jinja2.exceptions import TemplateError

import adapters
import gate
import template_kwargs
from evidence import arguments_survive, reasoning_keys, strip_sections, text_of
from pictures import load_pictures
from records import (
    BadInput, Formatter, ImageStore, JsonlWriter, lock_folder, run_main, save_args, write_json, write_manifest, writing)
from rewrite import MEMORY_PREFIX, Report, is_memory, usable_episodes

TAIL = 64                        # tokens at a prompt's end that an example shows, and that are compared at most


class NoTarget(ValueError):
    """NoTarget(outcome, text): why a reply is no target, one word for the counts and the explanation."""


# ---------------------------------------------------------------------------------------------- the recorded reply

def memory_in(call):
    """None, or the first trace of a teacher's memory in a call, in words."""
    if any(is_memory(t) for t in call.tools):
        return "memory tools"
    for m in [*call.messages, call.message or {}]:
        if any(is_memory(c) for c in m.get("tool_calls") or []) or str(m.get("name", "")).startswith(MEMORY_PREFIX):
            return "memory calls"
        if m.get("role") in ("system", "user", "developer") and strip_sections(text_of(m.get("content")), call.call_id)[1]:
            return "a [memory] section"
    return None


def not_the_students(tokenizer, call, kwargs):
    """None if the recorded ids of a call are a reply of the student's own tokenizer and template, else one phrase that says why not."""
    size, m = len(tokenizer), call.message
    if strange := [i for i in [*call.token_ids, *call.prompt_token_ids] if not isinstance(i, int) or not 0 <= i < size]:
        return f"id {strange[0]} is not in its vocabulary of {size}"
    said = [text_of(m.get(k)) for k in (*reasoning_keys(m)[:1], "content")] + [c["function"]["name"] for c in m.get("tool_calls") or []]
    texts = [t.replace("\ufffd", "").strip() for t in said]            # bytes that are no character: each server shows them in its own way
    shown = [tokenizer.decode(call.token_ids, skip) for skip in (True, False)]        # some servers show special tokens
    if not any(re.search(".*?".join(map(re.escape, texts)), text.replace("\ufffd", ""), re.DOTALL) for text in shown):
        return f"its tokenizer reads them as {shown[0][:60]!r}, the message says {' '.join(filter(None, texts))[:60]!r}"
    prompt, before = (gate.render_text(tokenizer, call.messages, call.tools, kwargs, generation_prompt=g) for g in (True, False))
    start = gate.encode(tokenizer, prompt.removeprefix(before))[-TAIL:]
    end = call.prompt_token_ids[-len(start):]
    if start and end and start != end:
        return f"they continue {tokenizer.decode(end)!r}, the student's prompt ends with {tokenizer.decode(start)!r}"
    return None


def target_of(tokenizer, call, message, kwargs, args, images=None, pictures=None):
    """-> (prompt ids, target ids, why the recorded ids were not reused or None). message: the reply as the row shows it.

    NoTarget, or what gate.render_target raises, if there is none; BadInput for ids that are not the student's (--other-vocabulary refuse).
    """
    if call.finish_reason == "length":
        raise NoTarget("cut", "the token limit cut the reply: it has no end token")
    if not message["content"].strip() and not message.get("tool_calls"):
        raise NoTarget("empty", "the reply has neither content nor tool calls")
    why = not_the_students(tokenizer, call, kwargs) if call.token_ids else "the record has no token ids"
    if why and call.token_ids and args.other_vocabulary == "refuse":
        raise BadInput(f"{args.teacher}: call {call.call_id}: its recorded token ids are none of {args.student}: {why}; give a --student "
                       "(or --chat-template-kwargs) that they are of, or --other-vocabulary tokenize (its text is tokenized once)")
    if why:
        if not all(arguments_survive(c["function"].get("arguments")) for c in message.get("tool_calls") or []):
            raise NoTarget("arguments_not_preserved", "the template would write the arguments of a tool call in another way")
        return *gate.render_target(tokenizer, call.messages, call.tools, message, kwargs, images, pictures), why
    prompt, target = gate.render_prompt(tokenizer, call.messages, call.tools, kwargs, images, pictures), call.token_ids
    if target[-1] != tokenizer.eos_token_id:
        raise NoTarget("no_end_token", f"the reply ends with {tokenizer.decode(target[-1:])!r}, not with {tokenizer.eos_token!r}")
    if pictures is not None and pictures.token in target:
        raise gate.PictureError("the reply spells a placeholder of pictures")
    return prompt, target, None


# ---------------------------------------------------------------------------------------------- episodes to rows

def episode_rows(episode, calls, tokenizer, args, report, images=None, pictures=None):
    """Recorded calls of one usable episode -> rows of sft.jsonl. Every call is counted in `report`.

    images, pictures: the teacher's ImageStore and the student's Pictures, or None for a text-only student.
    """
    rows = []
    calls = sorted(calls, key=lambda c: c.turn)
    last = next((c for c in reversed(calls) if c.delivered and not c.error), None)
    for call in calls:
        ends = call is last and (episode.finished or episode.end == "text")
        if not call.delivered or call.error or call.message is None:
            report.outcomes["dropped: not_delivered"] += 1
            continue
        if adapters.after_success(episode, call) and not (ends and args.after_success == "finish"):
            report.outcomes["dropped: after_success"] += 1
            continue
        message = {k: v for k, v in call.message.items() if k != "tool_calls" or v}
        message.update(role="assistant", content=text_of(message.get("content")))
        kwargs = call.chat_template_kwargs if args.chat_template_kwargs is None else args.chat_template_kwargs
        try:
            prompt, target, why = target_of(tokenizer, call, message, kwargs, args, images, pictures)
            if len(prompt) + len(target) > args.max_tokens:
                raise NoTarget("too_long", f"{len(prompt)} + {len(target)} tokens")
        except (TemplateError, ValueError) as e:
            outcome, text = e.args if isinstance(e, NoTarget) else ("picture" if isinstance(e, gate.PictureError) else "template", e)
            report.outcomes[f"dropped: {outcome}"] += 1
            report.errors.append(f"{call.call_id}: {text}")
            continue
        source = "tokenized" if why else "reused"
        report.outcomes[source] += 1
        report.numbers["other_vocabulary"] += bool(why and call.token_ids)
        report.numbers["prompt_as_recorded"] += prompt == call.prompt_token_ids
        if source not in report.examples:
            report.examples[source] = {"call_id": call.call_id, "why_tokenized": why, "prompt_tail": tokenizer.decode(prompt[-TAIL:]),
                                       "target": tokenizer.decode(target)}
        rows.append({"episode_id": episode.episode_id, "call_id": call.call_id, "turn": call.turn,
                     "task": episode.task, "source": source, "evidence": [], "messages": call.messages,
                     "tools": call.tools, "message": message, "chat_template_kwargs": kwargs, "prompt_token_ids": prompt,
                     "token_ids": target, "pictures": gate.picture_hashes(call.messages)})
    report.targets[len(rows)] += 1
    return rows


def all_rows(teacher, tokenizer, args, report, pictures, kept):
    """Yields the rows of every usable episode, in the order of `usable_episodes`. pictures: as episode_rows; kept: ImageStore that gets
    the pictures of the rows. BadInput for a teacher with memory, and if calls hold pictures and `pictures` is None."""
    copied = set()
    for path, episode, calls in usable_episodes(teacher, args, report):
        images = ImageStore(path.parent / "images")
        try:
            for call in calls:
                if memory := memory_in(call):
                    raise BadInput(f"{path}: call {call.call_id} has {memory}: the student will have none, so the reply may lean on what "
                                   "it does not see; use rewrite.py")
            shown = sum(bool(gate.picture_hashes(c.messages)) for c in calls) if pictures is None else 0
            if shown:
                raise BadInput(f"{args.student} has no vision tower, but {shown} calls of episode {episode.episode_id} hold pictures; "
                               "give a vision-language checkpoint as --student, or collect without --pictures")
            made = episode_rows(episode, calls, tokenizer, args, report, images, pictures)
        except (KeyError, TypeError, AttributeError) as e:
            raise BadInput(f"{path}: episode {episode.episode_id}: a message or tool is not in OpenAI's chat "
                           f"format ({type(e).__name__}: {e})") from e
        for sha in {sha for row in made for sha in row["pictures"]} - copied:
            copied.add(kept.put(images.get(sha)))
        yield from made


# ---------------------------------------------------------------------------------------------- the command

def parse_args():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    g = p.add_argument_group("files")
    g.add_argument("--teacher", required=True, help="folder of the teacher's run, sharded or not")
    g.add_argument("--student", required=True, help="checkpoint whose tokenizer, chat template and picture processor make the rows")
    g.add_argument("--output", required=True, help="folder to write")
    g = p.add_argument_group("method")
    g.add_argument("--other-vocabulary", choices=["refuse", "tokenize"], default="refuse",
                   help="recorded ids that are not the student's (another vocabulary, another start of the reply): end with an error, or "
                        "tokenize the reply's text by the student's template")
    g.add_argument("--after-success", choices=["finish", "none"], default="finish",
                   help="calls after success: keep the one that ends the episode, or none")
    template_kwargs.add_argument(g, "of the student's contexts, as rollout.py and eval.py will send it; default: as recorded in each call")
    g = p.add_argument_group("limits")
    g.add_argument("--max-tokens", type=int, default=32768,
                   help="longest prompt + target (tokens); longer rows are dropped")
    g.add_argument("--limit-episodes", type=int, default=0, help="use the first N successful episodes (0: all)")
    args = p.parse_args()
    if args.max_tokens < 2 or args.limit_episodes < 0:
        p.error("--max-tokens must be at least 2, --limit-episodes at least 0")
    return args


def print_report(report):
    print(f"reuse: {report['calls']} calls -> {report['targets']} targets")
    for title in ("outcomes", "numbers"):
        print(f"  {title}")
        for name, n in report[title].items():
            print(f"    {name:<40} {n:>8}")
    for name, x in report["tokens"].items():
        print(f"  tokens of a {name:<28} {x['mean']:>10.1f} mean {x['max']:>8} max")
    for source, x in report["examples"].items():
        print(f"  {source} {x['call_id']}\n    prompt: …{x['prompt_tail'][-110:]!r}\n    target: {x['target'][:110]!r}")


def main():
    args = parse_args()
    with contextlib.ExitStack() as held:
        lock_folder(args.output, held)
        with writing(args.output):
            make_rows(args)


def make_rows(args):
    started = time.time()
    teacher, output = Path(args.teacher), Path(args.output)
    tokenizer, pictures = gate.load_tokenizer(args.student), load_pictures(args.student)
    template_kwargs.check(args.chat_template_kwargs, args.student, tokenizer)
    save_args(output, "reuse", args)
    (output / "manifest.json").unlink(missing_ok=True)     # a kill from here on must not leave an older "whole" behind
    part = output / "sft.jsonl.part"
    part.unlink(missing_ok=True)
    report, lengths = Report(), {"prompt": [], "target": []}
    with JsonlWriter(part) as writer:
        for row in all_rows(teacher, tokenizer, args, report, pictures, ImageStore(output / "images")):
            writer.append(row)
            lengths["prompt"].append(len(row["prompt_token_ids"]))
            lengths["target"].append(len(row["token_ids"]))
    result = {k: v for k, v in report.as_dict().items() if k not in ("evidence", "attempts")}
    if not result["targets"]:
        raise BadInput(f"{teacher}: no target in {result['calls']} calls {result['outcomes']}; "
                       + (f"first error: {report.errors[0]}" if report.errors else "collect more successful episodes"))
    result["tokens"] = {name: {"mean": round(sum(n) / len(n), 1), "max": max(n)} for name, n in lengths.items()}
    part.rename(output / "sft.jsonl")
    write_json(output / "reuse-report.json", {"arguments": vars(args), **result})
    print_report(result)
    print(f"reuse: {time.time() - started:.1f} s -> {output / 'sft.jsonl'}")
    write_manifest(output, "reuse", args, {"targets": result["targets"], **result["outcomes"]}, ["sft.jsonl", "reuse-report.json"])


if __name__ == "__main__":
    run_main(main)
