"""Between the wire formats, for proxy.py.

    a client's request  ->  what is recorded of it, and the body that goes upstream
    the engine's reply  ->  a Call, and the bytes that the client gets (a chat.completion, or its server-sent events)

Pure functions (store_pictures alone writes files). A request that would bend the policy's own distribution, or that could not be
recorded whole, is `Refused`; a reply that breaks the protocol is an UpstreamError. A reply with ids or log-probs missing is neither:
it is recorded as it came, and records.call_problem() says why it is never trained on.
"""

import hashlib
import json
import re

import msgspec
from aiohttp import web

import records
from upstream import UpstreamError

PARTS = ("text", "refusal", "thinking", "image_url")       # content parts that can be recorded in full
NEUTRAL = {  # fields that bend the policy's own distribution (or the one-reply form), and their values that do not
    "n": (None, 1), "best_of": (None, 1), "use_beam_search": (None, False),
    "ignore_eos": (None, False), "min_tokens": (None, 0), "logit_bias": (None, {}), "allowed_token_ids": (None, []),
    "bad_words": (None, []), "thinking_token_budget": (None,), "structured_outputs": (None,), "guided_json": (None,),
    "guided_regex": (None,), "guided_choice": (None,), "guided_grammar": (None,),
    "response_format": (None, {"type": "text"}), "tool_choice": (None, "auto", "none"), "repetition_detection": (None,),
    "watermarking": (None,), "vllm_xargs": (None, {}), "logprob_token_ids": (None, []),
}
PLAIN = {  # fields that make vLLM render another prompt than the messages say, so that the gate would refuse the call
    "add_generation_prompt": (None, True), "continue_final_message": (None, False), "chat_template": (None,), "documents": (None, []),
    "truncate_prompt_tokens": (None,), "add_special_tokens": (None, False), "echo": (None, False), "kv_transfer_params": (None, {}),
    "ec_transfer_params": (None, {}), "mm_processor_kwargs": (None, {}), "media_io_kwargs": (None, {}),
}
TEMPLATE_KWARGS = ("tools", "tokenize", "chat_template", "conversation")     # of chat_template_kwargs: not a template's own variables
TYPES = {"tools": list, "chat_template_kwargs": dict, "model": str, "stream": bool, "stream_options": dict}
KNOWN = {  # fields that a Call holds elsewhere or that the proxy sets itself; all others are kept as `request`
    "messages", "tools", "model", "chat_template_kwargs", "stream", "stream_options", "n", "logprobs", "top_logprobs",
    "return_token_ids", "return_weight_versions", "include_reasoning", "skip_special_tokens", "max_tokens",
    "max_completion_tokens", "seed",
}


class Refused(Exception):
    """Refused(status, message): the request is wrong or cannot be recorded; an error in the API's own form and no Call."""


# ---------------------------------------------------------------------------------------- requests

