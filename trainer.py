"""What sft.py and rl.py share: arguments, ranks, optimizers, the step, stopping, logging.

Beside it: model.py (network and log-probs), batches.py (rows and micro-batches), checkpoint.py (what stays on disk).

One process on a CPU has no process group. Under torchrun (gloo on CPUs, NCCL on GPUs), and on any GPU, the model is
sharded with FSDP2. Parameters, gradients and optimizer state are float32; compute is bfloat16 on GPUs, float32 on CPUs.

Shapes:  B rows, T padded length of a micro-batch | N its target tokens, laid end to end | V vocabulary.
"""

import importlib.util
import itertools
import json
import math
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim._muon import Muon, _adjust_lr, _zeropower_via_newtonschulz
from tqdm import tqdm

from batches import merge_prefix, pack, plan_micro_batches
from model import flop_counter, peak_flops
from records import at_least, BadInput, read_jsonl


# arguments that change how a run is computed or shown, not its result: they may differ when a command is repeated
FREE = ("threads", "log_every", "micro_tokens", "no_prefix_merge", "attention", "recompute", "output", "save_every", "keep",
        "tensorboard")


def add_arguments(p, lr, global_batch):
    """The arguments that sft.py and rl.py share; lr and global_batch: the stage's own defaults."""
    g = p.add_argument_group("batches")
    g.add_argument("--global-batch", type=at_least(1), default=global_batch,
                   help="responses per optimizer step, over all ranks (count)")
    g.add_argument("--micro-tokens", type=at_least(1), default=8192, help="padded tokens per forward on one rank (tokens)")
    g.add_argument("--max-length", type=at_least(2), default=32768,
                   help="longer prompt + response is left out, counted (tokens)")
    g.add_argument("--no-prefix-merge", action="store_true",
                   help="one row per response, even where prompts extend each other")
    g = p.add_argument_group("optimizer")
    g.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw",
                   help="muon: hidden matrices; AdamW: the rest")
    g.add_argument("--lr", type=float, default=lr, help="peak learning rate")
    g.add_argument("--schedule", choices=("constant", "linear", "cosine", "wsd"), default="constant",
                   help="decay to 0 over the whole run; wsd: over its last 30 %%")
    g.add_argument("--warmup", type=at_least(0), default=0, help="linear warm-up (optimizer steps)")
    g.add_argument("--weight-decay", type=float, default=0.0, help="decoupled, not on embeddings and vectors")
    g.add_argument("--betas", type=float, nargs=2, default=(0.9, 0.95), metavar="B", help="AdamW moments (ours)")
    g.add_argument("--clip", type=float, default=1.0, help="largest global gradient norm")
    g.add_argument("--train-vision", action="store_true", help="train the vision tower too (default: frozen)")
    g = p.add_argument_group("run")
    g.add_argument("--seed", type=int, default=0,
                   help="of the order of episodes; rl.py: also of the draw of --max-responses")
    g.add_argument("--threads", type=at_least(0), default=0, help="CPU threads per rank (0: torch's own choice; torchrun makes it 1)")
    g.add_argument("--attention", default="sdpa", help="attention implementation of transformers")
    g.add_argument("--recompute", choices=("auto", "on", "off"), default="auto",
                   help="activation checkpointing: keep one hidden state per block; auto: on GPUs")
    g.add_argument("--save-dtype", choices=("auto", "float32", "bfloat16"), default="auto",
                   help="of the saved checkpoint; auto: bfloat16 on GPUs, float32 on CPUs")
    g.add_argument("--save-every", type=at_least(0), default=20,
                   help="resume point every so many optimizer steps (count; 0: only when stopped)")
    g.add_argument("--keep", type=at_least(1), default=2, help="newest resume points that stay (count)")
    g.add_argument("--log-every", type=at_least(1), default=1, help="print a line every so many optimizer steps (count)")
    g.add_argument("--tensorboard", action="store_true", help="also write OUTPUT/tensorboard (needs that package)")


