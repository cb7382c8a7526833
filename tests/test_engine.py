"""In-process engine: log-probs against the trainer's plain forward, prefix cache, batching, sampling profiles, output parsing."""

import asyncio
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import Engine, parse_output
from gate import check
from proxy import UpstreamError
from records import Call, TRAIN_SAMPLING

TOOLS = [{"type": "function", "function": {"name": "pick", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}}]


@pytest.fixture(scope="module")
def plain(tiny_dir):
    """The checkpoint as the trainer sees it: transformers' own attention, no cache."""
    return AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32).eval()


@pytest.fixture
def engine(tiny_dir):
    e = Engine(tiny_dir, slots=6, batch=4, max_length=512)
    yield e
    e.inbox.put(None)
    e.thread.join()


async def episode(engine, k, turns=4, tokens=12, **sampling):
    messages, replies = [{"role": "user", "content": f"Task {k}: Put the red mug on the blue tray."}], []
    for turn in range(turns):
        reply = await engine.chat({"messages": messages, "tools": TOOLS, "max_tokens": tokens, "seed": 1000 * k + turn, **sampling})
        replies.append((messages, reply))
        messages = messages + [{"role": "assistant", "content": "I will pick up the red mug."}, {"role": "tool", "content": f"red mug at x 4{k}"}]
    return replies


def split(reply):
    choice = reply["choices"][0]
    return reply["prompt_token_ids"], choice["token_ids"], [c["logprob"] for c in choice["logprobs"]["content"]]


def test_logprobs_agree_with_a_plain_forward_under_batching_and_prefix_reuse(engine, plain):
    async def go():
        return await asyncio.gather(*[episode(engine, k) for k in range(9)])
    episodes = asyncio.run(go())
    worst = 0.0
    for messages, reply in (r for e in episodes for r in e):
        prompt, ids, logprobs = split(reply)
        with torch.no_grad():
            log_pi = plain(torch.tensor([prompt + ids])).logits[0].log_softmax(-1)
        worst = max(worst, *(abs(float(log_pi[len(prompt) + j - 1, t]) - lp) for j, (t, lp) in enumerate(zip(ids, logprobs, strict=True))))
        call = Call("c", "e", 0, messages=messages, tools=TOOLS, prompt_token_ids=prompt)
        assert check(engine.tokenizer, call) is None
    assert worst < 1e-4, worst


def test_the_next_call_of_an_episode_computes_only_its_new_tokens(engine, plain):
    """A prompt that extends prompt + response token for token reuses the slot: also the end token, which had no key yet, is computed."""
    async def go():
        messages = [{"role": "user", "content": "Task: Put the red mug on the blue tray."}]
        first = await engine.chat({"messages": messages, "max_tokens": 6, "seed": 0})
        prompt, ids, _ = split(first)
        before = dict(engine.counts)
        from engine import _Request
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        extended = prompt + ids + prompt[:5]
        engine.inbox.put(_Request(extended, TRAIN_SAMPLING, 3, 1, lambda r, e=None: loop.call_soon_threadsafe(done.set_result, r)))
        request = await done
        return prompt, ids, before, request
    prompt, ids, before, request = asyncio.run(go())
    assert engine.counts["cached"] - before["cached"] == len(prompt) + len(ids) - 1
    assert engine.counts["prefilled"] - before["prefilled"] == 6
    with torch.no_grad():
        log_pi = plain(torch.tensor([request.prompt + request.ids])).logits[0].log_softmax(-1)
    for j, (t, lp) in enumerate(zip(request.ids, request.logprobs, strict=True)):
        assert abs(float(log_pi[len(request.prompt) + j - 1, t]) - lp) < 1e-4


def test_a_sample_depends_on_its_seed_alone_not_on_the_batch(engine):
    async def alone():
        return await episode(engine, 3)
    async def crowd():
        return (await asyncio.gather(*[episode(engine, k) for k in range(6)]))[3]
    ids = [[split(r)[1] for _, r in asyncio.run(go())] for go in (alone, crowd)]
    assert ids[0] == ids[1]
    async def other():
        return await engine.chat({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "seed": 5}), \
               await engine.chat({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "seed": 6})
    a, b = asyncio.run(other())
    assert split(a)[1] != split(b)[1]


