"""Makes a tiny planner from nothing: a tokenizer trained on recorded text, and a randomly initialised Qwen3 or Qwen3.5.

The embedded demo has no download, so its base model is made here. A real run starts from Qwen/Qwen3.5-9B and skips this file.
--family qwen3_5 is that model made small: gated-delta-net and attention layers in turn; --vision adds its vision tower.

Reads   DIR/calls.jsonl, or those of its shards (text of the teacher's calls, for the tokenizer only; no weight is learned)
Writes  a Hugging Face checkpoint: config.json, model.safetensors, tokenizer.json, chat_template.jinja, generation_config.json;
        with --vision preprocessor_config.json too (pictures of any size become 4 to 24 tokens; PIL, no torchvision)

The tokenizer is byte-level BPE whose merges may cross spaces (JSON scaffolding becomes few tokens), except that every digit and
every word given by --isolate stays a token of its own: a name copied from an instruction is then the very token that was seen.

    python tiny.py --calls run/teacher --output run/base --isolate red blue mug tray
    python tiny.py --calls run/teacher --output run/base --family qwen3_5 --vision
"""

import argparse
import json
import re

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast, Qwen3_5Config, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration, Qwen3_5TextConfig, Qwen3Config,
    Qwen3ForCausalLM)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from records import BadInput, Formatter, folders, read_calls, run_main, save_args, write_manifest

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]     # ordinary tokens: they must survive skip_special_tokens
VISION = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]     # special; the first three stand for a picture
PATCH, MERGE, PICTURE = 16, 2, (4, 24)                               # pixels of a patch's side; patches of a token's side; tokens
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


def train_tokenizer(texts, vocab_size, isolate, vision=False):
    """texts: iterable of str; isolate: words that stay whole. Returns a PreTrainedTokenizerFast with CHAT_TEMPLATE.

    vision: with the tokens of VISION, and a template that writes <|vision_start|><|image_pad|><|vision_end|> for a picture.
    """
    special = SPECIAL + (VISION if vision else [])
    words = "|".join(re.escape(w) for w in sorted(set(isolate), key=lambda w: (-len(w), w)))      # one order, one content hash
    pattern = (rf"\b(?:{words})\b|[0-9]" if words else "[0-9]")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)                       # ids 0, 1, 2, …
    tokenizer.add_tokens([AddedToken(m, normalized=False, special=False) for m in MARKERS])
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special + MARKERS, show_progress=False, max_token_length=40,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    # Split at the markers first, as the tokenizer itself will: no merge may contain one.
    pieces = (piece for t in texts for piece in re.split("|".join(map(re.escape, special + MARKERS)), t) if piece)
    tokenizer.train_from_iterator(pieces, trainer)
    data = json.loads(tokenizer.to_str())                       # markers were trained as special; make them ordinary again
    for token in data["added_tokens"]:
        token["special"] = token["content"] in special
    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(data)), eos_token="<|im_end|>",
                                   pad_token="<|endoftext|>", clean_up_tokenization_spaces=False)
    fast.chat_template = CHAT_TEMPLATE.replace("<|image|>", "".join(VISION[:3])) if vision else CHAT_TEMPLATE
    return fast


