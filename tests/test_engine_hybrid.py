"""The engine's plain way: Qwen3.5, text and vision-language, against full forwards of the same checkpoint; pictures; failures."""

import asyncio
import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

import fakes
import gate
import tiny
from conftest import TEXTS
from engine import Engine
from pictures import load_pictures
from records import BadInput, ImageStore, call_problem
from upstream import UpstreamError

TASK = "Task: Put the red mug on the blue tray."
SIZE = dict(hidden=64, layers=4, heads=2, kv_heads=1, ff=128, seed=0)


def checkpoint(folder, vision):
    words = ["red", "blue", "green", "white", "mug", "pot", "tray"]
    tokenizer = tiny.train_tokenizer((TEXTS + tiny.SCAFFOLD) * 20, 400, words, vision)
    model = tiny.make_hybrid(tokenizer, **SIZE, vision=vision)
    with torch.no_grad():                                  # fresh weights hardly mix tokens, and all tokens are alike: make it all matter
        for name, p in model.named_parameters():
            if p.ndim > 1 and "embed" not in name:
                p.mul_(3)
            elif name in ("model.norm.weight", "model.language_model.norm.weight"):
                p.fill_(11)                                # a scale of 12: logits spread by 2
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if vision:
        tiny.picture_processor().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text_dir(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("hybrid"), False)


@pytest.fixture(scope="module")
def sight_dir(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("sight"), True)


def started(folder, **sizes):
    return Engine(folder, **{"slots": 4, "batch": 3, "max_length": 512, **sizes})


@pytest.fixture
def text(text_dir):
    engine = started(text_dir)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture
def sight(sight_dir):
    engine = started(sight_dir)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture(scope="module")
def full(text_dir, sight_dir):
    """full(prompt + response ids, pictures) -> logits (T, V): one forward as the trainer makes it, no cache, positions by the model."""
    nets = {False: AutoModelForCausalLM.from_pretrained(text_dir, dtype=torch.float32).eval(),
            True: AutoModelForImageTextToText.from_pretrained(sight_dir, dtype=torch.float32).eval()}
    seen = load_pictures(sight_dir)

    @torch.no_grad()
    def forward(ids, pictures=None):
        ids, more = torch.tensor([ids]), {}                                                # (1, T)
        if pictures:
            pixels, grids = zip(*map(seen.inputs, pictures), strict=True)
            more = {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.stack(grids), "mm_token_type_ids": (ids == seen.token).int()}
        return nets[pictures is not None](input_ids=ids, use_cache=False, **more).logits[0]
    return forward


