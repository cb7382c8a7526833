"""--chat-template-kwargs of collect.py, rewrite.py, reuse.py, rollout.py and eval.py: values of a chat template's own variables.

    {"enable_thinking": false}         Qwen3.5: no reasoning
    {"preserve_thinking": true}        Qwen3.6: earlier reasoning stays in the history, so that an episode's calls share a prefix

They are part of the context. Requests carry them, the proxy records them with each call, the gate and rl.py render with what was
recorded. A planner that is fine-tuned with some must sample with the same: give them to rewrite.py or reuse.py, rollout.py and eval.py
alike.
With a template that thinks only when told to (qwen3_5_nothink) say {"enable_thinking": false} to vLLM all the same: 0.32's parser takes
thinking for on otherwise, and makes reasoning of all content (engine.py looks at the prompt). rewrite.py and reuse.py alone have another
default, those of the teacher's calls. sft.py and rl.py have no such option.
"""

import contextlib
import json
import re
from pathlib import Path

from records import BadInput, from_json, read_json

OPTION = "--chat-template-kwargs"


def add_argument(group, help):
    group.add_argument(OPTION, type=parse, default=None, metavar="JSON",
                       help=f"""variables of the chat template, e.g. '{{"enable_thinking": false}}': {help}""")


def parse(text):
    """JSON text -> dict; BadInput if it is no object, or a name or value in it would not reach the template."""
    from gate import OVERRIDDEN, RESERVED                  # not at the top: transformers takes seconds to import
    example = """expected an object such as '{"enable_thinking": false}'"""
    try:
        kwargs = from_json(text)
    except (ValueError, RecursionError) as e:
        raise BadInput(f"{OPTION} {text[:80]!r}: not JSON ({str(e)[:80]}); {example}") from None
    if not isinstance(kwargs, dict):
        raise BadInput(f"{OPTION} {text[:80]!r}: {example}, found {type(kwargs).__name__}")
    for name, value in kwargs.items():
        if name in RESERVED | OVERRIDDEN:
            raise BadInput(f"{OPTION}: {name} is no variable of a chat template, the renderer sets it; leave it out")
        if value in (None, "auto"):                        # vLLM drops these two
            raise BadInput(f"{OPTION}: {name}={json.dumps(value)} stands for the template's own default; leave it out")
    return kwargs


def check(kwargs, checkpoint, tokenizer=None):
    """BadInput if the checkpoint's chat template has no such variable: it would be ignored. kwargs: of `parse`, or None."""
    if kwargs:
        from gate import load_tokenizer
        template = (tokenizer or load_tokenizer(checkpoint)).chat_template
        if unknown := [name for name in kwargs if not re.search(rf"\b{re.escape(name)}\b", template)]:
            raise BadInput(f"{OPTION}: the chat template of {checkpoint} has no variable {unknown[0]}; leave it out")


def note_training(kwargs, checkpoint):
    """Prints one line if the checkpoint was trained on contexts with other kwargs than those it is to sample with."""
    before, source = trained_with(checkpoint)
    if before not in (None, kwargs or {}):
        print(f"note: {checkpoint} was trained on contexts with chat_template_kwargs {json.dumps(before)} ({source}), this command samples "
              f"with {json.dumps(kwargs or {})}", flush=True)


def trained_with(checkpoint):
    """-> (kwargs of its first training context, the file that says so); (None, None) for a base model, or if that file is gone."""
    with contextlib.suppress(BadInput, OSError, LookupError, ValueError):
        args = read_json(Path(checkpoint) / "args.json")
        path = args["data"] if args["stage"] == "sft" else sorted(Path(args["rollouts"][0]).rglob("calls.jsonl"))[0]
        with open(path, "rb") as f:
            return from_json(f.readline())["chat_template_kwargs"], path
    return None, None
