"""Skills harness, in RPent's shape: a chat loop in which the planner calls one tool at a time and reads a receipt.

One episode: reset the world, post a chat completion, run the tool call, append its receipt, and so on, until

    finish         the planner called finish                  text       a reply without a tool call
    turns / time   a limit was reached (turns also: the       malformed  the second unreadable or invalid call in a row
                   server said that the context is too long)  unrecoverable  the world is in a state that no skill can mend
    infrastructure the model server or the simulator failed: the episode is invalid, not failed

Like real harnesses, it edits its history once the messages pass a budget of characters: pictures but the newest two become a line of
text, tool output but the newest four is shortened, earlier reasoning is dropped. Short episodes stay append-only.

The teacher alone sees the memory tools, and a [memory] section in its system prompt. The loop does not end on success (RPent's does not
either): the planner has to call finish, so calls after success exist and the adapter filters them.
"""

import base64
import contextlib
import functools
import json
import os
import time
from pathlib import Path

import jsonschema

from harness.chat import ChatClient, ContextTooLong, ModelServerError
from harness.frames import Frames, renderer

SYSTEM = "You move a robot hand with tools, one call at a time. Lengths are in millimetres."
MEMORY_SECTION = "\n[memory]\nRead memory_read before you act. It holds what earlier episodes wrote down.\n[/memory]"
WRITE_SECTION = "\n[memory]\nBefore you finish, write down with memory_write what later episodes of this task should know.\n[/memory]"
KEEP_PICTURES, KEEP_OUTPUTS, SHORT = 2, 4, 60       # history rewriting: newest kept whole; characters kept of older output
ECHOED = ("role", "content", "tool_calls", "reasoning", "reasoning_content")       # fields of a reply that stay in the history
CALL_UNREAD = "That tool call could not be read. Answer with one tool call in JSON."
ONE_AT_A_TIME = "Not run: another tool operation is still active."


def _tool(name, description, parameters):
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_TEXT = {"type": "string"}
LOOK = _tool("look", "Look again: what the hand holds and what there is; a picture where pictures are on.",
             {"type": "object", "properties": {}})
FINISH = _tool("finish", "End the episode.", {"type": "object", "properties": {"status": _TEXT}, "required": ["status"]})
MEMORY_READ = _tool("memory_read", "Read memory: scope is task or global.",
                    {"type": "object", "properties": {"scope": {"type": "string", "enum": ["task", "global"]}}, "required": ["scope"]})
MEMORY_WRITE = _tool("memory_write", "Write down what later episodes of this task should know.",
                     {"type": "object", "properties": {"text": _TEXT}, "required": ["text"]})


@functools.cache
def _validator(schema):
    return jsonschema.Draft202012Validator(json.loads(schema))


def _read(arguments):
    """Arguments of a tool call as JSON -> value; ValueError or RecursionError if no server could read them in the history either."""
    value = json.loads(arguments)
    json.dumps(value, ensure_ascii=False).encode()         # half a surrogate pair: UnicodeEncodeError is a ValueError
    return value


def recorded(facts):
    """Facts of a receipt as plain JSON, lengths to a tenth of a millimetre; worlds may put numpy's numbers in."""
    def plain(value):
        return round(value, 4) if isinstance(value, float) else value
    facts = json.loads(json.dumps(facts, default=lambda v: v.tolist()))
    return {k: [plain(x) for x in v] if isinstance(v, list) else plain(v) for k, v in facts.items()}


def _echo(message):
    """A reply as it stands in the history. Arguments that are no object are left out there: a server that renders its history
    answers 400 to them, and that would be infrastructure."""
    def readable(call):
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(_read(call["function"]["arguments"] or "{}"), dict):
                return call
        return {**call, "function": {**call["function"], "arguments": "{}"}}
    echo = {k: v for k, v in message.items() if k in ECHOED and v is not None}
    return {**echo, "tool_calls": [readable(c) for c in echo["tool_calls"]]} if echo.get("tool_calls") else echo


# ---------------------------------------------------------------------------------------------- history rewriting

