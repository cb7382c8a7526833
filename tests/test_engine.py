"""In-process engine: log-probs against a plain forward, prefixes, batching, profiles, failures, output parsing."""

import asyncio
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import Engine
from gate import check
from parsing import parse_output
from proxy import UpstreamError
from records import BadInput, Call, PROFILES, TRAIN_SAMPLING

PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "pick", "parameters": PARAMETERS}}]


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
        body = {"messages": messages, "tools": TOOLS, "max_tokens": tokens, "seed": 1000 * k + turn, **sampling}
        reply = await engine.chat(body)
        replies.append((messages, reply))
        messages = messages + [{"role": "assistant", "content": "I will pick up the red mug."},
                               {"role": "tool", "content": f"red mug at x 4{k}"}]
    return replies


def split(reply):
    choice = reply["choices"][0]
    return reply["prompt_token_ids"], choice["token_ids"], [c["logprob"] for c in choice["logprobs"]["content"]]


def worst_gap(plain, reply):
    """Largest difference between recorded log-probs and those of the plain forward (nats)."""
    prompt, ids, logprobs = split(reply)
    with torch.no_grad():
        log_pi = plain(torch.tensor([prompt + ids])).logits[0].log_softmax(-1)
    return max(abs(float(log_pi[len(prompt) + j - 1, t]) - lp)
               for j, (t, lp) in enumerate(zip(ids, logprobs, strict=True)))


def test_logprobs_agree_with_a_plain_forward_under_batching_and_prefix_reuse(engine, plain):
    async def go():
        return await asyncio.gather(*[episode(engine, k) for k in range(9)])
    episodes = asyncio.run(go())
    for messages, reply in (r for e in episodes for r in e):
        assert worst_gap(plain, reply) < 1e-4
        call = Call("c", "e", 0, messages=messages, tools=TOOLS, prompt_token_ids=reply["prompt_token_ids"])
        assert check(engine.tokenizer, call) is None


def test_the_next_call_of_an_episode_computes_only_its_new_tokens(engine, plain):
    """A prompt that extends prompt + response reuses the slot; the last token, which has no key yet, is computed."""
    async def go():
        messages = [{"role": "user", "content": "Task: Put the red mug on the blue tray."}]
        first = await engine.chat({"messages": messages, "max_tokens": 6, "seed": 0})
        prompt, ids, _ = split(first)
        before = dict(engine.counts)
        from engine import _Request
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        extended = prompt + ids + prompt[:5]
        engine.inbox.put(_Request(extended, TRAIN_SAMPLING, 3, 1,
                                  lambda r, e=None: loop.call_soon_threadsafe(done.set_result, r)))
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
    body = {"messages": [{"role": "user", "content": "Task"}], "max_tokens": 8, "seed": 1,
            "temperature": 0.5, "top_k": 4}
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
    penalised = {**body, "temperature": 0.0, "top_k": -1, "presence_penalty": 1000.0, "max_tokens": 10}
    once = split(asyncio.run(engine.chat(penalised)))[1]
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
    ('<tool_call>{"name": "p", "arguments": {}}</tool_call>'
     '<tool_call>{"name": "q", "arguments": {"s": "}"}}</tool_call>', None, [("p", "{}"), ("q", '{"s": "}"}')]),
    ("", None, []),
    *[(unreadable, unreadable, []) for unreadable in [
        "no call at all",
        '<tool_call>{"name": "pick", "arguments": {"x": }}</tool_call>',
        '<tool_call>{"name": "pick", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "p", "arguments": {"a": ' + "[" * 99999 + "}}</tool_call>",
        'a<tool_call>{"name": "p", "arguments": {}}</tool_call> b',
        'a<tool_call>{"name": "p", "arguments": {}}</tool_call><tool_call>',
    ]],
], ids=range(10))
def test_output_parsing(text, content, calls):
    assert parse_output(text) == (content, None, calls)
    assert all(isinstance(json.loads(a), dict) for _, a in calls)


def test_reasoning_is_split_off():
    assert parse_output("<think>hm</think>ok") == ("ok", "hm", [])


# ------------------------------------------------------------ failures, leaving, refusals

HI = {"messages": [{"role": "user", "content": "Task: Put the red mug on the blue tray."}], "max_tokens": 6, "seed": 3}


