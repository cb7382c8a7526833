"""Model servers: the command line, the proof, the fleet, weights on the move. Here in front of our own engine dressed as vLLM; the real one
is in test_vllm.py."""

import argparse
import asyncio
import contextlib
import json

import aiohttp
import pytest
from aiohttp import web

import records
import serving
import vllm_server
from engine import Engine
from proxy import Proxy
from records import BadInput
from serving import Fleet
from upstream import UpstreamError

BODY = {"messages": [{"role": "user", "content": "pick the red mug"}], "max_tokens": 4, "logprobs": True, "return_token_ids": True,
        **records.TRAIN_SAMPLING}


def arguments(model, *options):
    parser = argparse.ArgumentParser()
    serving.add_engine_arguments(parser)
    args = parser.parse_args(["--model", str(model), *options])
    serving.resolve(args)
    return args


@pytest.fixture(scope="session")
def other_dir(tiny_dir, tmp_path_factory):
    """tiny_dir with other weights."""
    from transformers import AutoTokenizer

    from tiny import make_model
    folder, tokenizer = tmp_path_factory.mktemp("other"), AutoTokenizer.from_pretrained(tiny_dir)
    make_model(len(tokenizer), 64, 2, 2, 1, 128, seed=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Dressed:
    """engine.py behind vLLM's HTTP face: /health, /weight_info, pause, reload_weights, cache resets. Attributes make it misbehave."""

    def __init__(self, *folders, label="default", root=None):
        self.engines = {str(f.resolve()): Engine(f, slots=8, batch=8, max_length=256) for f in folders}
        self.engine = self.engines[str(folders[0].resolve())]
        self.label, self.root, self.alter, self.asked, self.paths = label, root, None, [], []
        self.sick, self.fail_reload, self.skip_reload, self.hold = False, False, False, None

    @contextlib.asynccontextmanager
    async def serve(self):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await self.runner.cleanup()
            for engine in self.engines.values():
                await engine.close()

    async def answer(self, request):
        path, body = request.path, await request.json() if request.can_read_body else {}
        self.paths.append(path)
        if self.sick:
            return web.json_response({"error": {"message": "EngineCore encountered an issue"}}, status=503 if path == "/health" else 500)
        if path == "/v1/models":
            return web.json_response({"data": [{"id": "policy", **({"root": self.root} if self.root else {})}]})
        if path == "/weight_info":
            return web.json_response({"weight_version": self.label})
        if path == "/update_weight_version":
            self.label = body["new_version"]
        if path == "/collective_rpc":
            if self.fail_reload:
                return web.json_response({"error": {"message": "no such path"}}, status=500)
            if not self.skip_reload:
                self.engine = self.engines[body["kwargs"]["weights_path"]]
        if path == "/v1/chat/completions":
            self.asked.append(body)
            if self.hold:
                await self.hold.wait()
            try:
                reply = await self.engine.chat(body)
            except UpstreamError as e:
                return web.json_response({"error": {"message": e.message}}, status=e.status)
            reply = {k: v for k, v in reply.items() if k not in ("policy_version", "queue_seconds")}       # vLLM says neither
            return web.json_response(self.alter(reply, body) if self.alter else reply)
        return web.json_response({"success": True, "status": "ok"})


def with_fleet(test, model, *servers, options=()):
    async def main():
        async with contextlib.AsyncExitStack() as stack:
            for server in servers:
                await stack.enter_async_context(server.serve())
            fleet = Fleet(arguments(model, "--engine-url", ",".join(s.url for s in servers), *options), records.policy_version(model))
            try:
                return await asyncio.wait_for(test(fleet), 60)
            finally:
                await fleet.close()
    return asyncio.run(main())


async def ready(fleet):
    await fleet.ready()


# ---------------------------------------------------------------------------------------------- arguments and the command line

@pytest.mark.parametrize(("options", "message"), [
    (("--engine-url", "http://a", "--engine", "vllm"), "give one of them"),
    (("--engine-url", "http://a", "--slots", "3"), "--slots 3: --engine-url does not honour it; it is for the in-process engine"),
    (("--replicas", "2"), "--replicas 2: the in-process engine does not honour it; it is for --engine vllm"),
    (("--engine", "vllm", "--slots", "3"), "--slots 3: --engine vllm does not honour it"),
    (("--engine-url", "http://a", "--max-length", "30"), "--max-length 30: --engine-url does not honour it"),
    (("--probe", "off"), "--probe off: the in-process engine"),
    (("--engine", "vllm", "--gpu-memory", "1.5"), "--gpu-memory 1.5: expected a share"),
])
def test_an_option_that_the_chosen_engine_does_not_honour_is_refused(tiny_dir, options, message):
    with pytest.raises(BadInput, match=message):
        arguments(tiny_dir, *options)


def checkpoint(tmp_path, tiny_dir, template="{{ messages[0].content }}", **config):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_dir / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template)
    (tmp_path / "config.json").write_text(json.dumps({**json.loads((tiny_dir / "config.json").read_text()), **config}))
    return tmp_path


