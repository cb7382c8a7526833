"""In-process engine on transformers for tiny planners: continuous batching, cached prefixes, vLLM's API.

vLLM is the real engine. This one exists so that the default needs no server: it runs inside the stage that samples,
behind the same recording proxy, and its replies carry what vLLM's carry: token ids, finish_reason, usage, log-probs of
the distribution that was sampled from (processed_logprobs: penalties, temperature, min-p, top-k, top-p).

A slot is a lane of key/value memory, and keeps its content after its request. A new prompt takes over the longest
prefix that any slot holds, of its own last call or of another attempt, and computes only the rest. Each step is one
forward over new prompts, or one over all running requests. Transformers' own model code does the forward; only the
cache is ours. float32 throughout: log-probs agree with the trainer's to 1e-4.

Slots are for text models whose layers all are full attention. Any other (Qwen3.5's gated delta nets, sliding windows,
models that see pictures) goes the plain way: each request has transformers' own cache, its whole prompt is computed
once, then one token a step; no prefix is shared, and a slot is merely a place. A picture comes as a data URI; prompt
ids hold one placeholder token for each of its merged patches, as pictures.py and the gate count them.

Alone it is a small server:

    python engine.py --model run/sft --port 8000        then: python proxy.py --upstream http://127.0.0.1:8000/v1 …
"""

import argparse
import asyncio
import contextlib
import hashlib
import queue
import threading
import time
import traceback
import uuid
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, DynamicCache)

import parsing
import records
from gate import RENDER_ERRORS, picture_hashes, render_prompt
from model import cpu_kernels_only
from pictures import load_pictures
from upstream import UpstreamError
from wire import Refused, store_pictures

GREEDY = 1e-5                                            # a temperature below this is argmax, as in vLLM
NUMBER = (int, float)
FIELDS = {  # request field -> (types, range, what is expected); null stands for absent, bool is no number
    "temperature": (NUMBER, lambda x: 0 <= x < 1e9, "a number >= 0"),
    "top_p": (NUMBER, lambda x: 0 < x <= 1, "a number above 0, at most 1"),
    "top_k": ((int,), lambda x: -1 <= x < 1e9, "an integer >= 1, or -1 or 0 for all tokens"),
    "min_p": (NUMBER, lambda x: 0 <= x <= 1, "a number from 0 to 1"),
    "presence_penalty": (NUMBER, lambda x: abs(x) < 1e9, "a number"),
    "frequency_penalty": (NUMBER, lambda x: abs(x) < 1e9, "a number"),
    "repetition_penalty": (NUMBER, lambda x: 0.01 <= x <= 100, "a number from 0.01 to 100"),
    "max_tokens": ((int,), lambda x: x > 0, "a positive integer"),
    "seed": ((int,), lambda x: x >= 0, "an integer >= 0 (without one it is drawn afresh)"),
}


