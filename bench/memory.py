"""Does one long sample of Qwen3.5 fit? GPU memory of a training step per rank, by arithmetic; the arithmetic is checked on this CPU.

    python bench/memory.py --model-shape qwen3.5-9b --ranks 8 --tokens 32768 --targets 2048     the table (2 s)
    python bench/memory.py … --measure                                                           and its checks (minutes)

The table has one column per moment at which memory can peak: the largest one has to fit, not their sum. FSDP2 as model.py sets
it up: float32 masters cut over the ranks, one group per decoder block, everything else (embedding, last norm, head, frozen
vision tower) in the root group, which stays gathered in bfloat16 from the start of forward to the end of backward; one
hidden state kept per block, the block computed again in backward; log-probs in chunks.

Left out: CUDA context and NCCL buffers, what the allocator loses to fragments, the workspace of attention and matrix products,
the vision tower's forward (frozen, it keeps nothing, and it is over before the first block starts). None of it was measured.

Letters:  T tokens of the sample | N its target tokens | H width | M width of the MLP | V vocabulary | R ranks |
          C target positions of a logits chunk | c = 2 bytes of bfloat16, f = 4 bytes of float32. Everything is in bytes.
"""

import argparse
import multiprocessing
import sys
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import MethodType, SimpleNamespace
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForImageTextToText, Qwen3_5Config
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

import model as trained
from records import at_least, BadInput, Formatter, run_main

GIB = 2**30
c, f = 2, 4                 # bytes of a bfloat16 and of a float32 number
BLOCKS = 8                  # --measure follows the step in torch code on this many blocks
SCAN = 64                   # tokens of one chunk of the gated delta rule, in transformers and in fla


def shape(name):
    """`qwen3.5-9b`, or a folder with a config.json of that family -> Qwen3_5Config. BadInput for anything else."""
    if name == "qwen3.5-9b":
        config = Qwen3_5Config()                    # the class's defaults are the 9B model, but for this one: a picture
        config.vision_config.out_hidden_size = config.text_config.hidden_size       # feature replaces a token embedding
        return config
    config, _ = trained.read_config(name)
    if not isinstance(config, Qwen3_5Config):
        raise BadInput(f"{name}/config.json: field model_type is {config.model_type!r}; these formulas are those of qwen3_5")
    return config


# ---------------------------------------------------------------------------------------------- the arithmetic

def widths(t):
    """Text config -> widths of a token: q and gate A, k and v K of attention; q and k D, v E of the delta rule, before repetition."""
    return (t.num_attention_heads * t.head_dim, t.num_key_value_heads * t.head_dim,
            t.linear_num_key_heads * t.linear_key_head_dim, t.linear_num_value_heads * t.linear_value_head_dim)


def parameters(config):
    """Numbers of parameters: {"linear": of one block, "full": of one block, "embedding", "head", "norm", "vision"}."""
    t, v = config.text_config, config.vision_config
    H, M, V, h, m = t.hidden_size, t.intermediate_size, t.vocab_size, v.hidden_size, v.intermediate_size
    A, K, D, E = widths(t)
    both = 3 * H * M + 2 * H                                                        # gate, up, down; two norms
    linear = (H * (2 * D + E) + H * E + 2 * H * t.linear_num_value_heads            # q k v, z, b and a
              + (2 * D + E) * t.linear_conv_kernel_dim + 2 * t.linear_num_value_heads + t.linear_value_head_dim + E * H)
    full = H * 2 * A + 2 * H * K + A * H + 2 * t.head_dim                           # q with its gate, k, v, o; q and k norms
    merged = h * v.spatial_merge_size**2
    vision = (v.depth * (4 * h * h + 2 * h * m + 9 * h + m)                         # weights, biases and norms of a block
              + v.in_channels * v.temporal_patch_size * v.patch_size**2 * h + h + v.num_position_embeddings * h
              + 2 * h + merged * merged + merged + merged * v.out_hidden_size + v.out_hidden_size)
    return {"linear": both + linear, "full": both + full, "embedding": V * H, "norm": H,
            "head": 0 if config.tie_word_embeddings else V * H, "vision": vision}