def break_forward(engine, when):
    """The next forward for which when(batch) holds writes rubbish keys, then raises. -> list of failed batches"""
    update, forward, failed = engine.cache.update, engine._forward, []

    def broken(key, value, layer, *a, **k):
        update(key + 7, value - 7, layer)
        raise RuntimeError("no memory")

    def wrapped(batch):
        if failed or not when(batch):
            return forward(batch)
        failed.append(list(batch))
        engine.cache.update = broken
        try:
            return forward(batch)
        finally:
            engine.cache.update = update
    engine._forward = wrapped
    return failed


async def within(seconds, *calls):
    return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), seconds)


@pytest.mark.parametrize("fresh", [True, False])
def test_a_failed_step_fails_its_own_requests_and_frees_their_slots(engine, plain, fresh):
    """10 requests, places for 4: the failed step's 4 get a 500, the others are served, and every slot is free again."""
    failed = break_forward(engine, lambda batch: bool(batch[0].ids) != fresh)
    replies = asyncio.run(within(20, *[engine.chat({**HI, "seed": k}) for k in range(10)]))
    errors = [r for r in replies if isinstance(r, Exception)]
    assert len(errors) == len(failed[0]) == engine.counts["failed"] > 0
    assert {(type(e), e.status, e.message) for e in errors} == {(UpstreamError, 500, "engine: RuntimeError: no memory")}
    assert max(worst_gap(plain, r) for r in replies if not isinstance(r, Exception)) < 1e-4
    assert engine.free == set(range(6))
    again = asyncio.run(within(20, *[engine.chat({**HI, "seed": k}) for k in range(10)]))
    assert [r["usage"]["completion_tokens"] > 0 for r in again] == [True] * 10


def test_a_failed_step_leaves_no_rubbish_prefix(engine, plain):
    """Slots hold this prompt; a failed step fills a slot with rubbish keys; later prompts must not build on them."""
    asyncio.run(within(20, *[engine.chat({**HI, "seed": k}) for k in range(6)]))
    more = [{"role": "assistant", "content": "Held: red mug."}, {"role": "tool", "content": "ok"}]
    longer = {**HI, "messages": HI["messages"] + more}
    break_forward(engine, lambda batch: True)
    [error] = asyncio.run(within(20, engine.chat(longer)))
    assert isinstance(error, UpstreamError) and error.status == 500
    assert (engine.held[:, 0] == -1).sum() == 1          # the broken slot is forgotten whole
    replies = asyncio.run(within(20, *[engine.chat({**b, "seed": k}) for k in range(4) for b in (longer, HI)]))
    assert max(worst_gap(plain, r) for r in replies) < 1e-4


def test_a_slot_forgets_its_tokens_before_its_keys_are_overwritten(engine):
    """During the forward over another prompt, the slot no longer claims what it held before."""
    engine.prompts[:], engine.held[:] = 500, -1
    engine.held[:, :3] = 7, 7, 7                         # keys of a prompt of another task, in every slot
    seen, forward = [], engine._forward

    def spy(batch):
        seen.append(engine.held[batch[0].slot].tolist())
        return forward(batch)
    engine._forward = spy
    asyncio.run(engine.chat(HI))
    assert set(seen[0]) == {-1}


def test_prefixes_are_shared_between_attempts_and_log_probs_stay_right(engine, plain):
    """Another attempt copies the first one's prompt: it computes one token, also while the first one still runs."""
    async def go():
        first = asyncio.create_task(engine.chat({**HI, "max_tokens": 200}))
        while engine.counts["generated"] < 3:
            await asyncio.sleep(0.001)
        before = dict(engine.counts)
        second = await engine.chat({**HI, "seed": 4})
        return before, second, await first
    before, second, first = asyncio.run(go())
    assert engine.counts["prefilled"] - before["prefilled"] == 1
    assert engine.counts["cached"] - before["cached"] == len(second["prompt_token_ids"]) - 1
    assert max(worst_gap(plain, first), worst_gap(plain, second)) < 1e-4