def rewrite_history(messages, budget):
    """messages -> a new list: unchanged up to `budget` characters (pictures count 1,000), edited above it. Never edits the input."""
    def size(m):
        c = m.get("content") or ""
        n = len(c) if isinstance(c, str) else sum(len(p.get("text", "")) or 1000 for p in c)
        return n + len(m.get("reasoning_content") or m.get("reasoning") or "") + len(json.dumps(m.get("tool_calls") or ""))
    if sum(map(size, messages)) <= budget:
        return messages
    out, pictures, outputs, newest_assistant = [], 0, 0, True
    for m in reversed(messages):                         # newest first
        m = dict(m)
        if isinstance(m.get("content"), list):
            parts = []
            for part in reversed(m["content"]):
                if part["type"] == "image_url":
                    pictures += 1
                    part = part if pictures <= KEEP_PICTURES else {"type": "text", "text": "[an earlier picture was left out]"}
                parts.append(part)
            m["content"] = parts[::-1]
        if m["role"] == "tool":
            outputs += 1
            head, line, rest = m["content"].partition("\n")             # the reminder of the task stays whole
            if outputs > KEEP_OUTPUTS and len(rest) > SHORT and not rest.endswith("[shortened]"):
                m["content"] = head + line + rest[:SHORT] + " [shortened]"
        if m["role"] == "assistant":
            if not newest_assistant:
                m.pop("reasoning", None)
                m.pop("reasoning_content", None)
            newest_assistant = False
        out.append(m)
    return out[::-1]


# ---------------------------------------------------------------------------------------------- one episode