def check_arguments(p, args):
    """Refuses what no parser type can see; to be called at the end of a stage's parse_args."""
    if args.tensorboard and not importlib.util.find_spec("tensorboard"):
        p.error("--tensorboard: the package is not installed; pip install tensorboard, or leave it out (metrics.jsonl has all)")
    for name in ("lr", "weight_decay"):
        if not 0 <= getattr(args, name) < math.inf:
            p.error(f"--{name.replace('_', '-')} {getattr(args, name)}: expected a number from 0")
    if not args.clip > 0:
        p.error(f"--clip {args.clip}: expected a number above 0 (inf: no clipping)")
    if not all(0 <= beta < 1 for beta in args.betas):
        p.error(f"--betas {' '.join(map(str, args.betas))}: expected two numbers from 0 to below 1")
    return args


# ---------------------------------------------------------------------------------------------- ranks

class Ranks:
    """The process group, or one process without any. Every method is a no-op or identity on one rank."""

    def __init__(self, threads=0):
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if threads:
            torch.set_num_threads(threads)
        cuda, local = torch.cuda.is_available(), int(os.environ.get("LOCAL_RANK", 0))
        if cuda and local >= torch.cuda.device_count():
            raise BadInput(f"rank {self.rank} is number {local} (from 0) on its node, which shows {torch.cuda.device_count()} GPUs; "
                           "give at most that --nproc_per_node, and look at CUDA_VISIBLE_DEVICES")
        self.device = torch.device("cuda", local) if cuda else torch.device("cpu")
        self.sharded = self.world > 1 or cuda
        if self.sharded and not dist.is_initialized():      # a long time-out: rank 0 gates and saves while others wait
            alone = {} if self.world > 1 else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
            # Numbers and sentences go through gloo: no GPU memory is taken, and no NCCL watchdog runs, before the model is loaded.
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(hours=2), **alone)
        self.main = self.rank == 0

    def gather(self, values):
        """dict of numbers -> list of the ranks' dicts (same keys, same order everywhere), as floats."""
        if self.world == 1:
            return [values]
        mine = torch.tensor(list(values.values()), dtype=torch.float64)
        parts = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(parts, mine)
        return [dict(zip(values, part.tolist(), strict=True)) for part in parts]

    def sum_(self, tensor):
        """Sums a CPU tensor over ranks in place and returns it."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def barrier(self):
        self.sum_(torch.zeros(1))

    def on_main(self, function, share=True):
        """Runs `function` on rank 0 and gives its (small) result to all, or with share=False None to the others; a BadInput
        there stops all, printed once."""
        if self.world == 1:
            return function()
        result = sentence = None
        if self.main:
            try:
                result = function()
            except BadInput as e:
                sentence = str(e)
        box = [result if share else None, sentence]
        dist.broadcast_object_list(box, src=0)
        if box[1] is not None:
            self.stop(box[1])
        return result if self.main else box[0]

    def on_all(self, function):
        """Runs `function` on every rank (its result is too large to send); a BadInput on any of them stops all ranks,
        and the first of them prints its own."""
        result = sentence = None
        try:
            result = function()
        except BadInput as e:
            sentence = str(e)
        failed = [int(part["failed"]) for part in self.gather({"failed": sentence is not None})]
        if any(failed):
            self.stop(sentence, speaker=failed.index(1))
        return result

    def stop(self, sentence, speaker=0):
        """Ends all ranks with one line (of rank `speaker`) and exit code 2; to be called by all of them."""
        if self.world == 1:
            raise BadInput(sentence)
        if self.rank == speaker:
            print(f"error: {sentence}", file=sys.stderr, flush=True)
        self.close()                # nobody leaves before the line is out: torchrun kills the ranks that stay behind
        sys.exit(2)

    def close(self):
        if self.sharded:
            self.barrier()
            dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------- optimizers

def full(tensor):
    """A DTensor -> the whole tensor on every rank (a collective); a plain tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, dist.tensor.DTensor) else tensor