def test_a_client_that_leaves_ends_its_generation_and_frees_its_slot(engine):
    engine.eos = set()                                   # nothing ends by itself

    async def go():
        long = [{**HI, "max_tokens": 450, "seed": k} for k in range(8)]                    # 4 run, 4 wait
        tasks = [asyncio.create_task(engine.chat(body)) for body in long]
        while engine.counts["generated"] < 12:
            await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        while len(engine.free) < 6:
            await asyncio.sleep(0.001)
        after = engine.counts["generated"]
        reply = await engine.chat({**HI, "max_tokens": 2})
        return ends, after, reply
    ends, after, reply = asyncio.run(asyncio.wait_for(go(), 20))
    assert all(isinstance(e, asyncio.CancelledError) for e in ends)
    assert engine.counts["cancelled"] == 8 and after < 4 * 450 / 2, engine.counts
    assert engine.counts["generated"] - after == reply["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("field, values", [
    ("temperature", [-0.1, "hot", True, float("nan"), float("inf"), [1]]),
    ("top_p", [0, 1.1, -1, "0.9"]), ("top_k", [-2, 2.0, "all", 10**400]),
    ("min_p", [-0.1, 1.5, {}]), ("presence_penalty", ["x", float("nan")]), ("frequency_penalty", [[], float("-inf")]),
    ("repetition_penalty", [0, -1.0, "x"]), ("max_tokens", [0, -5, 3.0, True, "9"]), ("seed", [-1, 1.5, "a", False]),
])
def test_wrong_sampling_values_are_a_400_that_names_field_and_expectation(engine, field, values):
    for value in values:
        with pytest.raises(UpstreamError, match=f"{field} must be an?") as e:
            asyncio.run(engine.chat({**HI, field: value}))
        assert e.value.status == 400
    assert engine.counts["generated"] == 0


def test_fields_that_are_null_or_absent_are_neutral_and_the_seed_is_fresh(engine):
    body = {**HI, "max_tokens": 12, "seed": None, "top_p": None, "temperature": None}
    ids = [split(asyncio.run(engine.chat(body)))[1] for _ in range(3)]
    assert ids[0] != ids[1] or ids[1] != ids[2]


@pytest.mark.parametrize("sizes, message", [
    ({"slots": 0}, "--slots 0"), ({"batch": 0}, "--batch 0"), ({"max_length": 0}, "--max-length 0"),
    ({"slots": 4, "batch": 5}, "--batch 5.*--slots is 4"),
])
def test_impossible_sizes_are_refused_in_one_line(tiny_dir, sizes, message):
    with pytest.raises(BadInput, match=message) as e:
        Engine(tiny_dir, **sizes)
    assert "\n" not in str(e.value)


def test_closing_ends_what_runs_and_what_comes_after(tiny_dir):
    async def go():
        engine = Engine(tiny_dir, slots=2, batch=2, max_length=512)
        engine.eos = set()
        tasks = [asyncio.create_task(engine.chat({**HI, "max_tokens": 450})) for _ in range(4)]
        while engine.counts["generated"] < 4:
            await asyncio.sleep(0.001)
        await engine.close()
        return await within(10, *tasks, engine.chat(HI))
    assert [(type(e), e.status) for e in asyncio.run(go())] == [(UpstreamError, 503)] * 5


def test_mixed_profiles_in_one_batch_are_each_sampled_as_alone(engine):
    """Rows of a batch are shaped one by one: neutral, greedy, the eval profile and penalties side by side."""
    profiles = [{}, {"temperature": 0.0}, PROFILES["eval"],
                {"temperature": 0.7, "min_p": 0.05, "repetition_penalty": 1.3, "frequency_penalty": 0.5}]
    alone = [split(asyncio.run(engine.chat({**HI, **p}))) for p in profiles]
    together = [split(r) for r in asyncio.run(within(20, *[engine.chat({**HI, **p}) for p in profiles]))]
    assert [a[1] for a in alone] == [t[1] for t in together]
    assert max(abs(x - y) for a, t in zip(alone, together, strict=True) for x, y in zip(a[2], t[2], strict=True)) < 1e-4
    assert max(alone[2][2]) < 0                          # of at most 20 tokens, no one is certain here


def test_penalties_follow_their_definition(engine, plain):
    """Repetition counts prompt and response, presence and frequency the response alone."""
    s = {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}
    prompt, ids, logprobs = split(asyncio.run(engine.chat({**HI, **s, "max_tokens": 20})))
    with torch.no_grad():
        logits = plain(torch.tensor([prompt + ids])).logits[0]
    for j, (t, lp) in enumerate(zip(ids, logprobs, strict=True)):
        x = logits[len(prompt) + j - 1].clone()
        for v in set(prompt + ids[:j]):
            x[v] = x[v] / 1.3 if x[v] > 0 else x[v] * 1.3
        for v in set(ids[:j]):
            x[v] -= 0.4 + 0.3 * ids[:j].count(v)
        assert abs(float((x / 0.7).log_softmax(-1)[t]) - lp) < 1e-4