def picture(seed, width=96, height=64):
    """Bytes of a PNG of noise: 96 x 64 pixels are 3 x 2 tokens."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(noise).save(out := io.BytesIO(), "PNG")
    return out.getvalue()


def part(data):
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(data).decode()}}


def shown(*pictures, text=TASK):
    """Messages that show the pictures, the last one in a turn of its own."""
    first = [{"role": "user", "content": [{"type": "text", "text": text}, *map(part, pictures[:-1])]}]
    return first + [{"role": "assistant", "content": "I will pick up the red mug."},
                    {"role": "user", "content": [part(p) for p in pictures[-1:]] + [{"type": "text", "text": "Held: red mug."}]}]


def ask(engine, messages, **fields):
    return asyncio.run(engine.chat({"messages": messages, "max_tokens": 30, "seed": 1, **fields}))


def split(reply):
    choice = reply["choices"][0]
    return reply["prompt_token_ids"], choice["token_ids"], [c["logprob"] for c in choice["logprobs"]["content"]]


def worst(full, reply, pictures=None):
    """Largest difference between reported log-probs and those of a full forward over prompt and response (nats)."""
    prompt, ids, reported = reply if isinstance(reply, tuple) else split(reply)
    log_pi = full(prompt + ids, pictures)[len(prompt) - 1:-1].log_softmax(-1)             # (L, V)
    return float((log_pi.gather(1, torch.tensor(ids)[:, None])[:, 0] - torch.tensor(reported)).abs().max())


# ------------------------------------------------------------ log-probs

TURNS = [{"role": "user", "content": TASK}]


def test_text_hybrid_agrees_with_a_full_forward_short_and_long(text, full):
    """The recurrent delta rule, one token a step, against the chunked one over everything: beyond two of its chunks of 64."""
    text.eos = set()
    gaps = [worst(full, ask(text, TURNS, seed=k, max_tokens=n)) for k, n in ((1, 5), (2, 30), (3, 160), (4, 250))]
    assert max(gaps) < 1e-4, gaps
    assert text.counts["prefilled"] == 4 * len(ask(text, TURNS, max_tokens=1)["prompt_token_ids"])     # prompts once, then token by token
    assert text.counts["cached"] == 0


def test_sliding_windows_go_the_plain_way_too(tiny_dir, tmp_path):
    """A Qwen3 whose first layer sees 16 tokens back, on prompts of more."""
    config = AutoConfig.from_pretrained(tiny_dir)
    config.layer_types, config.sliding_window, config.use_sliding_window = ["sliding_attention", "full_attention"], 16, True
    torch.manual_seed(0)
    net = AutoModelForCausalLM.from_config(config).eval()
    net.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_dir).save_pretrained(tmp_path)
    engine = started(tmp_path)
    reply = ask(engine, [{"role": "user", "content": TASK * 3}], max_tokens=40)
    asyncio.run(engine.close())

    @torch.no_grad()
    def forward(ids, pictures=None):
        return net(torch.tensor([ids]), use_cache=False).logits[0]                        # (T, V)
    assert engine.plain and len(split(reply)[0]) > 32 and worst(forward, reply) < 1e-4


def usable(engine, messages, **fields):
    """A reply whose response holds no placeholder: a full forward would look for a picture behind it."""
    for seed in range(50):
        reply = ask(engine, messages, seed=seed, **fields)
        if engine.pictures.token not in split(reply)[1]:
            return reply
    raise AssertionError("50 responses with a placeholder")


def test_vision_agrees_with_a_full_forward_with_no_one_and_two_pictures(sight, full):
    sight.eos = set()
    a, b = picture(1), picture(2, 256, 256)
    for pictures in ((), (a,), (a, b), (b, a)):
        messages = shown(*pictures) if pictures else TURNS
        for tokens in (20, 140):
            reply = usable(sight, messages, max_tokens=tokens)
            assert worst(full, reply, list(pictures)) < 1e-4, (len(pictures), tokens)
    prompt = split(ask(sight, shown(a, b), max_tokens=1))[0]
    assert prompt.count(sight.pictures.token) == 6 + 16
    assert prompt.count(3) == prompt.count(5) == 2          # <|vision_start|>, <|vision_end|>


def test_pictures_and_their_order_matter(sight):
    """Else the agreement above would say nothing of pictures."""
    a, b = picture(1), picture(2)
    first = [split(ask(sight, shown(*p), max_tokens=1, temperature=0.0))[2][0] for p in ((a, b), (b, a), (a, a))]
    assert min(abs(first[0] - first[1]), abs(first[0] - first[2])) > 1e-3, first


def test_greedy_is_the_argmax_of_a_full_forward(sight, full):
    a, b = picture(1), picture(2)
    sight.eos = set()
    prompt, ids, _ = split(ask(sight, shown(a, b), temperature=0.0))
    assert full(prompt + ids, [a, b])[len(prompt) - 1:-1].argmax(-1).tolist() == ids and len(ids) == 30
    prompt, ids, _ = split(ask(sight, TURNS, temperature=0.0))
    assert full(prompt + ids, [])[len(prompt) - 1:-1].argmax(-1).tolist() == ids and len(ids) == 30


def test_a_placeholder_that_the_policy_samples_is_a_token_like_any_other(sight):
    """No picture is looked for behind it: the step after it is computed, and the reply comes whole."""
    choose, token = sight._choose, sight.pictures.token
    sight._choose = lambda batch, log_q: torch.full((1,), token) if len(batch[0].ids) == 1 else choose(batch, log_q)
    sight.eos = set()
    ids = split(ask(sight, shown(picture(1)), max_tokens=6))[1]
    assert ids[1] == token and len(ids) == 6


# ------------------------------------------------------------ requests among others

def test_a_sample_depends_on_its_seed_alone(text):
    one, again, other = (split(ask(text, TURNS, seed=s)) for s in (7, 7, 8))
    assert one == again and one[1] != other[1]


def test_requests_beside_each_other_do_not_disturb_each_other(sight, full):
    """Other pictures, other sizes, no picture: each has its own positions and cache, also when it decodes between two others."""
    sight.eos = set()
    a, b, c = picture(1), picture(2, 160, 160), picture(3, 64, 256)
    asked = [(shown(a, b), 40), (TURNS, 45), (shown(c), 35), (shown(b, c), 25), (TURNS, 20)]
    bodies = [{"messages": m, "max_tokens": n, "seed": k, "top_p": 0.98} for k, (m, n) in enumerate(asked)]
    alone = [split(asyncio.run(sight.chat(body))) for body in bodies]

    async def together():
        return await asyncio.gather(*map(sight.chat, bodies))
    crowd = [split(r) for r in asyncio.run(together())]
    assert crowd == alone and sight.free == set(range(4))
    assert len({tuple(ids) for _, ids, _ in crowd}) == 5


# ------------------------------------------------------------ failures, leaving, refusals

def refused(engine, messages, match, **fields):
    with pytest.raises(UpstreamError, match=match) as e:
        ask(engine, messages, **fields)
    assert e.value.status == 400 and "\n" not in str(e.value)


def test_prompts_that_do_not_fit_or_do_not_match_their_pictures_are_a_400(sight):
    refused(sight, [{"role": "user", "content": "z" * 3000}], "maximum context length is 512")
    refused(sight, shown(*[picture(k, 256, 256) for k in range(30)]), "maximum context length is 512")
    refused(sight, shown(picture(1), text="<|image_pad|>"), "2 placeholder tokens for 1 pictures")
    refused(sight, shown(picture(1)[:-30]), "cannot be decoded")
    refused(sight, shown(b"\x89PNG\r\n\x1a\nno picture"), "cannot be decoded")
    refused(sight, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}], "must be a data:image")
    refused(sight, [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "data:,"}}]}], "video_url")
    refused(sight, [{"content": "no role"}], "cannot be rendered")
    refused(sight, TURNS, "top_p must be", top_p=0)
    assert sight.counts["generated"] == 0
    assert split(ask(sight, shown(picture(1)), max_tokens=2))[1]


def test_a_text_model_takes_a_picture_as_its_templates_own_text(text):
    """Without vision nothing is decoded or counted: the template's <|image|>, as the gate renders it."""
    messages = shown(b"any bytes")
    prompt = split(ask(text, messages, max_tokens=1))[0]
    assert text.tokenizer.decode(prompt).count("<|image|>") == 1
    assert prompt == gate.render_prompt(text.tokenizer, messages, [], {})