def derive_seed(seed, episode_id, turn):
    """Own seed of a call, in [0, 2^53): exact in JSON. Episode ids may recur, so give each round its own `seed`."""
    digest = hashlib.blake2b(f"{seed}/{episode_id}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 11


def parse_body(raw):
    """Request bytes -> dict; Refused if it is no chat completion or cannot be recorded faithfully."""
    try:
        body = records.from_json(raw)
    except (ValueError, RecursionError) as e:
        raise Refused(400, f"request body is not JSON: {e}") from None
    messages = body.get("messages") if isinstance(body, dict) else None
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise Refused(400, "the body must be an object whose messages are a non-empty list of objects")
    for name, kind in TYPES.items():
        if not isinstance(body.get(name), (kind, type(None))):
            raise Refused(400, f"{name} must be a {kind.__name__} or null, found {type(body[name]).__name__}")
    if body.get("stream_options") is not None and not body.get("stream"):
        raise Refused(400, "The 'stream_options' parameter is only allowed when 'stream' is enabled.")       # OpenAI's words
    for name, neutral in NEUTRAL.items():
        if name in body and body[name] not in neutral:
            raise Refused(400, f"{name}={json.dumps(body[name])[:80]} is not supported: the recorded log-probs would "
                               f"not be the policy's; accepted: {', '.join(map(json.dumps, neutral))}")
    for name, plain in PLAIN.items():
        if name in body and body[name] not in plain:
            raise Refused(400, f"{name}={json.dumps(body[name])[:80]} is not supported: the prompt would not be what the messages say; "
                               f"accepted: {', '.join(map(json.dumps, plain))}")
    kwargs = body.get("chat_template_kwargs") or {}
    if wrong := [name for name in TEMPLATE_KWARGS if name in kwargs]:
        raise Refused(400, f"chat_template_kwargs: {wrong[0]} is not a variable of a chat template")
    if (effort := body.get("reasoning_effort")) is not None:       # vLLM makes template variables of it: recorded as what they are
        body["chat_template_kwargs"] = {"enable_thinking": effort != "none", **kwargs, "reasoning_effort": effort}
    if body.get("tools") == []:                            # the same to a template, and a 400 to vLLM
        del body["tools"]
    for name in ("max_tokens", "max_completion_tokens"):
        if body.get(name) is not None and (type(body[name]) is not int or body[name] < 1):
            raise Refused(400, f"{name} must be a positive integer, found {repr(body[name])[:80]}")
    return body


def store_pictures(messages, images):
    """Messages with every picture put into `images` and replaced by its hash; the originals stay as they are."""
    return [{**m, "content": [_store_part(part, images) for part in m["content"]]}
            if isinstance(m.get("content"), list) else m for m in messages]


def _store_part(part, images):
    kind = part.get("type", "text") if isinstance(part, dict) else "text"
    if kind not in PARTS:
        raise Refused(400, f"content part of type {kind!r} cannot be recorded; supported: {', '.join(PARTS)}")
    if kind != "image_url":
        return part
    url = part.get("image_url")
    url = str(url.get("url") if isinstance(url, dict) else url)
    try:
        return {"type": "image", "sha256": images.put_data_uri(url)}
    except ValueError as e:
        raise Refused(400, f"bad picture: {e}") from None


def asked_otherwise(body, sampling, asked_max):
    """What the client asked for and does not get as asked -> `extra` of its Call: other sampling, a stream, unknown fields."""
    asked = {k: v for k, v in {**body, "max_tokens": asked_max}.items() if k in sampling and v not in (None, sampling[k])}
    asked.update((k, body[k]) for k in ("stream", "stream_options") if body.get(k))      # upstream is always asked unstreamed
    rest = {k: v for k, v in body.items() if k not in KNOWN and k not in sampling and v is not None}
    return {"asked": asked, "request": rest}


def engine_request(body, model, sampling):
    """The body that goes upstream: the client's, with all that recording needs."""
    sent = {"skip_special_tokens": True, **body, "model": model, **sampling, "n": 1, "stream": False, "logprobs": True,
            "return_token_ids": True, "return_weight_versions": True, "include_reasoning": True}
    for name in ("max_completion_tokens", "stream_options") + (() if body.get("logprobs") else ("top_logprobs",)):
        sent.pop(name, None)
    return sent


# ---------------------------------------------------------------------------------------- replies

def read_reply(call, reply):
    """Fills a Call from an upstream reply. Missing ids or log-probs stay empty: records.call_problem() names them."""
    try:
        if len(reply["choices"]) != 1:
            raise ValueError(f"{len(reply['choices'])} choices, expected 1")
        choice, call.prompt_token_ids = reply["choices"][0], msgspec.convert(reply.get("prompt_token_ids") or [], list[int])
        call.message, call.finish_reason = dict(choice["message"]), choice.get("finish_reason")
        call.token_ids = msgspec.convert(choice.get("token_ids") or [], list[int])
        entries = (choice.get("logprobs") or {}).get("content") or []
        call.logprobs = msgspec.convert([entry.get("logprob") for entry in entries], list[int | float | None])
        call.model = reply.get("model") or call.model
        if "queue_seconds" in reply:                       # of the in-process engine; adapters tell slow serving by it
            call.extra["queue_seconds"] = reply["queue_seconds"]
        if isinstance(reply.get("usage"), dict):           # what an endpoint was paid for; a teacher's reply has no token ids to count
            call.extra["usage"] = {k: reply["usage"].get(k) for k in ("prompt_tokens", "completion_tokens")}
        if reply.get("policy_version") not in (None, call.policy_version):                 # the in-process engine says its own
            call.policy_version_end = reply["policy_version"]
        versions = list(dict.fromkeys(str(span["version"]) for span in choice.get("weight_versions") or []))
        if versions not in ([], ["default"], [call.policy_version]):       # vLLM >= 0.33: weights changed between two tokens, or behind us
            call.policy_version_end = "+".join(versions)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as e:
        raise UpstreamError(502, f"malformed reply ({type(e).__name__}: {e})") from None
    if call.finish_reason in ("abort", "error"):           # vLLM: the engine was paused or broke; a fragment
        raise UpstreamError(503, f"generation ended with finish_reason {call.finish_reason}")


def client_reply(call, reply, body):
    """The bytes that the harness gets: the engine's reply without what only the recording asked for; events if it asked for a stream."""
    hidden = {"policy_version", "queue_seconds"}
    if not body.get("return_token_ids"):
        hidden |= {"prompt_token_ids", "token_ids"}
    if not body.get("return_weight_versions"):
        hidden.add("weight_versions")
    choice = {k: v for k, v in reply["choices"][0].items() if k not in hidden}
    if not body.get("logprobs"):
        choice["logprobs"] = None
    out = {"id": f"chatcmpl-{call.call_id}", "object": "chat.completion", "created": int(call.started)}
    out.update((k, v) for k, v in reply.items() if k not in hidden)
    out = {**out, "model": call.model, "choices": [choice]}
    return b"".join(events(out, body.get("stream_options") or {})) if body.get("stream") else records.to_json(out)


def events(completion, options):
    """Yields a whole chat.completion as the server-sent events of a stream, ordered as vLLM's: role, reasoning, content, tool calls,
    the finish (here with all log-probs and ids, since the texts of tokens are not cut anew), usage, [DONE]."""
    usage, choice = completion.pop("usage", None), completion.pop("choices")[0]
    message = dict(choice.pop("message"))                  # a retry that waits for the same reply makes its own events of it
    common = {**{k: completion[k] for k in ("id", "created", "model")}, "object": "chat.completion.chunk"}

    def event(choices, **more):
        # ASCII: some clients take U+2028 and U+0085, which JSON need not escape, for the end of a line.
        return b"data: " + json.dumps({**common, **more, "choices": choices}).encode() + b"\n\n"

    def chunk(delta, **more):
        return event([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}], **more)

    role = {"role": message.pop("role", "assistant"), "content": None if message.get("content") is None else ""}
    yield chunk(role, **{k: v for k, v in completion.items() if k not in common and v is not None})     # e.g. prompt_token_ids
    calls = message.pop("tool_calls", None) or []
    for name in sorted(message, key=lambda name: not name.startswith("reasoning")):
        if message[name]:
            yield chunk({name: message[name]})
    for i, call in enumerate(calls):
        yield chunk({"tool_calls": [{"index": i, **call}]})
    yield event([{"index": 0, **choice, "delta": {}}])
    if options.get("include_usage"):
        yield event([], usage=usage)
    yield b"data: [DONE]\n\n"


