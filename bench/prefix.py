"""How much the exact-prefix merge saves: tokens of a round's calls as one row each, against merged rows.

    python bench/prefix.py out/tabletop-seed0/round-1
"""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from batches import Responses, merge_prefix
from records import call_problem, folders, read_calls, run_main


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("round", help="folder with calls.jsonl")
    args = p.parse_args()
    calls = [c for f in folders(args.round) for c in read_calls(f / "calls.jsonl") if call_problem(c) is None]
    calls.sort(key=lambda c: (c.episode_id, c.turn))
    responses = Responses([np.array(c.prompt_token_ids, np.int32) for c in calls], [np.array(c.token_ids, np.int32) for c in calls],
                          [c.episode_id for c in calls])
    tokens = [sum(len(row.tokens) for row in merge_prefix(responses, range(len(calls)), merge)) for merge in (False, True)]
    rows = len(merge_prefix(responses, range(len(calls)), True))
    follow = len(calls) - len({c.episode_id for c in calls})
    print(f"{len(calls)} calls: {tokens[0]:,} tokens as rows of their own, {tokens[1]:,} in {rows} merged rows, "
          f"ratio {tokens[0] / tokens[1]:.2f}; {len(calls) - rows} of {follow} follow-up calls extend their predecessor")


if __name__ == "__main__":
    run_main(main)
