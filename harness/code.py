"""Code harness, in CaP-X's shape: the planner writes Python against a documented API, sees what it printed, and goes on or finishes.

One episode: reset the world; then, turn by turn, post a chat completion, read the reply (replies.py), run its program in the sandboxed
session (sandbox.py) whose API calls arrive here (code_api.py), and show the output in the next prompt, until

    finish         the planner said FINISH, or its only program has run (--single-turn)
    turns / time   a limit was reached: programs, motions (code_api.MOTIONS), seconds (turns also: the context became too long)
    malformed      the second reply in a row without a program, or the only one; or the server refuses a prompt (400) that differs from
                   one it took by programs and their output alone: they spell a template's mark of a picture, half a surrogate pair, …
    unrecoverable  the world is in a state that no program can mend
    infrastructure the model server or the simulator failed: the episode is invalid, not failed

Every prompt is two messages and no chat history: the API; then the task, all programs so far, and the output of the last one. So a call's
prompt is no extension of the one before. Success does not end the episode (CaP-X's does not either): the planner has to say so.

Not repeated of CaP-X: goal text missing from later turns; the decision word found anywhere in a reply; programs in the process that holds
the simulator; time-outs swallowed by the program's own `except`; one success value (here: latched, looked at after every motion,
and in the final state).
"""

import base64
import time
from collections import Counter

from harness.chat import ChatClient, ContextTooLong, ModelServerError
from harness.code_api import api_class, EpisodeOver
from harness.frames import Frames, renderer
from harness.replies import read_reply
from harness.skills import recorded

SYSTEM = "You control a robot by writing Python. Only these functions act and perceive; numpy is np.\n"
ASK = "Reply with one ```python block."
DECIDE = "If the task is done, reply FINISH. Else reply REGENERATE and one ```python block that goes on from here."
LEFT_OUT = "# left out"
BLOCK_SECONDS, BLOCK_CPU = 60.0, 10.0       # own wall seconds of a program (a loaded machine is no reason to fail), and its CPU seconds


def prompt(task, programs, block, note, budget):
    """The user message. programs: texts that ran; block: what the last one gave (or None); note: why nothing ran since, or None.

    budget: characters of programs; above it the earliest are left out. At least the last one stands whole.
    """
    parts, size, shown = [f"Task: {task.instruction}"], 0, []
    for number, text in reversed(list(enumerate(programs, 1))):
        size += len(text)
        shown.append(f"# block {number}\n{_unmarked(text) if not shown or size <= budget else LEFT_OUT}")
    if programs:
        parts.append("Program so far:\n```python\n" + "\n".join(reversed(shown)) + "\n```")
        parts.append(f"Output of block {len(programs)}:\n{_unmarked(block.stdout) or '(nothing printed)'}")
        if block.stderr.strip():
            parts.append(f"Errors:\n{_unmarked(block.stderr)}")
    if note:
        parts.append(f"Nothing was run: {note}.")
    return "\n".join([*parts, DECIDE if programs else ASK])


def _unmarked(text):
    """A planner's text as it may stand in a prompt: no <|token|> of a template (one that stands for a picture would break the request)."""
    return text.rstrip().replace("<|", "< |")