class Episode:
    """State of one attempt. `job` (all plain JSON): see adapters.SkillsAdapter.job for the fields."""

    def __init__(self, world, job, pool=None):
        self.world, self.job = world, job
        self.client = ChatClient(job["base_url"], job["request_timeout"], pool)
        self.schemas = {s.name: json.dumps(s.parameters) for s in world.skills}
        self.methods = {s.name: s for s in world.skills}
        tools = [_tool(s.name, s.description, s.parameters) for s in world.skills] + [LOOK, FINISH]
        if job["memory"]:
            tools += [MEMORY_READ] + ([MEMORY_WRITE] if job["memory_write"] else [])
        self.tools = tools
        self.schemas |= {t["function"]["name"]: json.dumps(t["function"]["parameters"]) for t in tools}
        self.events, self.finished, self.skill_seconds = [], False, 0.0

    def run(self):
        """-> outcome, a plain dict: end, success_*, start_state, events' summary, seconds. Raises what the simulator raises."""
        job, world = self.job, self.world
        began = time.monotonic()
        task = world.tasks(job["suite"])[job["index"]]
        world.disturb(job.get("noise"), job.get("noise_seed", ""))
        world.reset(task, job["init"])
        start = world.state_hash()
        reset_seconds = time.monotonic() - began
        self.reminder = f"Task: {task.instruction}\n"
        frames = Frames(world, self.reminder.strip()) if job.get("video") else None
        memory = (MEMORY_SECTION + (WRITE_SECTION if job["memory_write"] else "")) if job["memory"] else ""
        messages = [{"role": "system", "content": SYSTEM + memory},
                    {"role": "user", "content": self.reminder.strip()}]
        end, detail, bad, turn, success_turn = None, "", 0, 0, None
        while end is None:
            if turn >= job["turns"]:
                end = "turns"
                break
            if time.monotonic() - began > job["seconds"]:
                end = "time"
                break
            messages = rewrite_history(messages, job["history_budget"])
            body = {"model": job["model"], "messages": messages, "tools": self.tools, "tool_choice": "auto",
                    "max_tokens": job["max_tokens"]}
            if job.get("chat_template_kwargs"):
                body["chat_template_kwargs"] = job["chat_template_kwargs"]
            try:
                message = self.client.chat(body)
            except ModelServerError as e:
                end, detail = "infrastructure", str(e)
                break
            except ContextTooLong as e:
                end, detail = "turns" if turn else "infrastructure", str(e)     # the first prompt is none of the planner's doing
                break
            turn += 1
            messages = messages + [_echo(message)]
            if frames:
                frames.call(message)
            if not message.get("tool_calls"):
                if "<tool_call>" not in (message.get("content") or ""):
                    end = "text"
                    break
                replies, malformed = [{"role": "user", "content": CALL_UNREAD}], True
            else:
                replies, malformed = self._act(message["tool_calls"])
            messages = messages + replies
            if frames:
                frames.receipt(replies[0]["content"].removeprefix(self.reminder))
            bad = bad + 1 if malformed else 0
            world.success()
            if world.latched and success_turn is None:
                success_turn = turn - 1
            if self.finished:
                end = "finish"
            elif bad >= 2:
                end = "malformed"
            elif not world.latched and (detail := world.unrecoverable() or ""):
                end = "unrecoverable"
        final = world.success()
        if frames:
            how = f"{turn} calls, end: {end}" + (", not in the last state" if world.latched and not final else "")
            frames.save(job["video"], None if end == "infrastructure" else world.latched, how)
        rendered = {"renderer": renderer(world)} if frames or job.get("pictures") else {}
        return {"end": end, "detail": detail, "start_state": start, "success_latched": world.latched, "success_final": final,
                "success_turn": success_turn, "finished": self.finished, "turns": turn, "instruction": task.instruction,
                "steps": len(task.goal), "seconds": time.monotonic() - began, "reset_seconds": reset_seconds,
                "skill_seconds": self.skill_seconds, **rendered, **self._summary(task, end, world.latched)}

    def _act(self, tool_calls):
        """Runs the first call of a reply; the others are answered, not run. -> (reply messages, malformed)"""
        replies, malformed, pictures = [], False, []
        for k, call in enumerate(tool_calls):
            if k:
                text = ONE_AT_A_TIME
            else:
                text, malformed, pictures = self._one(call["function"]["name"], call["function"].get("arguments") or "{}")
            replies.append({"role": "tool", "tool_call_id": call.get("id") or f"call_{k}", "content": self.reminder + text})
        if pictures:                                    # never in a tool message: a user message follows them
            replies.append({"role": "user", "content": pictures})
        return replies, malformed

    def _one(self, name, arguments):
        """-> (text for the planner, malformed, picture parts)"""
        if name not in self.schemas or not any(t["function"]["name"] == name for t in self.tools):
            return f"There is no tool {name}.", True, []
        try:
            arguments = _read(arguments)
        except (ValueError, RecursionError):
            return f"The arguments of {name} are no JSON.", True, []
        error = next(_validator(self.schemas[name]).iter_errors(arguments), None)
        if error:
            return f"Bad arguments for {name}: {error.message[:80]}", True, []
        if name in self.methods:
            skill = self.methods[name]
            names = skill.parameters["properties"]
            started = time.monotonic()
            receipt = getattr(self.world, skill.method)(**{k: v for k, v in arguments.items() if k in names})
            self.skill_seconds += time.monotonic() - started
            self.events.append(recorded({"tool": name, "ok": receipt.ok, **receipt.facts}))
            return receipt.text, False, self._pictures() if skill.moves else []
        if name == "look":
            names = ", ".join(o["name"] for o in self.world.objects())
            return f"The hand holds {self.world.held or 'nothing'}. There are: {names}.", False, self._pictures()
        if name == "finish":
            self.finished = True
            return "Finished.", False, []
        return self._memory(name, arguments), False, []

    def _pictures(self):
        if not self.job.get("pictures"):
            return []
        data = base64.b64encode(self.world.render()).decode()
        return [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}]

    def _memory(self, name, arguments):
        folder = Path(self.job["memory"])
        task = folder / f"{self.job['suite']}-{self.job['index']}.md"
        if name == "memory_write":
            folder.mkdir(parents=True, exist_ok=True)
            part = task.with_suffix(f".part{os.getpid()}")             # shards may explore the same task
            part.write_text(arguments["text"] + "\n")
            part.rename(task)
            return "Written."
        path = task if arguments["scope"] == "task" else folder / "global.md"
        return path.read_text().strip() if path.exists() else "Nothing is written there."

    def _summary(self, task, end, success):
        """Counts for reports, and which kind of decision a failed episode failed on (None for a success)."""
        goal = {tuple(g[1:]) for g in task.goal}         # ("red mug", "blue tray"); of a door or a knob ("top drawer",)
        wanted, named = {o for o, *_ in goal}, {name for g in goal for name in g}
        picks = [e for e in self.events if e["tool"] == "pick" and e.get("object")]
        placed = [(e.get("object"), e.get("container") or e.get("target"))          # push says "target"
                  for e in self.events if e.get("event") in ("placed", "pushed")]
        turned = {e["object"] for e in self.events           # an empty hand that is opened has no "object"
                  if e.get("event") in ("opened", "closed", "turned") and e.get("object")}
        done = [g for g in goal if g in placed or (len(g) == 1 and g[0] in turned)]
        if success:
            failure = None
        elif end == "malformed":
            failure = "format"
        elif any(e["object"] not in wanted for e in picks) or any(p not in goal for p in placed) or turned - named:
            failure = "language"
        elif picks and picks[-1].get("event") in ("slip", "empty", "no_handle"):
            failure = "grasp"
        elif len(goal) > 1 and done:
            failure = "second_step"
        else:
            failure = "other"
        right = sum(bool(e.get("right", e["ok"])) for e in picks)            # LIBERO: those that held
        return {"failure": failure, "picks": len(picks), "picks_right": right, "goals_done": len(done), "receipts": self.events}
