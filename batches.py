"""Recorded responses -> rows that share prefixes -> micro-batches of like length -> tensors (trainer.py runs them).

Nothing here knows a loss, and a model only where data is checked against it. Everything is a function of its arguments:
the same data gives the same micro-batches on every rank and in every run.

Shapes:  B rows, T padded length of a micro-batch | N its target tokens, laid end to end | S responses.
"""

import random
from dataclasses import dataclass

import numpy as np
import torch


class Responses:
    """S recorded responses and their prompts. What is known per token lies in flat arrays: s owns
    [start[s], start[s+1])."""

    def __init__(self, prompts, outputs, episodes):
        """prompts, outputs: S integer arrays; episodes: S names, an episode's responses adjacent, in order of turns."""
        self.prompts, self.outputs, self.episodes = prompts, outputs, episodes
        self.lengths = torch.tensor([len(o) for o in outputs], dtype=torch.long)           # (S,) L_s
        self.start = np.concatenate([[0], np.cumsum(self.lengths.numpy())]).astype(np.int64)   # (S + 1,)

    def by_episode(self):
        """list of lists of response indices, one list per episode, in order of first appearance."""
        groups = {}
        for s, episode in enumerate(self.episodes):
            groups.setdefault(episode, []).append(s)
        return list(groups.values())

    def check_fits(self, model, ranks, source):
        """Stops on token ids outside the model's vocabulary, or rows beyond its positions."""
        config = model.config.get_text_config()
        largest = max(int(ids.max()) for ids in (*self.prompts, *self.outputs))
        longest = max(len(p) + len(o) for p, o in zip(self.prompts, self.outputs, strict=True))
        if largest >= config.vocab_size:
            ranks.stop(f"token id {largest} in the data, but {source} has a vocabulary of {config.vocab_size}; give "
                       "the checkpoint whose tokenizer made it")
        if longest > config.max_position_embeddings:
            ranks.stop(f"a row of {longest} tokens, but {source} has {config.max_position_embeddings} positions; give "
                       "a smaller --max-length")


@dataclass
class Row:
    """One forward row. `spans`: (first, last + 1, response index) of each target stretch."""
    tokens: np.ndarray
    spans: list


def merge_prefix(responses, chosen, merge=True):
    """Chosen response indices (in order of turns) -> rows.

    A response whose prompt begins with its episode's row so far, token for token, is appended to that row; anything
    else (rewritten history, a new episode) opens its own row. Exact: a causal model's log-prob depends on what stands
    before, and on nothing else.
    """
    rows, episode = [], None
    for s in chosen:
        prompt, output = responses.prompts[s], responses.outputs[s]
        row = rows[-1] if rows and merge and responses.episodes[s] == episode else None
        if row is None or len(prompt) < len(row.tokens) or not np.array_equal(prompt[:len(row.tokens)], row.tokens):
            row = Row(prompt, [])
            rows.append(row)
        row.tokens = np.concatenate([prompt, output])
        row.spans.append((len(prompt), len(row.tokens), s))
        episode = responses.episodes[s]
    return rows


def shuffled(episodes, *seed):
    """A seeded permutation of a list."""
    order = list(episodes)
    random.Random("/".join(map(str, seed))).shuffle(order)
    return order


def plan_micro_batches(rows, micro_tokens, world):
    """Rows -> (slots, world) nested list of lists of rows: at slot k rank r runs plan[k][r]; all ranks run every slot.

    Rows of like length share a micro-batch of at most `micro_tokens` padded tokens (a longer row stands alone). The
    largest are halved until their number divides by the ranks; where none can be halved, empty lists fill up.
    """
    micros = []
    for row in sorted(rows, key=lambda r: -len(r.tokens)):            # stable: equal lengths keep their order
        if micros and (len(micros[-1]) + 1) * len(micros[-1][0].tokens) <= micro_tokens:
            micros[-1].append(row)
        else:
            micros.append([row])
    cost = lambda m: len(m) * len(m[0].tokens)
    while len(micros) % world and any(len(m) > 1 for m in micros):
        big = max((m for m in micros if len(m) > 1), key=cost)
        micros.remove(big)
        micros += [big[:len(big) // 2], big[len(big) // 2:]]
    micros.sort(key=cost, reverse=True)         # ranks wait for each other at every slot: put like beside like
    micros += [[] for _ in range(-len(micros) % world)]
    return [micros[k:k + world] for k in range(0, len(micros), world)]


@dataclass
class Micro:
    """Tensors of one micro-batch. `where`: the position in (B*T) that predicts a target token, the one before it."""
    tokens: torch.Tensor        # (B, T) token ids, padded on the right with 0
    where: torch.Tensor         # (N,)
    index: torch.Tensor         # (N,) which token of the flat per-token arrays this is

    @property
    def targets(self):
        return self.tokens.flatten()[self.where + 1]                  # (N,)


def pack(rows, responses, device):
    """Rows -> Micro. No rows (a rank with nothing to do in this slot) -> two padding tokens and no target: the rank
    takes part in every collective, and its loss and gradient are exactly 0."""
    T = max([len(row.tokens) for row in rows], default=2)
    tokens = np.zeros((max(len(rows), 1), T), dtype=np.int64)         # (B, T)
    where, index = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for b, row in enumerate(rows):
        tokens[b, :len(row.tokens)] = row.tokens
        for first, last, s in row.spans:
            where.append(np.arange(first - 1, last - 1) + b * T)
            index.append(np.arange(responses.start[s], responses.start[s + 1]))
    to = lambda x: torch.from_numpy(x).to(device)
    return Micro(to(tokens), to(np.concatenate(where)), to(np.concatenate(index)))