# ---------------------------------------------------------------------------------------- responses

def json_response(value, status=200, headers=None):
    return web.Response(body=records.to_json(value), status=status, content_type="application/json", headers=headers)


def reply_response(data, stream):
    return web.Response(body=data, content_type="text/event-stream" if stream else "application/json")


def error_response(status, message, kind="invalid_request_error", path="", retry_after=None):
    """An error in the form of the API that `path` belongs to."""
    headers = {"Retry-After": retry_after} if retry_after else {}
    if status in (501, 507):
        headers["x-should-retry"] = "false"                # openai and anthropic clients would try 5xx again
    error = {"message": message, "type": kind, "param": None, "code": status}
    if "/v1/messages" in path:
        return json_response({"type": "error", "error": {"type": kind, "message": message}}, status, headers)
    return json_response({"error": error}, status, headers)


def upstream_error_response(e):
    """4xx (context overflow, 429) is passed as the engine said it; the rest: 502, 503, 504 or 507."""
    retry_after = e.retry_after
    if 400 <= e.status < 500:
        return error_response(e.status, e.message, retry_after=retry_after)
    return error_response(e.status if e.status in (503, 504, 507) else 502, str(e), "upstream_error", retry_after=retry_after)


OTHER_APIS = {"responses": "OpenAI's Responses", "messages": "Anthropic's Messages", "completions": "the legacy completions"}


def refuse_other_api(path):
    """Refused(501) for an API that is not recorded, naming what to use in its place; else nothing."""
    if api := re.search(r"/v1/(responses|messages|completions)(/|$)", path):
        raise Refused(501, f"{path}: {OTHER_APIS[api[1]]} API is not recorded here; use …/v1/chat/completions: in the openai client "
                           "chat.completions.create(…), in pydantic-ai OpenAIChatModel, in RPent --model openai-chat:<name>")