@pytest.mark.parametrize(("kind", "template", "expected"), [
    ("qwen3", "{% if enable_thinking %}{% endif %}", ("hermes", "qwen3")), ("qwen3", "plain", ("hermes", None)),
    ("qwen3_5", "{{ '<|im_start|>assistant\n<think>\n' }}", ("qwen3_coder", "qwen3")), ("llama", "plain", ("llama3_json", None)),
])
def test_parsers_follow_the_model_family_and_whether_its_template_thinks(tmp_path, tiny_dir, kind, template, expected):
    assert vllm_server.parsers(checkpoint(tmp_path, tiny_dir, template, model_type=kind)) == expected


def test_an_unknown_family_is_named_and_may_be_told(tmp_path, tiny_dir):
    folder = checkpoint(tmp_path, tiny_dir, "enable_thinking", model_type="rwkv9")
    with pytest.raises(BadInput, match="no tool-call parser known for model_type 'rwkv9'.*--tool-parser"):
        vllm_server.parsers(folder)
    with pytest.raises(BadInput, match="--reasoning-parser, or 'none'"):
        vllm_server.parsers(folder, "hermes")
    assert vllm_server.parsers(folder, "hermes", "none") == ("hermes", None)


def test_the_command_says_everything_that_recording_needs(tiny_dir):
    args = arguments(tiny_dir, "--engine", "vllm", "--max-length", "512", "--max-images", "4", "--tensor-parallel", "2", "--vllm-args",
                     "--quantization fp8 --seed 1")
    env, argv = vllm_server.vllm_command(args, 8003, gpus=("2", "3"))
    line = vllm_server.typed(env, argv)
    for part in ("CUDA_VISIBLE_DEVICES=2,3", "VLLM_SERVER_DEV_MODE=1", "--logprobs-mode processed_logprobs", "--generation-config vllm",
                 "--enable-auto-tool-choice", "--tool-call-parser hermes", "--dtype float32", "--max-model-len 512", "--port 8003",
                 "--enable-prefix-caching", "--tensor-parallel-size 2", "--host 127.0.0.1", """--limit-mm-per-prompt '{"image": 4}'""",
                 "--quantization fp8 --seed 1", "--served-model-name policy", "--gpu-memory-utilization 0.9"):
        assert part in line, part
    assert "--reasoning-parser" not in line                # the tiny template does not think


@pytest.mark.parametrize(("rank", "visible", "expected"), [
    (None, None, [("0", "1"), ("2", "3")]), ("1", None, [("4", "5"), ("6", "7")]), (None, "7,6,5,4", [("7", "6"), ("5", "4")]),
    ("1", "0,1,2,3", "need GPUs 4 to 7, visible are 4")])