def _grouped_attention(module, query, key, value, attention_mask, scaling=None, **_):
    """Grouped-query attention without copying keys to every query head: a group's heads become extra query positions.

    query (B, heads, Q, D), key and value (B, kv, T, D), attention_mask (B, 1, heads // kv * Q, T) -> (B, Q, heads, D)
    """
    (B, heads, Q, D), kv = query.shape, key.shape[1]
    query = query.reshape(B, kv, heads // kv * Q, D)                                     # (B, kv, G*Q, D)
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(B, heads, Q, D).transpose(1, 2).contiguous(), None


AttentionInterface.register("grouped", _grouped_attention)


class _SlotCache:
    """Key/value memory of all slots, as transformers' cache: `update` writes the new positions, returns those in use.

    keys[l], values[l]: (slots, kv_heads, max_length, head_dim). A step sets `rows` (B,), its slots, `positions` (B, Q),
    where to write, and `width`: all positions below it are returned.
    """

    def __init__(self, config, slots, max_length):
        kv, heads = config.num_key_value_heads, config.num_attention_heads
        shape = (slots, kv, max_length, getattr(config, "head_dim", None) or config.hidden_size // heads)
        self.keys, self.values = ([torch.zeros(shape) for _ in range(config.num_hidden_layers)] for _ in "kv")

    def update(self, key, value, layer, *_, **__):
        """key, value (B, kv_heads, Q, head_dim) -> (B, kv_heads, width, head_dim) each"""
        out = []
        for memory, x in ((self.keys[layer], key), (self.values[layer], value)):
            memory[self.rows[:, None], :, self.positions] = x.transpose(1, 2)
            out.append(memory.narrow(2, 0, self.width).index_select(0, self.rows))
        return out


class _Received(dict):
    """The pictures of one request, sha256 -> bytes: what wire.py and gate.py use of a records.ImageStore, in memory."""

    def put_data_uri(self, url):
        data = records.decode_data_uri(url)
        sha = hashlib.sha256(data).hexdigest()
        self[sha] = data
        return sha


class _Request:
    def __init__(self, prompt, sampling, max_tokens, seed, done, patches=()):
        self.prompt, self.sampling, self.max_tokens, self.done = prompt, sampling, max_tokens, done
        self.patches = patches                           # of each picture: (pixel values (P, D), grid (3,))
        self.uniform = np.random.default_rng(seed).random(max_tokens).tolist()      # one per token, whatever the batch
        self.ids, self.logprobs, self.slot = [], [], None
        self.computed, self.pending = 0, prompt          # count of tokens whose keys are there; tokens to compute next
        self.neutral = sampling == records.TRAIN_SAMPLING
        self.gone = False                                # set when nobody waits for the reply any more
        self.arrived = self.began = time.perf_counter()


class Engine:
    """`await engine.chat(body)` -> chat.completion dict. Raises UpstreamError: 400 for a request that cannot be served.

    slots: prefixes kept; batch: requests generated together (both counts); max_length: prompt plus response (tokens).
    """

    def __init__(self, checkpoint, slots=64, batch=32, max_length=2048, threads=1):
        counts = {"--slots": slots, "--batch": batch, "--max-length": max_length, "--threads": threads}
        if wrong := [f"{name} {value}" for name, value in counts.items() if value < 1]:
            raise records.BadInput(f"{', '.join(wrong)}: must be at least 1")
        if batch > slots:
            raise records.BadInput(f"--batch {batch}: each running request needs a slot, --slots is {slots}; raise it")
        torch.set_num_threads(threads)
        folder = self.folder = Path(checkpoint)
        self.model, self.policy_version = folder.name, records.policy_version(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        cpu_kernels_only()
        self.pictures, config = load_pictures(folder), AutoConfig.from_pretrained(folder).get_text_config()
        layers = set(getattr(config, "layer_types", None) or ["full_attention"])
        self.plain = self.pictures is not None or layers != {"full_attention"}
        # The processor is loaded here, so that a checkpoint without one is refused before its weights are read.
        auto = AutoModelForImageTextToText if self.pictures and self.pictures.processor else AutoModelForCausalLM
        attention = "sdpa" if self.plain else "grouped"
        self.net = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()
        if self.pictures and not hasattr(self.net.model, "get_rope_index"):
            raise records.BadInput(f"{folder}: the in-process engine serves pictures to models of Qwen's line (positions in "
                                   f"time, height and width), found {self.net.config.model_type}; use vLLM")
        eos = self.net.generation_config.eos_token_id
        # The tokenizer's too, as in vLLM: Qwen3.5's config.json names <|endoftext|> alone, a turn ends with <|im_end|>.
        self.eos = {*(eos if isinstance(eos, list) else [eos]), self.tokenizer.eos_token_id} - {None}
        self.max_length = min(max_length, config.max_position_embeddings)
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.batch, self.vocab = batch, config.vocab_size
        self.cache = None if self.plain else _SlotCache(config, slots, self.max_length)
        self.held = np.full((slots, self.max_length), -1)                # token ids whose keys a slot holds, then -1
        self.prompts, self.used = np.zeros(slots, int), np.zeros(slots)  # last request: its prompt length, its end (s)
        self.free, self.inbox, self.closed = set(range(slots)), queue.SimpleQueue(), False
        self.counts = {"prefilled": 0, "cached": 0, "generated": 0, "steps": 0, "cancelled": 0, "failed": 0}
        self.thread = threading.Thread(target=self._loop, daemon=True, name="engine")
        self.thread.start()

    # ------------------------------------------------------------ the API

    async def ready(self):
        pass                                             # its weights never change

    async def chat(self, body, episode_id=""):
        for name, (types, test, expected) in FIELDS.items():
            if (x := body.get(name)) is not None and not (type(x) in types and test(x)):
                raise UpstreamError(400, f"{name} must be {expected}, found {repr(x)[:80]}")
        kwargs, patches = body.get("chat_template_kwargs"), []
        received = _Received() if self.pictures else None
        try:
            messages = body["messages"]
            if self.pictures:
                messages = store_pictures(messages, received)
                patches = [self.pictures.inputs(received[sha]) for sha in picture_hashes(messages)]
            prompt = render_prompt(self.tokenizer, messages, body.get("tools"), kwargs, received, self.pictures)
        except Refused as e:
            raise UpstreamError(*e.args) from None
        except RENDER_ERRORS as e:
            raise UpstreamError(400, f"messages cannot be rendered: {type(e).__name__}: {e}") from None
        limit = min(body.get("max_tokens") or self.max_length, self.max_length - len(prompt) - 1)
        if limit < 1:
            raise UpstreamError(400, f"maximum context length is {self.max_length} tokens, prompt has {len(prompt)}")
        if self.closed:
            raise UpstreamError(503, "the engine is closed")
        loop, future = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def done(request, error=None):
            def settle():
                if not future.done():
                    future.set_exception(error) if error else future.set_result(request)
            with contextlib.suppress(RuntimeError):      # the event loop was closed meanwhile: nobody waits
                loop.call_soon_threadsafe(settle)

        sampling = {k: v if body.get(k) is None else body[k] for k, v in records.TRAIN_SAMPLING.items()}
        request = _Request(prompt, sampling, limit, body.get("seed"), done, patches)
        self.inbox.put(request)
        try:
            await future
        finally:
            request.gone = True                          # cancelled: the loop drops it at its next step
        return self._reply(request, body.get("tools"))

    def _reply(self, request, tools):
        prompt, ids = request.prompt, request.ids
        text, opened = self.tokenizer.decode(ids, skip_special_tokens=True), parsing.opened(self.tokenizer.decode(prompt[-8:]))
        content, reasoning, calls = parsing.parse_output(text, parsing.xml_calls(self.tokenizer.chat_template), opened, tools)
        message = {"role": "assistant", "content": content}
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [{"id": f"call_{uuid.uuid4().hex[:12]}", "type": "function",
                                      "function": {"name": n, "arguments": a}} for n, a in calls]
        finish = "length" if ids[-1] not in self.eos else "tool_calls" if calls else "stop"
        logprobs = [{"token": f"token_id:{i}", "logprob": lp} for i, lp in zip(ids, request.logprobs, strict=True)]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
        choice = {"index": 0, "message": message, "finish_reason": finish, "token_ids": ids,
                  "logprobs": {"content": logprobs}}
        return {"id": f"chatcmpl-{uuid.uuid4().hex[:16]}", "object": "chat.completion", "created": int(time.time()),
                "model": self.model, "prompt_token_ids": prompt, "policy_version": self.policy_version,
                "queue_seconds": request.began - request.arrived, "choices": [choice], "usage": usage}

    async def close(self):
        """Ends the thread; requests that still run or wait get UpstreamError(503)."""
        self.closed = True
        self.inbox.put(None)
        await asyncio.to_thread(self.thread.join)

    # ------------------------------------------------------------ the loop (its own thread)

    @torch.inference_mode()
    def _loop(self):
        waiting, running = [], []
        while True:
            with contextlib.suppress(queue.Empty):       # take all that has arrived; block only when nothing is to do
                while request := self.inbox.get(block=not (waiting or running)):
                    waiting.append(request)
                for r in running + waiting:              # None: the engine is being closed
                    r.done(r, UpstreamError(503, "the engine was closed"))
                return
            for r in [r for r in running + waiting if r.gone]:           # `gone` may change at any time: read once
                (waiting if r.slot is None else running).remove(r)
                if r.slot is not None:
                    self._release(r)
                self.counts["cancelled"] += 1
            fresh, places = [], self.batch - len(running)
            if places >= min(len(waiting), max(1, self.batch // 8)):      # under load: fewer and fuller prompt steps
                fresh, waiting = waiting[:places], waiting[places:]
            running += fresh
            if running:
                self._step(fresh or running, fresh)
            running = [r for r in running if r.slot is not None]

    def _step(self, batch, fresh):
        """Seats the fresh requests, then one token for each of the batch; those that end give up their slot.

        An exception fails this batch and no other request: the forward writes to the batch's own slots only.
        """
        try:
            for r in fresh:
                self._seat(r)
            self._append(batch, self._forward_plain(batch) if self.plain else self._forward(batch))
            for r in batch:
                if r.ids[-1] in self.eos or len(r.ids) == r.max_tokens:
                    self._release(r)
                    r.done(r)
        except Exception as e:                           # the clients and the log learn of it
            traceback.print_exc()
            self.counts["failed"] += len(batch)
            for r in batch:
                if r.slot is not None:
                    self.held[r.slot] = -1
                    self._release(r)
                r.done(r, UpstreamError(500, f"engine: {type(e).__name__}: {e}"))

    def _seat(self, r):
        """Gives the request a place, and the counts that its sampling asks for."""
        r.began = time.perf_counter()
        if self.plain:
            r.slot, r.cache = self.free.pop(), DynamicCache(config=self.net.config)
        else:
            self._take_slot(r)
        if not r.neutral:
            r.said = torch.zeros(self.vocab)                                             # (V,) times generated
            r.read = torch.zeros(self.vocab, dtype=torch.bool)                           # (V,) is in the prompt
            r.read[r.prompt] = True
        self.counts["cached"] += r.computed
        self.counts["prefilled"] += len(r.pending)

    def _take_slot(self, r):
        """A free slot, with the longest prefix of the request's prompt that any slot holds."""
        prompt = np.array(r.prompt)
        differs = self.held[:, :len(prompt)] != prompt                                   # (slots, P)
        differs[:, -1] = True                            # the last token is always computed: its logits are needed
        shared = differs.argmax(1)                                                       # (slots,) common prefix length
        n = r.computed = int(shared.max())
        sources = np.flatnonzero(shared == n).tolist()
        # Continue a slot whose whole last prompt is in ours (our last call's); else copy to the one unused for longest.
        own = [s for s in sources if s in self.free and n >= self.prompts[s]]
        r.slot = own[0] if own else min(self.free, key=self.used.__getitem__)
        self.free.remove(r.slot)
        self.held[r.slot, n:] = -1                       # forgotten before the forward overwrites the keys
        if r.slot not in sources:
            for memory in self.cache.keys + self.cache.values:
                memory[r.slot, :, :n] = memory[sources[0], :, :n]
            self.held[r.slot, :n] = prompt[:n]
        self.prompts[r.slot], r.pending = len(prompt), r.prompt[n:]

    def _release(self, r):
        self.used[r.slot] = time.perf_counter()
        self.free.add(r.slot)
        r.slot = r.cache = None

    def _forward(self, batch):
        """One forward over the pending tokens of B requests -> logits of their next tokens (B, V)"""
        new, start, rows = np.array([(len(r.pending), r.computed, r.slot) for r in batch]).T                 # (B,) each
        Q, width = int(new.max()), int((start + new).max()) + 1
        ids = np.full((len(batch), Q), -1)                                               # (B, Q)
        for row, r in zip(ids, batch, strict=True):
            row[:len(r.pending)] = r.pending
        # A padding query sits right after its row's last token: that place is rewritten before anyone may attend to it.
        positions = start[:, None] + np.minimum(np.arange(Q), new[:, None])              # (B, Q)
        self.held[rows[:, None], positions] = ids
        ids, positions, rows = (torch.from_numpy(x) for x in (ids.clip(0), positions, rows))
        ahead = torch.arange(width) > positions.repeat(1, self.groups)[:, None, :, None]                # (B, 1, G*Q, T)
        mask = torch.zeros(ahead.shape).masked_fill_(ahead, -torch.inf)                  # made once, not in every layer
        self.cache.rows, self.cache.positions, self.cache.width = rows, positions, width
        hidden = self.net.model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True,
                                past_key_values=self.cache).last_hidden_state                                # (B, Q, H)
        return self.net.lm_head(hidden[torch.arange(len(batch)), torch.from_numpy(new - 1)])                 # (B, V)

    def _forward_plain(self, batch):
        """The pending tokens of each request by itself: first its prompt, later one token. -> (B, V) as _forward"""
        out = []
        for r in batch:
            ids = torch.tensor([r.pending])                                              # (1, Q)
            seen = self._seen(r, ids) if self.pictures else {}
            out.append(self.net(input_ids=ids, past_key_values=r.cache, use_cache=True, logits_to_keep=1, **seen).logits[0, -1])
        return torch.stack(out)                                                          # (B, V)

    def _seen(self, r, ids):
        """What a model with pictures takes beside the ids: the patches, with the prompt, and the positions (3, 1, Q).

        A picture's tokens stand side by side in height and width, so that text after them goes on `shift` (below 0) from
        its index. The model would keep one shift, of whoever came last (rope_deltas): positions are always given.
        """
        if r.computed:
            return {"position_ids": torch.full((3, 1, 1), r.computed + r.shift)}
        grids = torch.stack([grid for _, grid in r.patches]) if r.patches else None      # (pictures, 3)
        kinds = (ids == self.pictures.token).long()                                      # (1, Q) 1 where a picture is
        positions, shift = self.net.model.get_rope_index(input_ids=ids, mm_token_type_ids=kinds, image_grid_thw=grids)
        r.shift = int(shift)
        if not r.patches:
            return {"position_ids": positions}
        pixels = torch.cat([pixels for pixels, _ in r.patches])                          # (patches of all pictures, D)
        return {"position_ids": positions, "pixel_values": pixels, "image_grid_thw": grids}

    def _append(self, batch, logits):
        """Samples one token of each request from logits (B, V), and notes its log-prob."""
        log_q = torch.log_softmax(logits, -1)                                            # (B, V)
        shaped = [i for i, r in enumerate(batch) if not r.neutral]
        if shaped:
            log_q[shaped] = self._processed([batch[i] for i in shaped], logits[shaped])
        chosen = self._choose(batch, log_q)                                              # (B,)
        values = log_q.gather(1, chosen[:, None])[:, 0].clamp(max=0)                     # (B,)
        for r, token, value in zip(batch, chosen.tolist(), values.tolist(), strict=True):
            r.computed += len(r.pending)
            r.pending = [token]                          # has no key yet: the next step, or the next call, computes it
            r.ids.append(token)
            r.logprobs.append(value)
            if not r.neutral:
                r.said[token] += 1
        self.counts["steps"] += 1
        self.counts["generated"] += len(batch)

    def _processed(self, batch, logits):
        """(B, V) logits -> log-probs of the sampled distribution; vLLM's order: penalties, temperature, min-p, …"""
        s = {k: torch.tensor([[float(r.sampling[k])] for r in batch]) for k in batch[0].sampling}          # (B, 1) each
        said, read = torch.stack([r.said for r in batch]), torch.stack([r.read for r in batch])              # (B, V)
        x, repeat, V = logits, s["repetition_penalty"], logits.shape[1]
        x = torch.where(read | (said > 0), torch.where(x > 0, x / repeat, x * repeat), x)                    # (B, V)
        x = x - s["frequency_penalty"] * said - s["presence_penalty"] * (said > 0)
        x = x / torch.where(s["temperature"] < GREEDY, 1.0, s["temperature"])
        p = x.softmax(-1)                                                                # (B, V)
        x = x.masked_fill(p < s["min_p"] * p.amax(-1, keepdim=True), -torch.inf)
        ordered, order = x.sort(descending=True)                                         # (B, V) each
        k = torch.where(s["top_k"] < 1, V, s["top_k"]).clamp(max=V).long()               # (B, 1)
        cut = ordered < ordered.gather(1, k - 1)                                         # (B, V)
        p = ordered.masked_fill(cut, -torch.inf).softmax(-1)
        cut |= (p.cumsum(-1) - p >= s["top_p"]) & (s["top_p"] < 1)                     # the smallest set with that mass
        return x.masked_fill(torch.zeros_like(cut).scatter(1, order, cut), -torch.inf).log_softmax(-1)

    def _choose(self, batch, log_q):
        """Inverse-CDF sampling with each request's own uniform numbers; argmax when greedy. -> (B,) token ids"""
        u = torch.tensor([[r.uniform[len(r.ids)]] for r in batch], dtype=torch.float64)  # (B, 1)
        cdf = log_q.double().exp().cumsum(-1)                                            # (B, V)
        # first token with cdf > u * total: never one of probability 0, since its cdf does not rise
        sampled = torch.searchsorted(cdf, u * cdf[:, -1:], right=True)[:, 0].clamp(max=log_q.shape[1] - 1)   # (B,)
        greedy = torch.tensor([r.sampling["temperature"] < GREEDY for r in batch])       # (B,)
        return torch.where(greedy, log_q.argmax(-1), sampled)


# ------------------------------------------------------------ alone: a small server

async def serve(engine, port):
    from aiohttp import web

    async def completions(request):
        try:
            return web.json_response(await engine.chat(await request.json()))
        except UpstreamError as e:
            error = {"message": e.message, "type": "engine", "code": e.status}
            return web.json_response({"error": error}, status=e.status)

    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/chat/completions", completions)
    models = {"object": "list", "data": [{"id": engine.model, "object": "model", "root": str(engine.folder.resolve())}]}
    health = {"status": "ok", "policy_version": engine.policy_version}
    app.router.add_get("/v1/models", lambda _: web.json_response(models))
    app.router.add_get("/health", lambda _: web.json_response(health))
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)     # a client that leaves ends its call
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    port = runner.addresses[0][1]
    print(f"engine: {engine.model} (policy {engine.policy_version}) on http://127.0.0.1:{port}/v1", flush=True)
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
