"""Recorded responses -> rows that share prefixes -> micro-batches of like length -> tensors (trainer.py runs them).

Nothing here knows a loss or a model. Everything is a function of its arguments: the same data gives the same
micro-batches on every rank and in every run.

Shapes:  B rows, T padded length of a micro-batch | N its target tokens, laid end to end | S responses.
"""

import random
from dataclasses import dataclass

import numpy as np
import torch

from records import BadInput


class Responses:
    """S recorded responses and their prompts. What is known per token lies in flat arrays: s owns
    [start[s], start[s+1])."""

    def __init__(self, prompts, outputs, episodes, pictures=None, stores=()):
        """prompts, outputs: S integer arrays; episodes: S names, an episode's responses adjacent, in order of turns;
        pictures: S lists of sha256, those of each prompt in order; stores: the ImageStores that hold their bytes."""
        self.prompts, self.outputs, self.episodes, self.stores = prompts, outputs, episodes, stores
        self.pictures = pictures or [[] for _ in outputs]
        self.lengths = torch.tensor([len(o) for o in outputs], dtype=torch.long)           # (S,) L_s
        self.start = np.concatenate([[0], np.cumsum(self.lengths.numpy())]).astype(np.int64)   # (S + 1,)

    def by_episode(self):
        """list of lists of response indices, one list per episode, in order of first appearance."""
        groups = {}
        for s, episode in enumerate(self.episodes):
            groups.setdefault(episode, []).append(s)
        return list(groups.values())

    def picture(self, sha):
        """sha256 -> the picture's bytes; BadInput if no store has it whole."""
        data = next((data for store in self.stores if (data := store.get(sha)) is not None), None)
        if data is None:
            places = ", ".join(str(store.folder) for store in self.stores) or "no folder of pictures"
            raise BadInput(f"picture {sha}.* is missing or damaged in {places}; restore it, or make the data again")
        return data


@dataclass(eq=False)            # a row equals itself alone: arrays have no truth value, and lists of rows are searched by ==
class Row:
    """One forward row. `spans`: (first, last + 1, response index) of each target stretch; `pictures`: sha256 of each
    picture in it, in order."""
    tokens: np.ndarray
    spans: list
    pictures: list


def merge_prefix(responses, chosen, merge=True):
    """Chosen response indices (in order of turns) -> rows.

    A response whose prompt begins with its episode's row so far, token for token and picture for picture, is appended to
    that row; anything else (rewritten history, a new episode) opens its own row. Exact: a log-prob of a causal model, of
    attention or recurrent, depends on what stands before it, and on nothing else. Rows of different episodes never share
    a sequence: a recurrent layer would carry its state from one into the other.
    """
    rows, episode = [], None
    for s in chosen:
        prompt, output = responses.prompts[s], responses.outputs[s]
        shown = responses.pictures[s]
        row = rows[-1] if rows and merge and responses.episodes[s] == episode else None
        if row is None or not np.array_equal(prompt[:len(row.tokens)], row.tokens) or shown[:len(row.pictures)] != row.pictures:
            row = Row(prompt, [], shown)
            rows.append(row)
        row.tokens, row.pictures = np.concatenate([prompt, output]), shown
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
    lengths: list               # B real lengths, in tokens; [] without rows
    pictures: dict              # {} or pixel_values (P, D), image_grid_thw (pictures, 3), mm_token_type_ids (B, T)

    @property
    def targets(self):
        return self.tokens.flatten()[self.where + 1]                  # (N,)


def pack(rows, responses, device, pictures=None):
    """Rows -> Micro. No rows (a rank with nothing to do in this slot) -> two padding tokens and no target: the rank
    takes part in every collective, and its loss and gradient are exactly 0. pictures: pictures.Pictures, for rows that
    have some."""
    T = max([len(row.tokens) for row in rows], default=2)
    tokens = np.zeros((max(len(rows), 1), T), dtype=np.int64)         # (B, T)
    where, index = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for b, row in enumerate(rows):
        tokens[b, :len(row.tokens)] = row.tokens
        for first, last, s in row.spans:
            where.append(np.arange(first - 1, last - 1) + b * T)
            index.append(np.arange(responses.start[s], responses.start[s + 1]))
    to = lambda x: torch.from_numpy(x).to(device)
    shown = {}
    if any(row.pictures for row in rows):                             # in the order of rows, as the placeholders stand
        pixels, grids = zip(*(pictures.inputs(responses.picture(sha)) for row in rows for sha in row.pictures), strict=True)
        shown = {"pixel_values": torch.cat(pixels).to(device), "image_grid_thw": torch.stack(grids).to(device),
                 "mm_token_type_ids": to((tokens == pictures.token).astype(np.int32))}
    return Micro(to(tokens), to(np.concatenate(where)), to(np.concatenate(index)), [len(row.tokens) for row in rows], shown)
