"""In-process engine on transformers for tiny planners: continuous batching with cached prefixes, the chat-completions face of vLLM.

vLLM is the real engine. This one exists so that the default needs no server: it runs inside the stage that samples, behind the same
recording proxy, and its replies carry what vLLM's carry (prompt_token_ids, token_ids, processed log-probs, finish_reason, usage).

How it works: a slot is a lane of key/value memory. A finished request leaves its keys and values in its slot, so the next call of the
same episode (whose prompt extends the last one) computes only its new tokens. Each step is one forward over the waiting prompts, or one
over all running requests. Transformers' own model code does the forward; only the cache is ours. float32 throughout: recorded
log-probs agree with the trainer's forward to 1e-4.

Log-probs are those of the distribution that was sampled from (vLLM's processed_logprobs): penalties, temperature, min-p, top-k, top-p.

Alone it is a small server:

    python engine.py --model run/sft --port 8000        then: python proxy.py --upstream http://127.0.0.1:8000/v1 …
"""

import argparse
import asyncio
import json
import queue
import re
import threading
import time
import uuid
from pathlib import Path

import numpy as np
import torch
from jinja2 import TemplateError
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

import records
from gate import render_prompt
from upstream import UpstreamError

_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_ARGUMENTS = re.compile(r'^\{\s*"name"\s*:\s*"([^"]*)"\s*,\s*"arguments"\s*:\s*(\{.*\})\s*\}$', re.DOTALL)
_THINK = re.compile(r"^\s*<think>(.*?)</think>", re.DOTALL)


def parse_output(text):
    """Generated text -> (content or None, reasoning or None, tool_calls). Unreadable calls stay in the content, as with vLLM's parsers.

    `arguments` is the exact substring that was generated, so that the history re-renders to the same text wherever it is canonical JSON.
    """
    reasoning = None
    if m := _THINK.match(text):
        reasoning, text = m[1], text[m.end():]
    calls = []
    for m in _TOOL_CALL.finditer(text):
        parts = _ARGUMENTS.match(m[1])
        try:
            if parts is None or not isinstance(json.loads(parts[2]), dict):
                return text, reasoning, []
        except ValueError:
            return text, reasoning, []
        calls.append((parts[1], parts[2]))
    if calls and (_TOOL_CALL.sub("", text[text.index("<tool_call>"):]).strip() or text.count("<tool_call>") != len(calls)):
        return text, reasoning, []                       # text after or between calls, or a call left open: not what the model was taught
    content = text[:text.index("<tool_call>")] if calls else text
    return content or None, reasoning, calls