class ShardedMuon(Muon):
    """torch's Muon, also for sharded matrices. Newton-Schulz needs the whole matrix: each update is gathered, made
    orthogonal on every rank by the very operations of one process, and cut again (three times faster here than torch's
    own way through DTensor products). It works in bfloat16, so the last bits in which 1 and 2 ranks differ grow to
    about 2 % of an update: only AdamW is equal on any number of ranks."""

    @torch.no_grad()
    def step(self, closure=None):
        if not any(isinstance(p, dist.tensor.DTensor) for group in self.param_groups for p in group["params"]):
            return super().step(closure)
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for p in group["params"]:
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                state["momentum_buffer"].lerp_(p.grad, 1 - momentum)
                update = p.grad.lerp(state["momentum_buffer"], momentum).full_tensor()    # Nesterov; (rows, columns)
                whole = _zeropower_via_newtonschulz(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
                mine = dist.tensor.distribute_tensor(whole.to(p.dtype), p.device_mesh, p.placements, src_data_rank=None)
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(mine, alpha=-_adjust_lr(lr, group["adjust_lr_fn"], p.shape))


def make_optimizers(model, args):
    """List of optimizers over all parameters. Call it after sharding: built before, they would update nothing."""
    tables = [m for m in model.modules() if isinstance(m, torch.nn.Embedding)]     # of tokens; of positions in a vision tower
    embeddings = {id(m.weight) for m in (*tables, model.get_output_embeddings())}
    params = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in params if p.ndim == 2 and id(p) not in embeddings]
    others = [p for p in params if p.ndim != 2 or id(p) in embeddings]
    adam = dict(lr=args.lr, betas=tuple(args.betas), eps=1e-8, fused=True)
    if args.optimizer == "muon":
        muon = dict(lr=args.lr, momentum=0.95, weight_decay=args.weight_decay, adjust_lr_fn="match_rms_adamw")
        return [ShardedMuon(matrices, **muon), torch.optim.AdamW(others, weight_decay=0.0, **adam)]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [torch.optim.AdamW(groups, **adam)]


def lr_at(args, step, progress):
    """Learning rate of a step. step: optimizer steps done before it, progress in [0, 1): both over the whole run."""
    warm = min(1.0, (step + 1) / args.warmup) if args.warmup else 1.0
    decay = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2,
             "wsd": min(1.0, (1 - progress) / 0.3)}[args.schedule]
    return args.lr * warm * decay


# ---------------------------------------------------------------------------------------------- the step

class MicroBatches:
    """This rank's micro-batches of one optimizer batch. Each is packed anew whenever its turn comes (the pixels of a round would
    not fit into memory), by a thread, while the one before it is computed."""

    def __init__(self, slots, pack):
        self.slots, self.pack = slots, pack

    def __len__(self):
        return len(self.slots)

    def __iter__(self):
        with ThreadPoolExecutor(max_workers=1) as thread:
            ahead = thread.submit(self.pack, self.slots[0])
            for slot in self.slots[1:]:
                micro, ahead = ahead.result(), thread.submit(self.pack, slot)
                yield micro
            yield ahead.result()