def test_processed_logprobs_are_those_of_the_sampled_distribution(engine, plain):
    """temperature 0.5, top-k 4: each log-prob equals the renormalised one of the four largest logits / 0.5."""
    body = {"messages": [{"role": "user", "content": "Task"}], "max_tokens": 8, "seed": 1, "temperature": 0.5, "top_k": 4}
    prompt, ids, logprobs = split(asyncio.run(engine.chat(body)))
    with torch.no_grad():
        logits = plain(torch.tensor([prompt + ids])).logits[0] / 0.5
    for j, (t, lp) in enumerate(zip(ids, logprobs, strict=True)):
        row = logits[len(prompt) + j - 1]
        top = row.topk(4)
        assert t in top.indices and abs(float(row[t] - top.values.logsumexp(0)) - lp) < 1e-4
    greedy = [split(asyncio.run(engine.chat({**body, "temperature": 0.0, "top_k": -1, "seed": s})))[1] for s in (1, 2)]
    assert greedy[0] == greedy[1]
    narrow = split(asyncio.run(engine.chat({**body, "temperature": 1.0, "top_k": -1, "top_p": 1e-6})))
    assert narrow[1] == greedy[0] and max(map(abs, narrow[2])) < 1e-4               # one token left: probability 1
    once = split(asyncio.run(engine.chat({**body, "temperature": 0.0, "top_k": -1, "presence_penalty": 1000.0, "max_tokens": 10})))[1]
    assert len(set(once)) == len(once)                                              # no token twice


def test_a_prompt_that_does_not_fit_is_a_400_and_the_engine_lives_on(engine):
    with pytest.raises(UpstreamError, match="maximum context length is 512") as e:
        asyncio.run(engine.chat({"messages": [{"role": "user", "content": "z" * 3000}], "max_tokens": 5}))
    assert e.value.status == 400
    with pytest.raises(UpstreamError, match="cannot be rendered"):
        asyncio.run(engine.chat({"messages": [{"content": "no role"}], "max_tokens": 5}))
    assert split(asyncio.run(engine.chat({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})))[1]


def test_length_is_reported_and_the_end_token_is_kept(engine):
    reply = asyncio.run(engine.chat({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "seed": 0}))
    ids = split(reply)[1]
    assert reply["choices"][0]["finish_reason"] == ("length" if ids[-1] not in engine.eos else "stop")
    assert reply["usage"]["completion_tokens"] == len(ids) <= 3


@pytest.mark.parametrize("text, content, calls", [
    ('Hi.<tool_call>{"name": "pick", "arguments": {"x": 1}}</tool_call>', "Hi.", [("pick", '{"x": 1}')]),
    ('<tool_call>{"name": "pick", "arguments": {"b": 1,   "a":2}}</tool_call>', None, [("pick", '{"b": 1,   "a":2}')]),
    ("no call at all", "no call at all", []),
    ('<tool_call>{"name": "pick", "arguments": {"x": }}</tool_call>', '<tool_call>{"name": "pick", "arguments": {"x": }}</tool_call>', []),
    ('<tool_call>{"name": "pick", "arguments": [1]}</tool_call>', '<tool_call>{"name": "pick", "arguments": [1]}</tool_call>', []),
    ('a<tool_call>{"name": "p", "arguments": {}}</tool_call> b', 'a<tool_call>{"name": "p", "arguments": {}}</tool_call> b', []),
    ('a<tool_call>{"name": "p", "arguments": {}}</tool_call><tool_call>', 'a<tool_call>{"name": "p", "arguments": {}}</tool_call><tool_call>', []),
    ('<tool_call>{"name": "p", "arguments": {}}</tool_call><tool_call>{"name": "q", "arguments": {"s": "}"}}</tool_call>', None,
     [("p", "{}"), ("q", '{"s": "}"}')]),
])
def test_output_parsing(text, content, calls):
    assert parse_output(text) == (content, None, calls)
    assert all(isinstance(json.loads(a), dict) for _, a in calls)


def test_reasoning_is_split_off():
    assert parse_output("<think>hm</think>ok") == ("ok", "hm", [])