def kinds(t):
    """Layer types as the keys of `parameters`, in order of depth."""
    return [kind.removesuffix("_attention") for kind in t.layer_types]


def saved_common(t, T):
    """What a block keeps for its own backward outside attention: two norms and the MLP.
    A norm: its input in float32, the normalised input in float32, 1/rms of each row; its output in bfloat16.
    The MLP: gate, up, silu(gate) and their product."""
    H, M = t.hidden_size, t.intermediate_size
    return T * (2 * (2 * H * f + f + H * c) + 4 * M * c)


def saved_full(t, T):
    """… and softmax attention (a fused kernel: no T x T matrix). Norms of q and k as above, without their output; q and k
    after rotation, v; the output as the kernel gave it, in order of heads, the gate's sigmoid, their product; log Σe^z."""
    A, K, _, _ = widths(t)
    norms = 2 * (A + K) * f + (t.num_attention_heads + t.num_key_value_heads) * f
    rotary = 2 * int(t.head_dim * t.rope_parameters["partial_rotary_factor"]) * c
    return saved_common(t, T) + T * (norms + (A + 2 * K) * c + 4 * A * c + t.num_attention_heads * f + rotary)


def saved_linear(t, T, fused):
    """… and the gated delta rule. q and k are repeated to the heads of v: width W."""
    _, _, D, E = widths(t)
    heads, d, e = t.linear_num_value_heads, t.linear_key_head_dim, t.linear_value_head_dim
    W, conv = heads * d, 2 * D + E
    gated = 3 * E * f + heads * f + 3 * E * c       # norm under a gate: x, z, silu(z); 1/rms; x in bf16, normalised, output
    if fused:                                       # causal_conv1d keeps its input and fla's chunk_gated_delta_rule normalised
        rule = conv * c + (2 * W + E) * c + heads * SCAN * c      # q and k, v, the inverse of each chunk's triangle,
        small = heads * (5 * f + c)                               # 1/|q|, 1/|k|, Σ decay, softplus in and out, β
        return saved_common(t, T) + T * (rule + small + gated)
    rule = 2 * conv * c                             # convolution in and out
    rule += 2 * W * f + 2 * W * f + E * f           # q and k before and after normalisation, v
    rule += W * f + 2 * W * f                       # β k; q and k with their decays
    rule += 2 * E * f + W * f                       # solutions of the two triangular systems, and v less what the state tells
    rule += 5 * heads * SCAN * f                    # q k' and β k k' without and with decay, decay of each pair
    rule += heads * d * e * f // SCAN               # the state at the start of each chunk
    small = heads * (8 * f + c)                     # three decays, 1/|q|, 1/|k|, softplus in and out, β twice
    return saved_common(t, T) + T * (rule + small + gated)


def in_flight(t, T):
    """Gradients alive at a block's peak, when all it saved is still there: of its output, and in the MLP of silu and up."""
    return T * (t.hidden_size + 2 * t.intermediate_size) * c