def _grouped_attention(module, query, key, value, attention_mask, scaling=None, **_):
    """Grouped-query attention without copying keys to every query head: the heads of a group become extra query positions.

    query (B, heads, Q, D), key and value (B, kv, T, D), attention_mask (B, 1, Q, T) bool -> (B, Q, heads, D)
    """
    B, heads, Q, D = query.shape
    kv = key.shape[1]
    query = query.reshape(B, kv, heads // kv * Q, D)                                                                 # (B, kv, G*Q, D)
    mask = attention_mask.expand(B, 1, Q, key.shape[2]).repeat(1, 1, heads // kv, 1)                                 # (B, 1, G*Q, T)
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(B, heads, Q, D).transpose(1, 2).contiguous(), None


AttentionInterface.register("grouped", _grouped_attention)


class _SlotCache:
    """Key/value memory of all slots, seen by transformers as its cache: `update` writes the new positions, returns the rows in use.

    keys[l], values[l]: (slots, kv_heads, max_length, head_dim). A batch is described by `rows` (B,), `positions` (B, Q), `width`.
    """
    is_compileable = False

    def __init__(self, config, slots, max_length):
        kv, dim = config.num_key_value_heads, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (slots, kv, max_length, dim)
        self.keys = [torch.zeros(shape) for _ in range(config.num_hidden_layers)]
        self.values = [torch.zeros(shape) for _ in range(config.num_hidden_layers)]
        self.rows = self.positions = None
        self.width = 0

    def update(self, key, value, layer, *_, **__):
        # key (B, kv_heads, Q, head_dim) -> written at (row, :, position), then all positions below `width` of these rows
        K, V = self.keys[layer], self.values[layer]
        index = (self.rows[:, None], slice(None), self.positions)
        K[index] = key.transpose(1, 2)
        V[index] = value.transpose(1, 2)
        return (K.narrow(2, 0, self.width).index_select(0, self.rows), V.narrow(2, 0, self.width).index_select(0, self.rows))

    def get_seq_length(self, *_):
        return 0                                         # positions are given explicitly

    def __len__(self):
        return len(self.keys)


class _Request:
    def __init__(self, prompt, sampling, max_tokens, seed, done):
        self.prompt, self.sampling, self.max_tokens, self.done = prompt, sampling, max_tokens, done
        self.uniform = np.random.default_rng(seed).random(max_tokens)       # one number per token: batching cannot change a sample
        self.ids, self.logprobs, self.slot, self.computed = [], [], None, 0
        self.arrived = self.began = time.perf_counter()


class Engine:
    """`await engine.chat(body)` -> chat.completion dict. Raises UpstreamError(400) for a prompt that does not fit."""

    def __init__(self, checkpoint, slots=64, batch=32, max_length=2048, threads=1):
        torch.set_num_threads(threads)
        folder = Path(checkpoint)
        self.policy_version = records.policy_version(folder)
        self.model_name = self.model = folder.name
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="grouped").eval()
        config = self.net.config
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise records.BadInput(f"{folder}: the in-process engine serves full attention only, this model has {sorted(kinds)}; use vLLM")
        eos = self.net.generation_config.eos_token_id
        self.eos = set(eos if isinstance(eos, list) else [eos])
        self.max_length = min(max_length, config.max_position_embeddings)
        self.batch, self.cache = batch, _SlotCache(config, slots, self.max_length)
        self.slot_ids = [[] for _ in range(slots)]       # token ids whose keys and values a slot holds
        self.slot_used = [0.0] * slots                   # last use, for eviction
        self.busy = set()
        self.inbox, self.counts = queue.SimpleQueue(), {"prefilled": 0, "cached": 0, "generated": 0, "steps": 0}
        self.thread = threading.Thread(target=self._loop, daemon=True, name="engine")
        self.thread.start()

    # ------------------------------------------------------------------------------------------ face

    async def chat(self, body):
        tools = body.get("tools") or []
        kwargs = body.get("chat_template_kwargs") or {}
        try:
            prompt = render_prompt(self.tokenizer, body["messages"], tools, kwargs)
        except (KeyError, TypeError, ValueError, TemplateError) as e:
            raise UpstreamError(400, f"messages cannot be rendered: {type(e).__name__}: {e}") from None
        limit = min(body.get("max_tokens") or self.max_length, self.max_length - len(prompt) - 1)
        if limit < 1:
            raise UpstreamError(400, f"maximum context length is {self.max_length} tokens, the prompt has {len(prompt)}")
        loop, future = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def done(request, error=None):
            def settle():
                if not future.done():
                    future.set_exception(error) if error else future.set_result(request)
            loop.call_soon_threadsafe(settle)

        sampling = {**records.TRAIN_SAMPLING, **{k: body[k] for k in records.TRAIN_SAMPLING if body.get(k) is not None}}
        self.inbox.put(_Request(prompt, sampling, limit, body.get("seed"), done))
        request = await future
        ids = request.ids
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        content, reasoning, calls = parse_output(text)
        message = {"role": "assistant", "content": content}
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [{"id": f"call_{uuid.uuid4().hex[:12]}", "type": "function",
                                      "function": {"name": n, "arguments": a}} for n, a in calls]
        finish = "length" if ids[-1] not in self.eos else "tool_calls" if calls else "stop"
        logprobs = [{"token": f"token_id:{i}", "logprob": lp} for i, lp in zip(ids, request.logprobs, strict=True)]
        return {"id": f"chatcmpl-{uuid.uuid4().hex[:16]}", "object": "chat.completion", "created": int(time.time()),
                "model": self.model_name, "prompt_token_ids": prompt, "policy_version": self.policy_version,
                "queue_seconds": request.began - request.arrived,
                "choices": [{"index": 0, "message": message, "finish_reason": finish, "token_ids": ids,
                             "logprobs": {"content": logprobs}}],
                "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}}

    async def close(self):
        self.inbox.put(None)
        await asyncio.to_thread(self.thread.join)

    # ------------------------------------------------------------------------------------------ the loop (its own thread)

    @torch.inference_mode()
    def _loop(self):
        waiting, running = [], []
        while True:
            try:
                while True:                              # take all that has arrived; block only when there is nothing to do
                    request = self.inbox.get(block=not (waiting or running))
                    if request is None:
                        return
                    waiting.append(request)
            except queue.Empty:
                pass
            try:
                fresh = []
                while waiting and len(running) + len(fresh) < self.batch and (slot := self._slot(waiting[0])) is not None:
                    fresh.append(self._seat(waiting.pop(0), slot))
                if fresh:
                    self._forward(fresh)
                    running += fresh
                else:
                    self._forward(running)
                running = [r for r in running if not self._finished(r)]
            except Exception as e:                       # one bad step must not hang every episode: they learn of it, and so does the log
                import traceback
                traceback.print_exc()
                for r in running + waiting:
                    r.done(r, UpstreamError(500, f"engine: {type(e).__name__}: {e}"))
                    self.busy.discard(r.slot)
                waiting, running = [], []

    def _slot(self, request):
        """The free slot that holds the longest prefix of this prompt; without one, the free slot unused for longest."""
        best, longest, oldest = None, 0, None
        for s, ids in enumerate(self.slot_ids):
            if s in self.busy:
                continue
            n = len(ids)
            if longest < n < len(request.prompt) and ids == request.prompt[:n]:
                best, longest = s, n
            if oldest is None or self.slot_used[s] < self.slot_used[oldest]:
                oldest = s
        return oldest if best is None else best

    def _seat(self, request, slot):
        held = self.slot_ids[slot]
        n = len(held)
        request.computed = n if n < len(request.prompt) and held == request.prompt[:n] else 0
        request.slot, request.began = slot, time.perf_counter()
        self.busy.add(slot)
        self.counts["cached"] += request.computed
        self.counts["prefilled"] += len(request.prompt) - request.computed
        return request

    def _forward(self, batch):
        """One forward over B requests (new prompt tokens, or the last sampled one), then one sampled token each."""
        new = [(r.prompt + r.ids)[r.computed:] for r in batch]
        Q = max(map(len, new))
        # A padding query sits at the position after its row's last token: that place is rewritten before anyone may attend to it.
        ids = torch.tensor([x + [0] * (Q - len(x)) for x in new])                                                    # (B, Q)
        positions = torch.tensor([[r.computed + min(j, len(x)) for j in range(Q)]
                                  for r, x in zip(batch, new, strict=True)])                                         # (B, Q)
        rows, width = torch.tensor([r.slot for r in batch]), int(positions.max()) + 1
        self.cache.rows, self.cache.positions, self.cache.width = rows, positions, width
        mask = (torch.arange(width)[None, None, None, :] <= positions[:, None, :, None])                             # (B, 1, Q, width)
        hidden = self.net.model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=self.cache,
                                use_cache=True).last_hidden_state                                                    # (B, Q, H)
        last = torch.tensor([len(x) - 1 for x in new])
        logits = self.net.lm_head(hidden[torch.arange(len(batch)), last]).float()                                    # (B, V)
        log_q = self._processed(batch, logits)                                                                       # (B, V)
        chosen = self._choose(batch, log_q)                                                                          # (B,)
        values = log_q.gather(1, chosen[:, None])[:, 0].tolist()
        for r, x, token, value in zip(batch, new, chosen.tolist(), values, strict=True):
            r.computed += len(x)
            r.ids.append(token)
            r.logprobs.append(min(value, 0.0))
        self.counts["steps"] += 1
        self.counts["generated"] += len(batch)

    def _processed(self, batch, logits):
        """(B, V) logits -> log-probs of the sampled distribution, in vLLM's order: penalties, temperature, min-p, top-k, top-p."""
        neutral = records.TRAIN_SAMPLING
        if all(r.sampling == neutral for r in batch):
            return torch.log_softmax(logits, -1)
        rows = []
        for r, x in zip(batch, logits.clone(), strict=True):                                                         # x (V,)
            s = r.sampling
            out = torch.bincount(torch.tensor(r.ids, dtype=torch.long), minlength=len(x))
            if s["repetition_penalty"] != 1:
                seen = torch.bincount(torch.tensor(r.prompt + r.ids), minlength=len(x)) > 0
                x = torch.where(seen, torch.where(x > 0, x / s["repetition_penalty"], x * s["repetition_penalty"]), x)
            x = x - s["frequency_penalty"] * out - s["presence_penalty"] * (out > 0)
            if s["temperature"] > 0:
                x = x / s["temperature"]
            if s["min_p"] > 0:
                p = x.softmax(-1)
                x = x.masked_fill(p < s["min_p"] * p.max(), -torch.inf)
            if s["top_k"] and s["top_k"] > 0:
                x = x.masked_fill(x < x.topk(min(s["top_k"], len(x))).values[-1], -torch.inf)
            if s["top_p"] < 1:
                p, order = x.softmax(-1).sort(descending=True)
                cut = p.cumsum(-1) - p >= s["top_p"]                     # keep the smallest set whose mass reaches top_p
                x = x.masked_fill(torch.zeros_like(cut).scatter(0, order, cut), -torch.inf)
            rows.append(torch.log_softmax(x, -1))
        return torch.stack(rows)

    def _choose(self, batch, log_q):
        """Inverse-CDF sampling with each request's own uniform numbers; argmax at temperature 0. -> (B,) token ids"""
        u = torch.tensor([[r.uniform[len(r.ids)]] for r in batch])                                                   # (B, 1) float64
        cdf = log_q.double().exp().cumsum(-1)                                                                        # (B, V)
        # first token with cdf > u * total: never one of probability 0, since its cdf does not rise
        sampled = torch.searchsorted(cdf, u * cdf[:, -1:], right=True)[:, 0].clamp(max=log_q.shape[1] - 1)
        greedy = torch.tensor([r.sampling["temperature"] == 0 for r in batch])
        return torch.where(greedy, log_q.argmax(-1), sampled)

    def _finished(self, r):
        if r.ids[-1] not in self.eos and len(r.ids) < r.max_tokens:
            return False
        self.slot_ids[r.slot] = (r.prompt + r.ids)[:r.computed]          # the last sampled token has no key yet: the next call computes it
        self.slot_used[r.slot] = time.perf_counter()
        self.busy.discard(r.slot)
        r.done(r)
        return True


# ---------------------------------------------------------------------------------------------- alone: a small server

async def serve(engine, port):
    from aiohttp import web

    async def completions(request):
        try:
            return web.json_response(await engine.chat(await request.json()))
        except UpstreamError as e:
            return web.json_response({"error": {"message": e.message, "type": "engine", "code": e.status}}, status=e.status)

    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/chat/completions", completions)
    models = {"object": "list", "data": [{"id": engine.model_name, "object": "model"}]}
    app.router.add_get("/v1/models", lambda _: web.json_response(models))
    app.router.add_get("/health", lambda _: web.json_response({"status": "ok", "policy_version": engine.policy_version}))
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    print(f"engine: {engine.model_name} (policy {engine.policy_version}) on http://127.0.0.1:{runner.addresses[0][1]}/v1", flush=True)
    await asyncio.Event().wait()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=records.Formatter)
    p.add_argument("--model", required=True, help="checkpoint folder")
    p.add_argument("--port", type=int, default=8000, help="loopback port; 0 takes a free one")
    p.add_argument("--slots", type=int, default=64, help="episodes whose prefix is kept (count)")
    p.add_argument("--batch", type=int, default=32, help="requests generated together (count)")
    p.add_argument("--max-length", type=int, default=2048, help="prompt plus response (tokens)")
    p.add_argument("--threads", type=int, default=1, help="torch threads")
    args = p.parse_args()
    asyncio.run(serve(Engine(args.model, args.slots, args.batch, args.max_length, args.threads), args.port))


if __name__ == "__main__":
    records.run_main(main)
