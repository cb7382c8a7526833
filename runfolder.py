"""The folder of a run of episodes: which part of the work it holds (shards), which ids it has used up, which of its episodes are whole."""

import collections
import os
import re
import sys
from pathlib import Path

import records
from records import BadInput, JsonlWriter


def parse_shard(text):
    """--shard, or torchrun's RANK and WORLD_SIZE where it is not given -> (shard, shards)."""
    rank, size = (os.environ.get(name) for name in ("RANK", "WORLD_SIZE"))
    if text is not None and size not in (None, "1"):
        raise BadInput(f"--shard {text}: WORLD_SIZE is {size}, so each rank does the part RANK/WORLD_SIZE; leave --shard out")
    if text is None and rank is None and size in (None, "1"):
        return 0, 1
    where = "RANK/WORLD_SIZE" if text is None else "--shard"
    text = f"{rank}/{size}" if text is None else text
    m = re.fullmatch(r"(\d+)/(\d+)", text)
    if not m or not int(m[1]) < int(m[2]):
        raise BadInput(f"{where} {text!r}: expected I/N with I < N, e.g. 0/8")
    return int(m[1]), int(m[2])


def shard_of(specs, shard, shards):
    """Every Nth start (suite, index, init) with all its attempts: a group is never cut in two."""
    numbers = {}
    for s in specs:
        numbers.setdefault((s["suite"], s["index"], s["init"]), len(numbers))
    return [s for s in specs if numbers[s["suite"], s["index"], s["init"]] % shards == shard]


def check_split(output, shards):
    """BadInput if the folder holds this run in another number of parts."""
    other = [p.name for p in sorted(Path(output).glob("shard-*-of-*")) if p.name.split("-")[-1] != str(shards)]
    if shards > 1 and (Path(output) / "episodes.jsonl").exists():
        other.append("episodes.jsonl of a run in one part")
    if other:
        raise BadInput(f"{output}: holds {other[0]}, but this command runs 1 of {shards} parts; keep the split, or give another --output")


def used_ids(folder):
    """{name: how many of the ids <name>.r0, .r1, … the folder's files know}, those of calls whose arrival was lost included."""
    tries = collections.Counter()
    for path in (folder / f for f in ("arrivals.jsonl", "calls.jsonl", "episodes.jsonl")):
        for line in open(path, "rb") if path.exists() else ():
            for name, r in re.findall(rb'"episode_id": ?"([^"\\]+)\.r(\d+)"', line):       # also of half a last line
                tries[name.decode()] = max(tries[name.decode()], int(r) + 1)
    return tries


def whole_episodes(folder):
    """The folder's Episodes. A valid one that names calls which calls.jsonl lacks (the folder was copied while it was written, or the
    power failed) is moved to episodes.torn.jsonl: it can be neither trained on nor trusted, so its attempt is run again."""
    JsonlWriter(folder / "episodes.jsonl").close()               # repairs half a last line
    episodes, known = list(records.read_episodes(folder / "episodes.jsonl")), set()
    if episodes and (folder / "calls.jsonl").exists():
        for line in open(folder / "calls.jsonl", "rb"):
            known.update(i.decode() for i in re.findall(rb'"call_id": ?"([^"\\]+)"', line) if line.endswith(b"\n"))
    torn = [e for e in episodes if e.valid and not known.issuperset(e.calls)]
    if torn:
        again = {e.episode_id for e in torn}
        episodes = [e for e in episodes if e.episode_id not in again]
        part = folder / "episodes.jsonl.part"
        part.unlink(missing_ok=True)
        for path, rows in ((folder / "episodes.torn.jsonl", torn), (part, episodes)):
            with JsonlWriter(path) as writer:
                for e in rows:
                    writer.append(records.to_line(e))
        part.rename(folder / "episodes.jsonl")
        print(f"{folder}: {len(torn)} episodes name calls that calls.jsonl lacks; moved to episodes.torn.jsonl, to be run again",
              file=sys.stderr)
    return episodes