def test_replicas_share_the_gpus_out(monkeypatch, rank, visible, expected):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    for name, value in (("LOCAL_RANK", rank), ("CUDA_VISIBLE_DEVICES", visible)):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    if isinstance(expected, str):
        with pytest.raises(BadInput, match=expected):
            vllm_server.replica_gpus(2, 2)
    else:
        assert vllm_server.replica_gpus(2, 2) == expected


# ---------------------------------------------------------------------------------------------- the proof

def test_a_right_server_is_proved_by_its_log_probs(tiny_dir, capsys):
    with_fleet(ready, tiny_dir, Dressed(tiny_dir))
    said = capsys.readouterr().out
    assert f"token ids, processed log-probs, policy {records.policy_version(tiny_dir)} (no label, |log q - log π| ≤" in said


def no_ids(reply, body):
    reply["choices"][0].pop("token_ids")
    return reply


def filler(reply, body):
    reply["choices"][0]["logprobs"]["content"][0]["logprob"] = -9999.0
    return reply


def raw(reply, body):
    if body["top_k"] == 1:
        reply["choices"][0]["logprobs"]["content"][0]["logprob"] = -2.5
    return reply


def other_prompt(reply, body):
    reply["prompt_token_ids"] = reply["prompt_token_ids"][1:]
    return reply


def shifted(reply, body):
    for entry in reply["choices"][0]["logprobs"]["content"]:
        entry["logprob"] -= 0.0 if body["top_k"] == 1 else 0.01
    return reply


@pytest.mark.parametrize(("alter", "message"), [
    (no_ids, "carry no token ids"), (filler, "every sampled token needs one"), (raw, "serves raw log-probs .top_k 1 gave -2.500"),
    (other_prompt, "renders a chat to other ids"), (shifted, r"log q - log π. is 0.01 at most.*allowed 0.001.*another checkpoint")])
def test_a_wrong_server_is_refused_and_the_line_names_what_is_wrong(tiny_dir, alter, message):
    server = Dressed(tiny_dir)
    server.alter = alter
    with pytest.raises(BadInput, match=message):
        with_fleet(ready, tiny_dir, server)


def test_a_server_of_another_checkpoint_is_refused_by_log_probs_label_or_folder(tiny_dir, other_dir):
    with pytest.raises(BadInput, match="another checkpoint is loaded"):
        with_fleet(ready, tiny_dir, Dressed(other_dir))
    with pytest.raises(BadInput, match="serves policy 0123456789ab.*serving.py roll"):
        with_fleet(ready, tiny_dir, Dressed(tiny_dir, label="0123456789ab"))
    with pytest.raises(BadInput, match=f"serves policy {records.policy_version(other_dir)}"):
        with_fleet(ready, tiny_dir, Dressed(tiny_dir, root=str(other_dir)))
    with_fleet(ready, tiny_dir, Dressed(other_dir), options=("--probe", "light"))      # without a forward, nothing tells them apart


def test_no_server_at_all_is_one_clear_line(tiny_dir):
    async def main():
        fleet = Fleet(arguments(tiny_dir, "--engine-url", f"http://127.0.0.1:{vllm_server.free_port()}"), "v")
        with pytest.raises(BadInput, match="no usable model server.*serving.py command --model"):
            await fleet.ready()
    asyncio.run(main())


# ---------------------------------------------------------------------------------------------- the fleet

def test_episodes_are_spread_and_stay_on_their_server(tiny_dir):
    a, b = Dressed(tiny_dir), Dressed(tiny_dir)

    async def test(fleet):
        await fleet.ready()
        a.asked.clear(), b.asked.clear()
        for _turn in range(3):
            await asyncio.gather(*(fleet.chat({**BODY, "user": f"e{i}"}, f"e{i}") for i in range(6)))
        homes = [{body["user"] for body in server.asked} for server in (a, b)]
        assert len(homes[0]) == len(homes[1]) == 3 and not homes[0] & homes[1]
    with_fleet(test, tiny_dir, a, b, options=("--probe", "off"))


