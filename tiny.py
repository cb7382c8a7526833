"""Makes a tiny planner from nothing: a tokenizer trained on recorded text, and a randomly initialised Qwen3.

The embedded demo has no download, so its base model is made here. A real run starts from Qwen/Qwen3.5-9B and skips this file.

Reads   DIR/calls.jsonl, or those of its shards (text of the teacher's calls, for the tokenizer only; no weight is learned)
Writes  a Hugging Face checkpoint: config.json, model.safetensors, tokenizer.json, chat_template.jinja, generation_config.json

The tokenizer is byte-level BPE whose merges may cross spaces (JSON scaffolding becomes few tokens), except that every digit and
every word given by --isolate stays a token of its own: a name copied from an instruction is then the very token that was seen.

    python tiny.py --calls run/teacher --output run/base --isolate red blue mug tray
"""

import argparse
import json
import re

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from records import BadInput, Formatter, folders, read_calls, run_main, save_args, write_manifest

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]     # ordinary tokens: they must survive skip_special_tokens
SMALLEST = 256 + len(SPECIAL) + len(MARKERS)                         # a vocabulary of bytes and markers alone

# Qwen's shape, made short: the tool list is one line of signatures, a tool result is a turn of its own. Within one turn list
# everything is append-only, so prompt t+1 = prompt t + response t + observation t as long as the harness does not edit its history.
CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}{%- elif content -%}
{%- for part in content -%}{%- if part.type == 'text' -%}{{ part.text }}{%- else -%}<|image|>{%- endif -%}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if tools or messages[0].role == 'system' -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0].role == 'system' -%}{{ text(messages[0].content) }}{%- if tools -%}{{ '\\n' }}{%- endif -%}{%- endif -%}
{%- if tools -%}Tools:{%- for tool in tools -%}{{ ' ' + tool.function.name }}({{ tool.function.parameters.properties | join(', ') }}){%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for m in messages if m.role != 'system' -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.role == 'assistant' -%}
{%- if m.reasoning_content -%}<think>{{ m.reasoning_content }}</think>{%- endif -%}
{{- text(m.content) -}}
{%- for c in m.tool_calls or [] -%}
<tool_call>{{ '{"name": "' + c.function.name + '", "arguments": ' }}{{ c.function.arguments | tojson }}{{ '}' }}</tool_call>
{%- endfor -%}
{%- else -%}{{ text(m.content) }}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""
SCAFFOLD = ["system\nTools:", "\nuser\n", "\nassistant\n", "\ntool\n"]    # the template's own text, for the tokenizer