class Trainer:
    """Model, optimizers, and what was done: `steps` optimizer steps (over all rounds), the last one at `lr`."""

    def __init__(self, model, args, ranks, pictures=None):
        """pictures: pictures.Pictures of the checkpoint, or None if it has no vision tower."""
        self.model, self.args, self.ranks, self.pictures = model, args, ranks, pictures
        self.optimizers = make_optimizers(model, args)
        self.flops = flop_counter(model)
        self.steps, self.lr, self.work = 0, 0.0, {"forward_tokens": 0, "flops": 0}

    def micro_batches(self, responses, chosen):
        """The MicroBatches that this rank runs for one optimizer batch; all ranks have equally many."""
        rows = merge_prefix(responses, chosen, not self.args.no_prefix_merge)
        plan = plan_micro_batches(rows, self.args.micro_tokens, self.ranks.world)
        return MicroBatches([slot[self.ranks.rank] for slot in plan],
                            lambda rows: pack(rows, responses, self.ranks.device, self.pictures))

    def logp(self, micro, entropy=False):
        """(N,) log π of the micro-batch's target tokens; with entropy=True also (N,) entropies."""
        self.work["forward_tokens"] += micro.tokens.numel()
        self.work["flops"] += self.flops(micro.lengths, len(micro.where))
        return self.model.target_logp(micro.tokens, micro.where, micro.targets, micro.pictures, entropy)

    def take_work(self):
        """{forward_tokens: padded tokens, flops} of all ranks since the last call."""
        parts = self.ranks.gather(self.work)
        self.work = dict.fromkeys(self.work, 0)
        return {k: sum(part[k] for part in parts) for k in self.work}

    def backward(self, loss):
        """Adds the gradient of this rank's part of the loss. FSDP2 averages over ranks; the parts are to be summed."""
        (loss * self.ranks.world).backward()

    def step(self, lr, measure=False):
        """Clips, updates, clears. Returns grad_norm (before clipping); with `measure` also update_norm and
        bf16_changed, the share of weights whose bfloat16 value changed (costs a copy of this rank's parameters). A
        gradient that is not finite ends the run before it touches a weight."""
        params = [p for p in self.model.parameters() if p.requires_grad]
        for p in params:            # a vision tower in a batch without pictures: zeros, as FSDP2 gives it, so that its moments move it
            if p.grad is None:      # on one rank as on several
                p.grad = torch.zeros_like(p)
        norm = float(full(torch.nn.utils.clip_grad_norm_(params, self.args.clip)))
        if not math.isfinite(norm):
            self.ranks.stop(f"step {self.steps + 1}: the gradient norm is {norm}; this step changed no weight. Look at "
                            "the last lines of metrics.jsonl (loss, ratio_max, gaps) and at the batch's log-probs, or "
                            "lower --lr")
        local = lambda p: p.to_local() if isinstance(p, dist.tensor.DTensor) else p
        before = [local(p.detach()).clone() for p in params] if measure else []
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
        self.steps, self.lr = self.steps + 1, lr
        if not measure:
            return {"grad_norm": norm}
        after = [local(p.detach()) for p in params]
        pieces = lambda tensors: [piece for x in tensors for piece in x.flatten().split(2**22)]     # float64 of 32 MiB at a time
        pairs = list(zip(pieces(before), pieces(after), strict=True))
        parts = self.ranks.gather({
            "square": float(sum((a - b).double().square().sum() for b, a in pairs)),
            "changed": float(sum((a.bfloat16() != b.bfloat16()).sum() for b, a in pairs)),
            "count": sum(b.numel() for b in before)})
        square, changed, count = (sum(part[k] for part in parts) for k in ("square", "changed", "count"))
        return {"grad_norm": norm, "update_norm": math.sqrt(square), "bf16_changed": changed / count}


def reduce_metrics(parts, ranks, merge):
    """Metrics of this rank's micro-batches (dicts of 0-d tensors) -> floats of the whole optimizer batch, on all ranks.
    merge: loss.merge_metrics. One device-to-host copy per step, not one per number."""
    values = torch.stack([torch.stack([x.double() for x in part.values()]) for part in parts]).tolist()
    mine = merge([dict(zip(parts[0], row, strict=True)) for row in values])
    return merge(ranks.gather(mine))


# ---------------------------------------------------------------------------------------------- stopping

class Steps:
    """The optimizer steps first … total-1 of a stage, with a progress bar. SIGTERM, SIGINT or a file named STOP in the output
    ends them between two steps, on all ranks together; `stopped` then says by what, and `done` how many are done."""

    def __init__(self, first, total, output, ranks, stage):
        self.first, self.total, self.file, self.ranks, self.stage = first, total, Path(output) / "STOP", ranks, stage
        self.done, self.stopped, self.signal, self.arrived, self.handlers = first, None, 0, 0.0, {}

    def __iter__(self):
        if threading.current_thread() is threading.main_thread():          # others cannot have handlers
            self.handlers = {n: signal.signal(n, self._arrived) for n in (signal.SIGTERM, signal.SIGINT)}
        try:
            for step in tqdm(range(self.first, self.total), initial=self.first, total=self.total, desc=self.stage,
                             disable=None if self.ranks.main else True):
                self.stopped = self._asked()
                if self.stopped:
                    return
                yield step
                self.done = step + 1
        except GeneratorExit:               # a step failed; otherwise release() is called once all is saved
            self.release()
            raise

    def release(self):
        """Puts back the signal handlers that were there before."""
        while self.handlers:
            signal.signal(*self.handlers.popitem())

    def _arrived(self, number, frame):
        """A signal; a second one, later than 2 s after it (schedulers may deliver one twice), ends the process as it stands."""
        if not self.signal:
            self.signal, self.arrived = number, time.monotonic()
        elif time.monotonic() - self.arrived > 2:
            os._exit(128 + number)

    def _asked(self):
        parts = self.ranks.gather({"signal": self.signal, "file": self.ranks.main and self.file.exists()})
        number = int(max(part["signal"] for part in parts))
        if number:
            return signal.Signals(number).name
        return f"{self.file} (delete it)" if parts[0]["file"] else None