def test_a_dead_server_is_drained_and_its_episodes_move(tiny_dir, capsys):
    a, b = Dressed(tiny_dir), Dressed(tiny_dir)

    async def test(fleet):
        await fleet.ready()
        for episode in ("e0", "e1"):
            await fleet.chat(BODY, episode)
        a.sick = True
        victim = next(e for e in ("e0", "e1") if fleet.home[e].url == a.url)
        with pytest.raises(UpstreamError, match="EngineCore") as e:
            await fleet.chat(BODY, victim)
        assert e.value.status == 500 and fleet.dead() is None
        before = len(b.asked)
        await fleet.chat(BODY, victim)                     # its client's retry
        await fleet.chat(BODY, "new")
        assert len(b.asked) == before + 2 and fleet.counts == {"servers lost": 1, "moved episodes": 1}
        await b.runner.cleanup()                           # the last one goes: connections refused
        with pytest.raises(UpstreamError):
            await fleet.chat(BODY, "new")
        with pytest.raises(UpstreamError, match="no model server left"):
            await fleet.chat(BODY, "new")
        assert a.url in fleet.dead() and b.url in fleet.dead()
    with_fleet(test, tiny_dir, a, b, options=("--probe", "off"))
    assert f"{a.url} gets no more calls" in capsys.readouterr().err


def test_a_failed_call_on_a_healthy_server_drains_nothing(tiny_dir):
    server = Dressed(tiny_dir)

    async def test(fleet):
        await fleet.ready()
        for _ in range(5):
            with pytest.raises(UpstreamError, match="maximum context length"):
                await fleet.chat({**BODY, "messages": [{"role": "user", "content": "z" * 5000}]}, "e")
        await fleet.chat(BODY, "e")
        assert fleet.dead() is None
    with_fleet(test, tiny_dir, server, options=("--probe", "off"))


def test_a_server_that_hangs_is_drained_after_calls_without_an_answer(tiny_dir, monkeypatch):
    monkeypatch.setattr(serving, "PATIENCE", 0.05)
    server = Dressed(tiny_dir)

    async def test(fleet):
        await fleet.ready()
        server.hold = asyncio.Event()
        for _ in range(serving.STUCK):
            assert fleet.dead() is None
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(fleet.chat(BODY, "e"), 0.1)
        assert "without an answer" in fleet.dead()
        server.hold.set()
    with_fleet(test, tiny_dir, server, options=("--probe", "off"))


# ---------------------------------------------------------------------------------------------- weights on the move

def test_a_roll_holds_calls_loads_every_server_resets_caches_and_proves(tiny_dir, other_dir, capsys):
    a, b = Dressed(tiny_dir, other_dir), Dressed(tiny_dir, other_dir)

    async def test(fleet):
        await fleet.ready()
        a.hold = b.hold = asyncio.Event()
        first = asyncio.create_task(fleet.chat(BODY, "e0"))
        while not any(body["messages"] == BODY["messages"] for s in (a, b) for body in s.asked):
            await asyncio.sleep(0.01)
        rolling = asyncio.create_task(fleet.roll(str(other_dir)))
        await asyncio.sleep(0.1)
        held = asyncio.create_task(fleet.ready())          # what the proxy awaits before a call is sent
        await asyncio.sleep(0.05)
        assert not held.done() and not any("/collective_rpc" in s.paths for s in (a, b))      # the call in flight ends first
        a.hold.set()
        await first
        assert await rolling == records.policy_version(other_dir) == fleet.policy_version
        await held
        for server in (a, b):
            done = [p for p in server.paths if "chat" not in p]
            after = done[len(done) - 1 - done[::-1].index("/pause"):]
            assert after[:7] == ["/pause", "/collective_rpc", "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache",
                                 "/update_weight_version", "/resume"]
            assert server.label == fleet.policy_version
    with_fleet(test, tiny_dir, a, b)
    assert "log-probs moved" in capsys.readouterr().out