def make_model(vocab_size, hidden, layers, heads, kv_heads, ff, seed, eos=2, pad=0, max_positions=4096):
    """A Qwen3ForCausalLM in float32 with N(0, 0.02) weights; same seed, same weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(vocab_size=vocab_size, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
                         num_key_value_heads=kv_heads, head_dim=hidden // heads, intermediate_size=ff, rope_theta=1e4,
                         max_position_embeddings=max_positions, tie_word_embeddings=True, initializer_range=0.02,
                         eos_token_id=eos, pad_token_id=pad, bos_token_id=None, dtype="float32")
    return Qwen3ForCausalLM(config)


def make_hybrid(tokenizer, hidden, layers, heads, kv_heads, ff, seed, vision=False, max_positions=4096):
    """A Qwen3.5 in float32; same seed, same weights. Even layers are gated delta nets, odd ones attention.

    Without vision a Qwen3_5ForCausalLM; with it a Qwen3_5ForConditionalGeneration, whose tower is of the same width, two blocks
    deep. A delta net has the attention's heads: kv_heads for keys, heads for values.
    """
    torch.manual_seed(seed)
    head, rotary = hidden // heads, hidden // heads // 4         # rotary: frequencies, half of a head turns
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_interleaved": True,
            "mrope_section": [(rotary + 2) // 3, (rotary + 1) // 3, rotary // 3]}        # of time, height, width; [11, 11, 10] in the 9B
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    text = Qwen3_5TextConfig(
        vocab_size=len(tokenizer), hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head, intermediate_size=ff, rope_parameters=rope, partial_rotary_factor=0.5, max_position_embeddings=max_positions,
        layer_types=["full_attention" if i % 2 else "linear_attention" for i in range(layers)], linear_num_key_heads=kv_heads,
        linear_num_value_heads=heads, linear_key_head_dim=head, linear_value_head_dim=head, tie_word_embeddings=True, dtype="float32", **ids)
    if not vision:
        return Qwen3_5ForCausalLM(text)
    tower = {"depth": 2, "hidden_size": hidden, "num_heads": heads, "intermediate_size": ff, "patch_size": PATCH, "temporal_patch_size": 2,
             "spatial_merge_size": MERGE, "out_hidden_size": hidden, "num_position_embeddings": 64}      # learned on an 8 x 8 grid
    start, image, end, video = tokenizer.convert_tokens_to_ids(VISION)
    return Qwen3_5ForConditionalGeneration(Qwen3_5Config(
        text_config=text.to_dict(), vision_config=tower, vision_start_token_id=start, image_token_id=image, vision_end_token_id=end,
        video_token_id=video, tie_word_embeddings=True, dtype="float32", **ids))


def picture_processor():
    """The processor of --vision: 24 tokens at most for a picture, 16 for 256 x 256 pixels, 20 for 480 x 360."""
    low, high = (n * (PATCH * MERGE) ** 2 for n in PICTURE)      # pixels
    return Qwen2VLImageProcessorPil(patch_size=PATCH, temporal_patch_size=2, merge_size=MERGE, image_mean=[0.5] * 3, image_std=[0.5] * 3,
                                    size={"shortest_edge": low, "longest_edge": high})


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
    p.add_argument("--family", choices=["qwen3", "qwen3_5"], default="qwen3", help="qwen3: attention alone; qwen3_5: hybrid")
    p.add_argument("--vision", action="store_true", help="qwen3_5: with a vision tower and a picture processor")
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
    smallest = SMALLEST + (len(VISION) if args.vision else 0)
    if args.vocab < smallest:
        p.error(f"--vocab {args.vocab}: expected at least {smallest}, the 256 bytes and {smallest - 256} markers")
    if args.vision and args.family != "qwen3_5":
        p.error(f"--vision: --family {args.family} has no vision tower; give --family qwen3_5")
    if args.family == "qwen3_5" and args.layers < 2:
        p.error(f"--layers {args.layers}: --family qwen3_5 alternates delta-net and attention layers; expected at least 2")
    if args.family == "qwen3_5" and (args.hidden // args.heads) % 4:
        p.error(f"--hidden {args.hidden}, --heads {args.heads}: --family qwen3_5 turns half of a head; expected heads of 4, 8, 12, … wide")
    if args.vision and args.hidden // args.heads < 12:
        p.error(f"--hidden {args.hidden}, --heads {args.heads}: with --vision a head has a frequency for time, height and width each; "
                "expected heads at least 12 wide")
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
    tokenizer = train_tokenizer(texts, args.vocab, args.isolate, args.vision)
    if split := split_words(tokenizer, args.isolate):
        raise BadInput(f"--isolate: no single token for {', '.join(split)}; leave out words that the calls in {args.calls} "
                       f"do not hold (or hold too seldom), or raise --vocab {args.vocab}")
    size = (args.hidden, args.layers, args.heads, args.kv_heads, args.ff, args.seed)
    model = make_model(len(tokenizer), *size) if args.family == "qwen3" else make_hybrid(tokenizer, *size, vision=args.vision)
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    if args.vision:
        picture_processor().save_pretrained(args.output)
    counts = {"parameters": model.num_parameters(), "vocabulary": len(tokenizer), "texts": len(texts)}
    write_manifest(args.output, "tiny", args, counts)
    print(f"tiny: {counts['parameters']:,} parameters, {len(tokenizer)} tokens -> {args.output}")


if __name__ == "__main__":
    run_main(main)