# ---------------------------------------------------------------------------------------------- logging

class Metrics:
    """metrics.jsonl: one object a step, keys frozen by the first; a printed line every few steps; TensorBoard on request.
    Rank 0 only."""

    def __init__(self, folder, ranks, steps, args, shown):
        """steps: how many there will be (for the printed count); shown: {key: format} of the printed line."""
        self.path, self.main = Path(folder) / "metrics.jsonl", ranks.main
        self.total, self.every, self.shown = steps, args.log_every, shown
        peak = peak_flops(ranks.device)
        self.peak = peak and peak * ranks.world                        # FLOP/s of all ranks, None where it is not known
        self.board, self.tensorboard = None, args.tensorboard
        self.keys, self.clock = None, time.perf_counter()

    def keep(self, steps):
        """Drops rows behind step `steps`: a killed run logged them, the resumed one does them again."""
        if self.main and self.tensorboard:
            from torch.utils.tensorboard import SummaryWriter
            self.board = SummaryWriter(str(self.path.parent / "tensorboard"), purge_step=steps + 1)
        if self.main:
            rows = [row for _, row in read_jsonl(self.path)] if self.path.exists() else []
            part = self.path.with_suffix(".part")
            part.write_text("".join(json.dumps(row) + "\n" for row in rows if row["step"] <= steps))
            part.replace(self.path)

    def log(self, row, work):
        """row: {"step", …}; work: Trainer.take_work() of the step. mfu: share of the GPUs' dense bfloat16 peak."""
        now = time.perf_counter()
        seconds, self.clock = now - self.clock, now
        row = {**row, "forward_tokens": int(work["forward_tokens"]), "seconds": seconds,
               "tokens_per_second": work["forward_tokens"] / seconds,
               "mfu": work["flops"] / seconds / self.peak if self.peak else None}
        if not self.main:
            return
        self.keys = self.keys or list(row)
        assert list(row) == self.keys, f"metrics changed: {sorted(set(row) ^ set(self.keys))}"
        with open(self.path, "a") as f:
            f.write(json.dumps({k: round(v, 9) if isinstance(v, float) else v for k, v in row.items()}) + "\n")
        for k, v in row.items() if self.board else ():
            if k != "step" and v is not None:
                self.board.add_scalar(k, v, row["step"])
        if self.board:
            self.board.flush()                                         # a killed run keeps what it showed
        if row["step"] % self.every == 0 or row["step"] == self.total:
            shown = {**self.shown, **({"mfu": ".1%"} if self.peak else {})}
            line = " | ".join(f"{k} {row[k]:{f}}" for k, f in shown.items())
            tqdm.write(f"step {row['step']:>5}/{self.total} | {line}")


def show_row(tokenizer, row, note="", placeholder=None):
    """Prints one row: context (grey on a terminal), targets (green; «…» elsewhere), and masked: a picture's placeholder tokens,
    shown as their count (red), which carry features and no text. placeholder: their token id."""
    colours = ("\033[90m", "\033[0m"), ("\033[32m", "\033[0m"), ("\033[31m", "\033[0m")
    context, target, masked = colours if sys.stdout.isatty() else (("", ""), ("«", "»"), ("", ""))

    def shown(ids, marks):
        out = []
        for picture, part in itertools.groupby(ids.tolist(), lambda token: token == placeholder):
            part = list(part)
            (left, right), text = (masked, f"[picture, {len(part)} tokens]") if picture else (marks, tokenizer.decode(part))
            out.append(left + text + right)
        return "".join(out)

    text, at = "", 0
    for first, last, _ in row.spans:
        text += shown(row.tokens[at:first], context) + shown(row.tokens[first:last], target)
        at = last
    targets, pads = sum(last - first for first, last, _ in row.spans), int((row.tokens == placeholder).sum())
    print(f"--- one row: {len(row.tokens)} tokens = {targets} target (marked) + {pads} masked (pictures) + "
          f"{len(row.tokens) - targets - pads} context | {note}\n{text}\n---", flush=True)