@pytest.mark.parametrize(("fault", "why"), [("skip_reload", "the exchange did nothing"), ("fail_reload", "no such path")])
def test_an_exchange_that_did_nothing_or_failed_drains_the_server_and_the_rest_goes_on(tiny_dir, other_dir, fault, why):
    a, b = Dressed(tiny_dir, other_dir), Dressed(tiny_dir, other_dir)
    setattr(b, fault, True)

    async def test(fleet):
        await fleet.ready()
        await fleet.roll(str(other_dir))
        assert [s.dead is None for s in fleet.servers] == [True, False] and why in fleet.servers[1].dead
        assert b.label == "unproved"
        setattr(a, fault, True)
        with pytest.raises(BadInput, match=f"no model server left.*{why}"):
            await fleet.roll(str(tiny_dir))
        with pytest.raises(UpstreamError, match="no model server left"):
            await fleet.chat(BODY, "e")
    with_fleet(test, tiny_dir, a, b)


def test_the_roll_and_probe_commands_work_on_running_servers(tiny_dir, other_dir, capsys, monkeypatch):
    server = Dressed(tiny_dir, other_dir)

    async def command(name, model):
        monkeypatch.setattr("sys.argv", ["serving.py", name, "--model", str(model), "--engine-url", server.url])
        args = serving.parse_args()
        serving.resolve(args)
        await serving.work(args)

    async def main():
        async with server.serve():
            await command("probe", tiny_dir)
            await command("roll", other_dir)
            await command("probe", other_dir)
            with pytest.raises(BadInput, match="serves policy"):
                await command("probe", tiny_dir)
    asyncio.run(main())
    assert "log-probs moved" in capsys.readouterr().out


def test_a_proxy_told_of_the_next_checkpoint_holds_calls_meanwhile_and_stamps_them_with_it(tiny_dir, other_dir, tmp_path):
    server = Dressed(tiny_dir, other_dir)
    old, new = records.policy_version(tiny_dir), records.policy_version(other_dir)

    async def test(fleet):
        proxy = Proxy(fleet, tmp_path, records.TRAIN_SAMPLING, 8, 0, standalone=True)
        base = f"http://127.0.0.1:{await proxy.start()}"
        async with aiohttp.ClientSession() as session:
            async def post(path, body):
                async with session.post(base + path, json=body) as response:
                    return response.status, await response.json()
            assert (await post("/ep/before/v1/chat/completions", BODY))[0] == 200
            server.hold = asyncio.Event()
            flying = asyncio.create_task(post("/ep/flying/v1/chat/completions", BODY))
            while fleet.servers[0].in_flight == 0:
                await asyncio.sleep(0.01)
            rolling = asyncio.create_task(post("/policy", {"model": str(other_dir)}))
            while fleet.open.is_set():
                await asyncio.sleep(0.01)
            held = asyncio.create_task(post("/ep/held/v1/chat/completions", BODY))
            await asyncio.sleep(0.05)
            assert not held.done() and not rolling.done()
            server.hold.set()
            assert (await flying)[0] == (await held)[0] == 200 and await rolling == (200, {"policy_version": new})
            for body, status, word in (({"model": str(tmp_path)}, 409, "not a checkpoint folder"), ({}, 400, "wants"), ([], 400, "wants")):
                got, reply = await post("/policy", body)
                assert got == status and word in reply["error"]["message"]
        await proxy.stop()
    with_fleet(test, tiny_dir, server)
    calls = {c.episode_id: c for c in records.read_calls(tmp_path / "calls.jsonl")}
    assert {e: (c.policy_version, c.policy_version_end, records.call_problem(c)) for e, c in calls.items()} == {
        "before": (old, old, None), "flying": (old, old, None), "held": (new, new, None)}