def chunk(V, N):
    """C: target positions of one chunk of logits."""
    return min(N, max(1, trained.LOGITS // V))


def head_backward(V, H, N, weight=c):
    """Bytes of (logits, dL/dW) at the largest moment of ChunkedLogProb.backward. weight: bytes of a weight, c (GPUs) or f (CPUs).
    A chunk's logits in float32 and, for its products, in the weight's dtype; the next one's are made while they are still there.
    dL/dW is summed in float32; in bfloat16 there is also one chunk's product."""
    C = chunk(V, N)
    second = min(C, N - C)                          # target positions of the second chunk, 0 if there is only one
    if weight == f:
        return (C + second) * V * f, V * H * f
    product, following = C * V * (f + c) + V * H * c, (C + second) * V * (f + c)
    return (C * V * (f + c), V * H * (f + c)) if product >= following or not second else (following, V * H * f)


def moments(config, ranks, T, N):
    """{moment: {item: bytes per rank}} in the order of a step. AdamW, fused (no temporaries), as trainer.make_optimizers builds it;
    gradients of earlier micro-batches are there already; at the update: with the copy that Trainer.step(measure=True) takes."""
    t, P = config.text_config, parameters(config)
    H, V, R, order = t.hidden_size, t.vocab_size, ranks, kinds(t)
    root_trained = P["embedding"] + P["head"] + P["norm"]
    trainable = root_trained + sum(P[kind] for kind in order)
    resident = {"parameters, float32, 1/R": f * (trainable + P["vision"]) // R,
                "gradients, float32, 1/R": f * trainable // R,
                "Adam's two moments, float32, 1/R": 2 * f * trainable // R}
    root = {"root group gathered, bf16": c * (root_trained + P["vision"])}
    logits, head = head_backward(V, H, N)
    gathered = "blocks gathered, bf16: this one, the next"
    result = {"head": {**resident, **root, gathered: c * P[order[-1]], "hidden states kept, bf16": (len(order) + 1) * T * H * c,
                       # of the last norm; the targets' hidden states and their gradient
                       "kept by this part for its backward": T * (2 * H + 1) * f + 2 * N * H * c,
                       "logits chunk, float32 + bf16": logits, "head's gradient": head}}
    columns = {"linear block, torch": ("linear", saved_linear(t, T, False)), "linear block, fla": ("linear", saved_linear(t, T, True)),
               "full-attention block": ("full", saved_full(t, T))}
    for moment, (kind, saved) in columns.items():
        if kind in order:
            depth = len(order) - order[::-1].index(kind)            # the deepest block of this kind: most hidden states are kept
            biggest = max(P[k] for k in order)
            result[moment] = {**resident, **root, gathered: 2 * c * biggest,
                              "hidden states kept, bf16": depth * T * H * c, "kept by this part for its backward": saved,
                              "gradients of activations": in_flight(t, T),
                              "head's gradient": c * V * H,
                              # all of the block behind, which is being reduced; of this one its last matrix alone, at that moment
                              "a block's gradient reduced, float32": f * biggest + c * H * t.intermediate_size}
    result["root's gradient"] = {**resident, "root group's gradient: bf16, being reduced in float32": (c + f) * root_trained}
    # Trainer.step, 2^22 numbers at a time: difference, in float64, its square: 4 + 8 + 8 bytes
    result["update"] = {**resident, "copy before the update, and differences": f * trainable // R + 20 * 2**22}
    return result


def table(columns, limit):
    """{moment: {item: bytes}} -> markdown lines, in GiB; `limit`: GiB of a GPU."""
    items = list(dict.fromkeys(item for column in columns.values() for item in column))
    cell = lambda n: f"{n / GIB:.2f}" if n else ""
    rows = [[item] + [cell(column.get(item, 0)) for column in columns.values()] for item in items]
    totals = [sum(column.values()) for column in columns.values()]
    rows.append(["**total**"] + [f"**{n / GIB:.2f}**" for n in totals])
    rows.append([f"left of {limit:g} GiB"] + [f"{limit - n / GIB:.2f}" for n in totals])
    lines = [["GiB per rank", *columns], ["---"] + ["---:"] * len(columns), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


# ---------------------------------------------------------------------------------------------- the checks

def bytes_now(tracker, which="current", without=("Parameter",)):
    """Bytes that a tracker sees alive now, or at its peak, without the named categories."""
    return sum(size for groups in tracker.get_tracker_snapshot(which).values() for name, size in groups.items()
               if name not in ("Total", *without))


def build_block(t, index, dtype=torch.bfloat16):
    """Decoder block `index` of the config, in `dtype`, attention as the trainer has it."""
    t._attn_implementation = "sdpa"
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return qwen.Qwen3_5DecoderLayer(t, index).eval()
    finally:
        torch.set_default_dtype(before)


def measure_block(t, index, T, fake, recompute=False, fused=False):
    """Bytes of one block in bfloat16, one row of T tokens: (kept after forward for backward, peak of forward and backward), its
    parameters, input and output left out. fake: shapes alone, no memory; otherwise computed on this CPU."""
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext(), stand_ins() if fused else nullcontext():
        block = build_block(t, index)
        x = torch.zeros(1, T, t.hidden_size, dtype=torch.bfloat16, requires_grad=True)                # (1, T, H)
        angles = qwen.Qwen3_5TextRotaryEmbedding(t)(x, torch.arange(T).expand(3, 1, T))               # 2 x (1, T, rotary)
        ours, saved = {id(p.untyped_storage()) for p in (*block.parameters(), x)}, {}

        def keep(tensor):
            storage = tensor.untyped_storage()
            if id(storage) not in ours:
                saved[id(storage)] = storage
            return tensor

        tracker = MemTracker()
        tracker.track_external(block, x, *angles)
        with warnings.catch_warnings(), tracker:
            warnings.filterwarnings("ignore", message="Module is None")     # transformers wraps a kernel in a module for one call
            outside = bytes_now(tracker)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                call = partial(checkpoint, block, use_reentrant=False) if recompute else block
                y = call(x, position_embeddings=angles)                                   # (1, T, H)
            kept = sum(storage.nbytes() for storage in saved.values())
            saved.clear()
            alive = bytes_now(tracker) - outside - y.untyped_storage().nbytes()
            y.backward(torch.zeros_like(y))
        return kept, alive, bytes_now(tracker, "peak") - outside - y.untyped_storage().nbytes()


def measure_head(V, H, N, chunked=True, dtype=torch.float32, fake=False):
    """Bytes at the peak of forward and backward of N log-probs at vocabulary V, width H; hidden states and weight left out.
    chunked: model.ChunkedLogProb; else all logits at once, as log_softmax keeps them."""
    with FakeTensorMode() if fake else nullcontext():
        hidden = torch.zeros(N, H, dtype=dtype, requires_grad=True)                       # (N, H)
        weight = torch.zeros(V, H, dtype=dtype, requires_grad=True)                       # (V, H)
        targets = torch.zeros(N, dtype=torch.long)                                        # (N,)
        tracker = MemTracker()
        tracker.track_external(hidden, weight, targets)
        with tracker:
            before = bytes_now(tracker)
            run_head(hidden, weight, targets, chunked)
        return bytes_now(tracker, "peak") - before


def run_head(hidden, weight, targets, chunked):
    """Forward and backward of log π of the targets, (N,)."""
    if chunked:
        logp = trained.ChunkedLogProb.apply(hidden, weight, targets, False)[0]            # (N,)
    else:
        logp = (hidden @ weight.T).float().log_softmax(-1).gather(-1, targets[:, None])   # (N, V) thrice, (N, 1)
    logp.sum().backward()


def resident_head(V, H, N, chunked):
    """By how many bytes the resident memory of this process grew at most in `run_head`, float32. For a fresh process."""
    hidden, weight = torch.randn(N, H, requires_grad=True), torch.randn(V, H, requires_grad=True)     # (N, H), (V, H)
    most = lambda: 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])     # Linux
    before = most()
    run_head(hidden, weight, torch.zeros(N, dtype=torch.long), chunked)
    return most() - before


def alone(function, *args):
    """function(*args) in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


class FusedConvolution(torch.autograd.Function):
    """What causal_conv1d keeps, in shapes alone: its input; the rest is computed again."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.empty_like(x)                                                        # (1, conv, T)

    @staticmethod
    def backward(ctx, g):
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors)            # (1, conv, T), (conv, kernel)


class FusedRule(torch.autograd.Function):
    """What fla's chunk_gated_delta_rule keeps and what its backward has alive at most, in shapes alone, read from its source
    (fla/ops/gated_delta_rule/chunk.py): not measured on a GPU."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta):
        T, heads = q.shape[1:3]
        rows, scan = q.new_empty(1, T, heads, dtype=torch.float32), q.new_empty(1, T, heads, SCAN)    # 1/|q|; inverse triangle
        ctx.save_for_backward(torch.empty_like(q), torch.empty_like(k), v.contiguous(), torch.empty_like(g), beta, rows,
                              torch.empty_like(rows), scan)
        return torch.empty_like(v, memory_format=torch.contiguous_format)                 # (1, T, heads, e)

    @staticmethod
    def backward(ctx, g):
        q, k, v, decay, beta = ctx.saved_tensors[:5]
        T, heads, d, e = *q.shape[1:], v.shape[-1]
        alive = [torch.empty_like(k), torch.empty_like(v), torch.empty_like(v), torch.empty_like(k)]   # w, u, v less state, dw
        alive += [q.new_empty(1, -(-T // SCAN), heads, d, e) for _ in range(2)]           # states and their gradients
        alive.append(torch.empty_like(k))                                                 # second part of dk
        return tuple(torch.empty_like(tensor) for tensor in (q, k, v, decay, beta))


@contextmanager
def stand_ins():
    """The fused kernels' shapes in place of transformers' torch code (only under FakeTensorMode: they compute nothing)."""
    convolution = lambda x, weight, *_, **__: FusedConvolution.apply(x, weight)
    rule = lambda q, k, v, g, beta, **_: (FusedRule.apply(q, k, v, g, beta), None)
    with mock.patch.object(qwen, "causal_conv1d_fn", convolution), mock.patch.object(qwen, "torch_chunk_gated_delta_rule", rule):
        yield


def measure_step(config, ranks, T, N, fused):
    """One micro-batch (forward and backward, gradients and Adam's moments already there) of model.load_model's own network on
    `ranks` ranks, shapes alone: {category: bytes} at the peak, as torch's FSDPMemTracker sees it, and its total.

    Replaced: reading weights; the device (a CPU, in bfloat16 as on GPUs); the causal mask, which transformers leaves out for rows
    like ours but, unable to look at their positions, makes under FakeTensorMode (tests/test_memory.py shows that it is None)."""
    import torch.distributed.fsdp as fsdp
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.testing._internal.distributed.fake_pg import FakeStore
    policy = partial(fsdp.MixedPrecisionPolicy, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    pretended = SimpleNamespace(sharded=True, main=False, device=torch.device("cpu"), on_main=lambda function, share: None)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
    try:
        with (tempfile.TemporaryDirectory() as folder, FakeTensorMode(allow_non_fake_inputs=True),
              stand_ins() if fused else nullcontext(), mock.patch.object(qwen, "create_causal_mask", lambda **_: None),
              mock.patch.object(dist.device_mesh, "init_device_mesh", lambda *_: mesh),
              mock.patch.object(fsdp, "MixedPrecisionPolicy", lambda **_: policy()),
              mock.patch("torch.distributed.checkpoint.state_dict.set_model_state_dict")):
            config.save_pretrained(folder)
            net = trained.load_model(folder, pretended, SimpleNamespace(attention="sdpa", recompute="on", train_vision=False))
            params = [p for p in net.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(params)
            for p in params:
                p.grad = torch.zeros_like(p)
                optimizer.state[p] = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            tokens = torch.zeros(1, T, dtype=torch.long)                                  # (1, T)
            where, targets = torch.arange(N), torch.zeros(N, dtype=torch.long)            # (N,), (N,)
            net.forward = MethodType(trained.target_logp, net)          # the tracker hooks forward and nothing else
            tracker = FSDPMemTracker(net, optimizer)
            tracker.track_inputs((tokens, where, targets))
            with tracker:
                net(tokens, where, targets, {}).sum().backward()
            peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    finally:
        dist.destroy_process_group()
    return {str(getattr(name, "value", name)): size for name, size in peak.items() if size}


def checks(config, ranks, T, N):
    """Yields (what, computed bytes or numbers, measured ones), cheapest first."""
    t, P = config.text_config, parameters(config)
    H, V, order = t.hidden_size, t.vocab_size, kinds(t)
    with torch.device("meta"):
        net = AutoModelForImageTextToText.from_config(config)
    total = sum(P[kind] for kind in order) + sum(P[k] for k in ("embedding", "head", "norm", "vision"))
    yield "parameters, all (count)", total, sum(p.numel() for p in net.parameters())
    yield ("parameters, vision tower (count)", P["vision"],
           sum(p.numel() for tower in trained.vision_towers(net) for p in tower.parameters()))
    for kind in dict.fromkeys(order):
        index, saved = order.index(kind), {"full": saved_full, "linear": partial(saved_linear, fused=False)}[kind]
        real = 512
        yield f"{kind} block, {real} tokens: kept for backward", saved(t, real), measure_block(t, index, real, fake=False)[0]
        yield f"{kind} block, {real} tokens, recomputed: kept", 0, measure_block(t, index, real, fake=False, recompute=True)[1]
        kept, _, peak = measure_block(t, index, T, fake=True)
        yield f"{kind} block, {T} tokens, shapes alone: kept", saved(t, T), kept
        last = H * t.intermediate_size * c                  # the gradient of the MLP's last matrix is there by then
        yield f"{kind} block, {T} tokens, shapes alone: peak", saved(t, T) + in_flight(t, T) + last, peak
    yield (f"log-probs, {N} targets, bf16, shapes alone: peak", sum(head_backward(V, H, N)) + N * H * c,
           measure_head(V, H, N, dtype=torch.bfloat16, fake=True))
    narrow, n = 256, 1024                                   # a width that this CPU can compute; the vocabulary is the real one
    computed = sum(head_backward(V, narrow, n, f)) + n * narrow * f
    yield f"log-probs, {n} targets, width {narrow}, float32: peak", computed, measure_head(V, narrow, n)
    yield f"log-probs, {n} targets, width {narrow}, float32: resident memory", computed, alone(resident_head, V, narrow, n, True)
    yield "… all logits at once: resident memory", 3 * n * V * f, alone(resident_head, V, narrow, n, False)
    largest = lambda tokens, *left_out: max(sum(m.values()) for name, m in moments(config, ranks, tokens, min(N, tokens)).items()
                                            if name not in ("update", *left_out))
    for tokens in (128, 1024, T):                           # at the 9B shape: the root's gradient is the peak, the head, a block
        yield (f"one step on {ranks} ranks, {tokens} tokens, fused kernels", largest(tokens, "linear block, torch"),
               measure_step(config, ranks, tokens, min(N, tokens), True)["Total"])
    t.layer_types = t.layer_types[:BLOCKS]                  # of alike blocks, in torch code each costs half a minute to follow
    t.num_hidden_layers = len(t.layer_types)
    yield (f"one step on {ranks} ranks, {T} tokens, torch code, first {t.num_hidden_layers} blocks", largest(T),
           measure_step(config, ranks, T, N, False)["Total"])


def parse_args():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    p.add_argument("--model-shape", default="qwen3.5-9b", help="qwen3.5-9b, or a folder with a config.json of that family")
    p.add_argument("--ranks", type=at_least(1), default=8, help="GPUs that the parameters are cut over (count)")
    p.add_argument("--tokens", type=at_least(1), default=32768, help="of the longest sample, a micro-batch by itself (tokens)")
    p.add_argument("--targets", type=at_least(1), default=2048, help="of them in the loss (tokens)")
    p.add_argument("--gpu", type=float, default=80, help="memory of a GPU (GiB)")
    p.add_argument("--measure", action="store_true", help="check the arithmetic on this CPU (minutes)")
    args = p.parse_args()
    if args.targets > args.tokens:
        p.error(f"--targets {args.targets} of --tokens {args.tokens}: expected at most as many")
    return args


def main():
    args = parse_args()
    config = shape(args.model_shape)
    columns = moments(config, args.ranks, args.tokens, args.targets)
    print("\n".join(table(columns, args.gpu)))
    P = parameters(config)
    total = sum(P[kind] for kind in kinds(config.text_config)) + sum(P[k] for k in ("embedding", "head", "norm", "vision"))
    print(f"\n{total:,} parameters; while loading, rank 0 holds them once more in host memory: {f * total / GIB:.1f} GiB")
    if args.measure:
        print("\n| check | computed | measured | difference | s |\n| --- | ---: | ---: | ---: | ---: |", flush=True)
        clock = time.perf_counter()
        for what, computed, measured in checks(config, args.ranks, args.tokens, args.targets):
            show = lambda n: f"{n:,}" if "count" in what else f"{n / GIB:.3f} GiB"
            off = f"{100 * (measured / computed - 1):+.2f} %" if computed else ""
            now = time.perf_counter()
            print(f"| {what} | {show(computed)} | {show(measured)} | {off} | {now - clock:.0f} |", flush=True)
            clock = now


if __name__ == "__main__":
    run_main(main)