class Episode:
    """State of one attempt. `job` (all plain JSON): see adapters.CodeAdapter.job for the fields. sandbox: the process's Sandbox."""

    def __init__(self, world, job, pool=None, sandbox=None):
        self.world, self.job, self.sandbox = world, job, sandbox
        self.client = ChatClient(job["base_url"], job["request_timeout"], pool)
        self.seconds = Counter()            # "skill": inside API calls; "sandbox": of the programs themselves

    def run(self):
        """-> outcome, a plain dict, as skills.Episode.run gives it. Raises what the simulator raises."""
        job, world = self.job, self.world
        began = time.monotonic()
        task = world.tasks(job["suite"])[job["index"]]
        world.disturb(None, "")
        world.reset(task, job["init"])
        start, reset_seconds = world.state_hash(), time.monotonic() - began
        self.api, self.task, self.deadline = api_class(task)(world), task, began + job["seconds"]
        self.frames = Frames(world, f"Task: {task.instruction}") if job.get("video") else None
        session = self.sandbox.session(self.api.specs())
        try:
            end, detail, turn = self._turns(session)
        finally:
            session.close()
        final = world.success()
        since = self.since if final else None
        if self.frames:
            how = f"{turn} calls, end: {end}" + (", not in the last state" if world.latched and not final else "")
            self.frames.save(job["video"], None if end == "infrastructure" else final, how)
        rendered = {"renderer": renderer(world)} if self.frames or job.get("pictures") else {}
        return {"end": end, "detail": detail, "start_state": start, "success_latched": world.latched, "success_final": final,
                "success_turn": since, "finished": self.finished, "turns": turn, "instruction": task.instruction,
                "steps": len(task.goal) or 1, "seconds": time.monotonic() - began, "reset_seconds": reset_seconds,
                "skill_seconds": self.seconds["skill"], "sandbox_seconds": self.seconds["sandbox"], **rendered, **self._summary(end, final)}

    def _turns(self, session):
        """The loop -> (end, detail, number of replies)."""
        job, world = self.job, self.world
        self.programs, self.blocks, self.finished, self.since = [], [], False, None
        system = {"role": "system", "content": SYSTEM + self.api.prompt()}
        turn, bad, note, end, detail = 0, 0, None, None, ""
        while end is None:
            if len(self.programs) >= job["turns"]:
                return "turns", f"{len(self.programs)} programs were run", turn
            if time.monotonic() > self.deadline:
                return "time", "", turn
            user = prompt(self.task, self.programs, self.blocks[-1] if self.blocks else None, note, job["history_budget"])
            body = {"model": job["model"], "messages": [system, {"role": "user", "content": self._with_picture(user)}],
                    "max_tokens": job["max_tokens"]}
            if job.get("chat_template_kwargs"):
                body["chat_template_kwargs"] = job["chat_template_kwargs"]
            try:
                choice = self.client.choice(body)
            except ModelServerError as e:
                own = e.status == 400 and self.programs          # the first prompt was served
                return ("malformed" if own else "infrastructure"), str(e), turn
            except ContextTooLong as e:
                return ("turns" if turn else "infrastructure"), str(e), turn        # the first prompt is none of the planner's doing
            turn += 1
            text = choice["message"].get("content") or ""
            reply = read_reply(text, choice.get("finish_reason") == "length")
            if self.frames:
                self.frames.call({"content": reply.code or text})
            note, bad, ran = reply.problem, bad + 1 if reply.problem else 0, len(self.blocks)
            if reply.finish:
                end, self.finished = "finish", True
            elif reply.problem:
                end = "malformed" if bad >= 2 or job["single_turn"] else None
            else:
                end, detail = self._block(session, reply.code)
                if end is None and job["single_turn"]:
                    end = "finish"
            if self.frames:
                block = self.blocks[-1] if len(self.blocks) > ran else None
                self.frames.receipt("\n".join([block.stdout, *block.stderr.splitlines()[-1:]]) if block else note or detail)
            if not world.success():
                self.since = None
            elif self.since is None:
                self.since = turn - 1
        return end, detail, turn

    def _block(self, session, code):
        """Runs one program -> (end or None, detail)."""
        self.programs.append(code)
        inside = self.seconds["skill"]
        began = time.monotonic()
        try:
            block = session.run(code, self._call, seconds=BLOCK_SECONDS, cpu_seconds=BLOCK_CPU, deadline=self.deadline)
        except EpisodeOver as e:
            return e.end, str(e)
        finally:
            self.seconds["sandbox"] += time.monotonic() - began - (self.seconds["skill"] - inside)
        self.blocks.append(block)
        return "time" if time.monotonic() > self.deadline else None, ""

    def _call(self, name, args, kwargs):
        began = time.monotonic()
        try:
            return self.api.call(name, args, kwargs)
        finally:
            self.seconds["skill"] += time.monotonic() - began

    def _with_picture(self, text):
        if not self.job.get("pictures"):
            return text
        data = base64.b64encode(self.world.render()).decode()
        return [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}]

    def _summary(self, end, success):
        """Counts for reports, and which kind of decision a failed episode failed on (None for a success)."""
        wanted = {o for _, o, *_ in self.task.goal}
        picks = [e for e in self.api.events if e["tool"] != "open_gripper" and e.get("object")]
        put = {(e.get("object"), e.get("target")) for e in self.api.events if e["tool"] == "open_gripper" and e.get("target")}
        goal = {tuple(g[1:]) for g in self.task.goal}
        done = goal & put
        if success:
            failure = None
        elif end == "malformed" or (end != "time" and self.blocks and self.blocks[-1].error and len(self.blocks) == len(self.programs)):
            failure = "format"
        elif any(e["object"] not in wanted for e in picks) or any(p not in goal for p in put):
            failure = "language"
        elif picks and not picks[-1]["held"]:
            failure = "grasp"
        elif len(goal) > 1 and done:
            failure = "second_step"
        else:
            failure = "other"
        return {"failure": failure, "picks": len(picks), "picks_right": sum(bool(e.get("right", e["held"])) for e in picks),
                "goals_done": len(done), "receipts": [recorded(e) for e in self.api.events], "programs": len(self.programs),
                "motions": self.api.motions, "errors": dict(Counter(b.error for b in self.blocks if b.error)),
                "sessions_lost": sum(b.lost for b in self.blocks)}