def train_tokenizer(texts, vocab_size, isolate):
    """texts: iterable of str; isolate: words that stay whole. Returns a PreTrainedTokenizerFast with CHAT_TEMPLATE."""
    words = "|".join(re.escape(w) for w in sorted(set(isolate), key=len, reverse=True))
    pattern = (rf"\b(?:{words})\b|[0-9]" if words else "[0-9]")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)                       # ids 0, 1, 2
    tokenizer.add_tokens([AddedToken(m, normalized=False, special=False) for m in MARKERS])
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=SPECIAL + MARKERS, show_progress=False, max_token_length=40,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    # Split at the markers first, as the tokenizer itself will: no merge may contain one.
    pieces = (piece for t in texts for piece in re.split("|".join(map(re.escape, SPECIAL + MARKERS)), t) if piece)
    tokenizer.train_from_iterator(pieces, trainer)
    data = json.loads(tokenizer.to_str())                       # markers were trained as special; make them ordinary again
    for token in data["added_tokens"]:
        token["special"] = token["content"] in SPECIAL
    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(data)), eos_token="<|im_end|>",
                                   pad_token="<|endoftext|>", clean_up_tokenization_spaces=False)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(vocab_size, hidden, layers, heads, kv_heads, ff, seed, eos=2, pad=0, max_positions=4096):
    """A Qwen3ForCausalLM in float32 with N(0, 0.02) weights; same seed, same weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(vocab_size=vocab_size, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
                         num_key_value_heads=kv_heads, head_dim=hidden // heads, intermediate_size=ff, rope_theta=1e4,
                         max_position_embeddings=max_positions, tie_word_embeddings=True, initializer_range=0.02,
                         eos_token_id=eos, pad_token_id=pad, bos_token_id=None, dtype="float32")
    return Qwen3ForCausalLM(config)


def split_words(tokenizer, words):
    """Those of `words` that the tokenizer cuts into several tokens."""
    return [w for w in words if len(tokenizer(w, add_special_tokens=False)["input_ids"]) != 1]


def student_texts(calls, max_calls):
    """Texts of recorded calls as a student without memory meets them: memory tools, their results and [memory] sections left out."""
    yield from SCAFFOLD * 200
    for number, call in enumerate(calls):
        if number == max_calls:
            return
        yield "Tools:" + "".join(f" {t['function']['name']}({', '.join(t['function']['parameters'].get('properties', {}))})"
                                 for t in call.tools if not t["function"]["name"].startswith("memory_"))
        remembered = {c["id"] for m in call.messages for c in m.get("tool_calls") or [] if c["function"]["name"].startswith("memory_")}
        new = call.messages if call.turn == 0 else call.messages[-1:]               # every message once, as it was last added
        for m in new + ([call.message] if call.message else []):
            if m.get("tool_call_id") in remembered:
                continue                                                            # a memory's text: no student reads it
            if isinstance(m.get("content"), str):
                yield re.sub(r"\n?\[memory\].*?\[/memory\]", "", m["content"], flags=re.DOTALL)
            for c in m.get("tool_calls") or []:
                if not c["function"]["name"].startswith("memory_"):
                    yield f'{{"name": "{c["function"]["name"]}", "arguments": {c["function"]["arguments"]}}}'


def parse_args():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    p.add_argument("--calls", required=True, help="run folder, sharded or not; its text trains the tokenizer")
    p.add_argument("--output", required=True, help="checkpoint folder to write")
    p.add_argument("--isolate", nargs="*", default=[], help="words that must stay single tokens")
    p.add_argument("--max-calls", type=int, default=4000, help="calls read for the tokenizer (count)")
    p.add_argument("--seed", type=int, default=0, help="seed of the random weights")
    g = p.add_argument_group("size")
    g.add_argument("--vocab", type=int, default=512, help=f"vocabulary size (tokens, {SMALLEST} of them bytes and markers)")
    g.add_argument("--hidden", type=int, default=128, help="width")
    g.add_argument("--layers", type=int, default=2, help="decoder layers")
    g.add_argument("--heads", type=int, default=4, help="attention heads")
    g.add_argument("--kv-heads", type=int, default=2, help="key/value heads")
    g.add_argument("--ff", type=int, default=384, help="width of the MLP")
    args = p.parse_args()
    if args.hidden % args.heads or args.heads % args.kv_heads:
        p.error(f"--hidden {args.hidden} must divide by --heads {args.heads}, and that by --kv-heads {args.kv_heads}")
    if args.vocab < SMALLEST:
        p.error(f"--vocab {args.vocab}: expected at least {SMALLEST}, the 256 bytes and {SMALLEST - 256} markers")
    return args


def main():
    args = parse_args()
    save_args(args.output, "tiny", args)
    calls = (call for folder in folders(args.calls) for call in read_calls(folder / "calls.jsonl"))
    texts = list(student_texts(calls, args.max_calls))
    if len(texts) == len(SCAFFOLD) * 200:
        raise BadInput(f"{args.calls} holds no call; collect teacher episodes first")
    seen = set(re.findall(r"\w+", " ".join(texts)))
    texts += [w for w in args.isolate if w in seen for _ in range(1000)]       # often enough that BPE makes each one token first
    tokenizer = train_tokenizer(texts, args.vocab, args.isolate)
    if split := split_words(tokenizer, args.isolate):
        raise BadInput(f"--isolate: no single token for {', '.join(split)}; leave out words that the calls in {args.calls} "
                       f"do not hold (or hold too seldom), or raise --vocab {args.vocab}")
    model = make_model(len(tokenizer), args.hidden, args.layers, args.heads, args.kv_heads, args.ff, args.seed)
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    counts = {"parameters": model.num_parameters(), "vocabulary": len(tokenizer), "texts": len(texts)}
    write_manifest(args.output, "tiny", args, counts)
    print(f"tiny: {counts['parameters']:,} parameters, {len(tokenizer)} tokens -> {args.output}")


if __name__ == "__main__":
    run_main(main)
