"""How a harness asks its planner: one chat completion over HTTP, with the two failures that it tells apart."""

import json
import re
import time

import urllib3

CONTEXT = re.compile(r"context[ _](?:length|size|window)|maximum model length|too long|longer than", re.I)   # of a 400: prompt too long


class ModelServerError(Exception):
    """The model server could not be reached, kept failing or refused the request: infrastructure. status: HTTP's, None: no answer."""

    def __init__(self, text, status=None):
        super().__init__(text)
        self.status = status


class ContextTooLong(Exception):
    """The server answered 400: the prompt no longer fits. The planner's doing, not infrastructure."""


def _as_text(arguments):
    """Arguments of a tool call as JSON text: OpenAI's form. Some servers send the object itself."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {})


class ChatClient:
    """POST <base>/chat/completions -> the reply's message, or (`choice`) the whole choice: message and finish_reason.

    5xx, 429 and lost connections are sent again twice, byte for byte, with a retry count in the header.
    """

    def __init__(self, base_url, timeout, pool=None):
        self.url, self.timeout = base_url.rstrip("/") + "/chat/completions", timeout
        self.pool = pool or urllib3.PoolManager(maxsize=64)

    def chat(self, body):
        return self.choice(body)["message"]

    def choice(self, body):
        data, last, status = json.dumps(body).encode(), "", None
        for retry in range(3):
            if retry:
                time.sleep(0.5 * 2 ** (retry - 1))
            headers = {"Content-Type": "application/json", "x-stainless-retry-count": str(retry)}
            try:
                reply = self.pool.request("POST", self.url, body=data, headers=headers, timeout=self.timeout, retries=False)
            except urllib3.exceptions.HTTPError as e:
                last, status = f"{type(e).__name__}: {e}", None
                continue
            if reply.status == 200:
                try:
                    choice = reply.json()["choices"][0]
                    for call in choice["message"].get("tool_calls") or []:
                        call["function"] = {"name": call["function"]["name"], "arguments": _as_text(call["function"].get("arguments"))}
                    return choice
                except (ValueError, LookupError, TypeError, AttributeError) as e:
                    raise ModelServerError(f"reply is no chat completion ({type(e).__name__}: {e})") from None
            last, status = f"HTTP {reply.status}: {reply.data[:300].decode(errors='replace')}", reply.status
            if reply.status == 400 and CONTEXT.search(last):
                raise ContextTooLong(last)
            if reply.status < 500 and reply.status != 429:
                break
        raise ModelServerError(last, status)