def test_a_failed_step_is_a_500_and_the_engine_lives_on(sight, full):
    forward, failures = sight._forward_plain, []

    def broken(batch):
        if failures:
            return forward(batch)
        failures.append(len(batch))
        raise RuntimeError("no memory")
    sight._forward_plain = broken
    with pytest.raises(UpstreamError, match="engine: RuntimeError: no memory") as e:
        ask(sight, shown(picture(1)))
    assert e.value.status == 500 and sight.counts["failed"] == failures[0] == 1 and sight.free == set(range(4))
    assert worst(full, usable(sight, shown(picture(1))), [picture(1)]) < 1e-4


def test_a_client_that_leaves_ends_its_generation_and_frees_its_place(sight):
    sight.eos = set()

    async def go():
        bodies = [{"messages": shown(picture(k)), "max_tokens": 400, "seed": k} for k in range(6)]       # 3 run, 3 wait
        tasks = [asyncio.create_task(sight.chat(body)) for body in bodies]
        while sight.counts["generated"] < 9:
            await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        while len(sight.free) < 4:
            await asyncio.sleep(0.001)
        return ends, sight.counts["generated"]
    ends, generated = asyncio.run(asyncio.wait_for(go(), 20))
    assert all(isinstance(e, asyncio.CancelledError) for e in ends)
    assert sight.counts["cancelled"] == 6 and generated < 400


def test_penalties_count_the_whole_expanded_prompt(sight, full):
    """Shaped log-probs go through the same code as the slots': presence penalty of the response's own tokens, temperature."""
    s = {"temperature": 0.7, "presence_penalty": 0.4}
    prompt, ids, reported = split(usable(sight, shown(picture(1)), **s))
    logits = full(prompt + ids, [picture(1)])[len(prompt) - 1:-1]                          # (L, V)
    for j, (t, lp) in enumerate(zip(ids, reported, strict=True)):
        x = logits[j].clone()
        x[list(set(ids[:j]))] -= 0.4
        assert abs(float((x / 0.7).log_softmax(-1)[t]) - lp) < 1e-4


def test_a_checkpoint_without_its_processor_is_refused_at_the_start(sight_dir, tmp_path):
    for file in sight_dir.iterdir():
        if file.name != "preprocessor_config.json":
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(BadInput, match="preprocessor_config.json") as e:
        started(tmp_path)
    assert "\n" not in str(e.value)


def test_a_model_with_pictures_but_without_positions_in_three_axes_is_refused(sight_dir, monkeypatch):
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model
    monkeypatch.delattr(Qwen3_5Model, "get_rope_index")
    with pytest.raises(BadInput, match="found qwen3_5; use vLLM") as e:
        started(sight_dir)
    assert "\n" not in str(e.value)


# ------------------------------------------------------------ through the proxy

def test_recorded_calls_have_expanded_ids_and_pass_the_gate(sight_dir, full, tmp_path):
    engine = started(sight_dir)
    a, b = picture(1), picture(2, 480, 360)

    async def test(proxy, url):
        for messages in (shown(a, b), shown(b), TURNS):
            await fakes.ask(url, "calm", messages=messages, tools=fakes.TOOLS)
        await fakes.recorded(url)
    calls = fakes.run(test, engine, tmp_path / "out", max_tokens=24)
    store, seen = ImageStore(tmp_path / "out" / "images"), load_pictures(sight_dir)
    assert [call_problem(c) for c in calls] == [None] * 3
    assert not any(seen.token in c.token_ids for c in calls)           # with the seeds of "calm": the gate refuses a sampled placeholder
    assert [c.prompt_token_ids.count(seen.token) for c in calls] == [6 + 20, 20, 0]
    for call, pictures in zip(calls, ([a, b], [b], []), strict=True):
        assert gate.check(engine.tokenizer, call, store, seen) is None
        assert [store.get(sha) for sha in gate.picture_hashes(call.messages)] == pictures
        assert worst(full, (call.prompt_token_ids, call.token_ids, call.logprobs), pictures) < 1e-4
    calls[0].prompt_token_ids.remove(seen.token)            # one placeholder short: another picture size
    assert gate.check(engine.tokenizer, calls[0], store, seen) is not None
