"""What goes wrong with model servers around start-up and exchanges of weights, and what must not come of it."""

import asyncio
import contextlib
import shutil
import sys

import aiohttp
import pytest
from aiohttp import web

import records
import serving
import vllm_server
from conftest import ROOT
from fakes import MESSAGES, Fake, post, reply, run, serve_model
from proxy import Proxy
from records import BadInput
from serving import Fleet
from test_serving import BODY, Dressed, arguments, other_dir, ready, with_fleet  # noqa: F401  (other_dir is a fixture)
from upstream import HttpUpstream, UpstreamError

LIGHT, OFF = ("--probe", "light"), ("--probe", "off")


@contextlib.asynccontextmanager
async def proxied(fleet, out):
    proxy = Proxy(fleet, out, records.TRAIN_SAMPLING, 8, 0, standalone=True)
    try:
        yield f"http://127.0.0.1:{await proxy.start()}"
    finally:
        await proxy.stop()


async def in_flight(fleet):
    while fleet.servers[0].in_flight == 0:
        await asyncio.sleep(0.01)


# ---------------------------------------------------------------------------------------------- which policy a call is stamped with

def test_a_call_that_the_new_weights_answered_before_the_proof_is_never_trained_on(tiny_dir, other_dir, tmp_path, monkeypatch):  # noqa: F811
    server, real = Dressed(tiny_dir, other_dir), serving.fingerprint

    async def test(fleet):
        async with proxied(fleet, tmp_path) as url:
            await fleet.ready()
            held = server.hold = asyncio.Event()
            flying = asyncio.create_task(post(url, BODY, path="/ep/f/v1/chat/completions"))
            await in_flight(fleet)

            async def probe(s):
                server.hold = None                         # the call waits on: vLLM has queued it while paused
                return await real(s)

            async def exchange(*a):
                await loaded(*a)
                held.set()                                 # resumed: now it runs, on the new weights
                await flying
            loaded, fleet.servers[0].exchange = fleet.servers[0].exchange, exchange
            monkeypatch.setattr(serving, "fingerprint", probe)
            await fleet.roll(str(other_dir), patience=0.05)
    with_fleet(test, tiny_dir, server, options=LIGHT)
    [call] = records.read_calls(tmp_path / "calls.jsonl")
    theirs = vllm_server.reference(other_dir)(call.prompt_token_ids, call.token_ids)
    assert call.logprobs == pytest.approx(theirs, abs=1e-4)            # it really was the new policy
    assert records.call_problem(call) == "policy version changed during the call"


def test_a_server_that_somebody_else_rolled_gets_no_new_episode(tiny_dir, other_dir, tmp_path):  # noqa: F811
    server = Dressed(tiny_dir, other_dir)

    async def test(fleet):
        async with proxied(fleet, tmp_path) as url:
            await fleet.ready()
            server.engine, server.label = server.engines[str(other_dir.resolve())], records.policy_version(other_dir)
            assert (await post(url, BODY))[0] == 503
            assert "rolled by another command" in fleet.dead()
    with_fleet(test, tiny_dir, server)
    [call] = records.read_calls(tmp_path / "calls.jsonl")
    assert records.call_problem(call)


def test_a_weight_version_that_is_not_ours_marks_the_call(tmp_path):
    def step(body):
        answer = reply(body)
        answer["choices"][0]["weight_versions"] = [{"version": "v9", "start": 0, "end": 3}]
        return answer

    async def test(proxy, url):
        await post(url, {"messages": MESSAGES})
    [call] = run(test, Fake(step), tmp_path)
    assert (call.policy_version, call.policy_version_end) == ("v1", "v9") and records.call_problem(call)


# ---------------------------------------------------------------------------------------------- rolls that are cut short or cannot work

def test_a_roll_goes_on_when_its_client_leaves_and_calls_with_it(tiny_dir, other_dir, tmp_path):  # noqa: F811
    server = Dressed(tiny_dir, other_dir)

    async def test(fleet):
        async with proxied(fleet, tmp_path) as url:
            await fleet.ready()
            server.hold = asyncio.Event()
            flying = asyncio.create_task(post(url, BODY, path="/ep/f/v1/chat/completions"))
            await in_flight(fleet)
            rolling = asyncio.create_task(post(url, {"model": str(other_dir)}, path="/policy"))
            while fleet.open.is_set():
                await asyncio.sleep(0.01)
            rolling.cancel()
            server.hold.set()
            assert (await flying)[0] == 200
            assert (await post(url, BODY, path="/ep/g/v1/chat/completions"))[0] == 200
    with_fleet(test, tiny_dir, server, options=LIGHT)
    versions = {c.episode_id: c.policy_version for c in records.read_calls(tmp_path / "calls.jsonl")}
    assert versions == {"f": records.policy_version(tiny_dir), "g": records.policy_version(other_dir)}


@pytest.mark.parametrize("options", [(), LIGHT])
def test_a_checkpoint_without_weights_or_tokenizer_is_told_before_anything_is_touched(tiny_dir, tmp_path, options):
    server, bad = Dressed(tiny_dir), tmp_path / "bad"
    bad.mkdir()
    shutil.copy(tiny_dir / "config.json", bad)

    async def test(fleet):
        async with proxied(fleet, tmp_path / "out") as url:
            await fleet.ready()
            for body in ({"model": str(bad)}, {"model": str(tmp_path / "nowhere")}):
                assert (await post(url, body, path="/policy"))[0] == 409
            async with aiohttp.ClientSession() as session, session.post(url + "/policy", data=b"{") as response:
                assert response.status == 400
            assert (await post(url, BODY))[0] == 200
        assert "/pause" not in server.paths
    with_fleet(test, tiny_dir, server, options=options)


def test_rolling_to_what_is_served_already_only_proves(tiny_dir, other_dir):  # noqa: F811
    server = Dressed(tiny_dir, other_dir)

    async def test(fleet):
        await fleet.ready()
        for _ in range(2):
            await fleet.roll(str(other_dir))
        assert server.paths.count("/collective_rpc") == 1 and fleet.dead() is None
    with_fleet(test, tiny_dir, server)


def test_the_roll_command_fails_if_one_server_did_not_follow(tiny_dir, other_dir, monkeypatch):  # noqa: F811
    a, b = Dressed(tiny_dir, other_dir), Dressed(tiny_dir, other_dir)
    b.fail_reload = True

    async def main():
        async with a.serve(), b.serve():
            monkeypatch.setattr("sys.argv", ["serving.py", "roll", "--model", str(other_dir), "--engine-url", f"{a.url},{b.url}/v1/", *LIGHT])
            args = serving.parse_args()
            serving.resolve(args)
            with pytest.raises(BadInput, match="roll: 1 of 2 servers do not serve"):
                await serving.work(args)
    asyncio.run(main())


def test_an_exchange_whose_proof_never_came_is_not_believed(tiny_dir):
    server = Dressed(tiny_dir, label=records.policy_version(tiny_dir) + vllm_server.UNPROVED)
    with pytest.raises(BadInput, match="serves policy .*-unproved"):
        with_fleet(ready, tiny_dir, server, options=LIGHT)


# ---------------------------------------------------------------------------------------------- draining

def test_one_cut_of_several_connections_counts_once(tiny_dir):
    server = Dressed(tiny_dir)

    async def test(fleet):
        await fleet.ready()

        async def cut(body):
            await asyncio.sleep(0.02)
            raise UpstreamError(502, "ServerDisconnectedError", "connection")
        whole, fleet.servers[0].http.chat = fleet.servers[0].http.chat, cut
        await asyncio.gather(*(fleet.chat(BODY, f"e{i}") for i in range(2 * serving.STUCK)), return_exceptions=True)
        fleet.servers[0].http.chat = whole
        await fleet.chat(BODY, "e")
        assert fleet.dead() is None
    with_fleet(test, tiny_dir, server, options=OFF)


def test_the_patience_with_a_hanging_server_is_below_its_clients_own(tiny_dir):
    for name, seconds, expected in (("request_timeout", 120, 108), ("timeout", 1800, serving.PATIENCE)):
        args = arguments(tiny_dir, "--engine-url", "http://127.0.0.1:9")
        setattr(args, name, seconds)
        assert Fleet(args, "v").patience == expected


# ---------------------------------------------------------------------------------------------- start-up and proof

def nan(answer, body):
    for entry in answer["choices"][0]["logprobs"]["content"]:
        entry["logprob"] = float("nan")
    return answer


@pytest.mark.parametrize("alter", [nan, lambda answer, body: {"choices": []}, lambda answer, body: {"choices": [{"logprobs": {"content": [3]}}]}])
def test_a_malformed_proof_is_one_line(tiny_dir, alter):
    server = Dressed(tiny_dir)
    server.alter = alter
    with pytest.raises(BadInput):
        with_fleet(ready, tiny_dir, server)


@pytest.mark.parametrize("url", [",", "", "http://a,,", "127.0.0.1:8000", "ftp://a", "http://", "http://a,http://a/v1/"])
def test_wrong_urls_are_refused(tiny_dir, url):
    with pytest.raises(BadInput, match="--engine-url"):
        arguments(tiny_dir, "--engine-url", url)


def stand_in(folder, behaviour):
    """A "python that has vLLM" which behaves as told; its pids are in folder/pids."""
    path = folder / "python"
    path.write_text(f"#!{sys.executable}\nimport os, sys, time\nopen('{folder}/pids', 'a').write(f'{{os.getpid()}} ')\n{behaviour}\n")
    path.chmod(0o755)
    return str(path)


def alive(folder):
    def running(pid):
        try:
            return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
        except FileNotFoundError:
            return False
    pids = folder / "pids"                                 # missing: it was ended before its first line
    return [pid for pid in pids.read_text().split() if running(pid)] if pids.exists() else []


def test_one_replica_that_does_not_start_ends_the_others_and_a_second_try_starts_anew(tiny_dir, tmp_path):
    python = stand_in(tmp_path, f"n = len(open('{tmp_path}/pids').read().split())\nif n == 2: sys.exit('ValueError: no memory for you')\ntime.sleep(600)")

    async def main():
        args = arguments(tiny_dir, "--engine", "vllm", "--vllm-python", python, "--replicas", "2", *LIGHT, "--startup", "4")
        args.output = str(tmp_path)
        fleet = Fleet(args, records.policy_version(tiny_dir))
        with pytest.raises(BadInput, match="no memory for you"):
            await fleet.ready()
        assert not alive(tmp_path) and len(asyncio.all_tasks()) == 1
        with pytest.raises(BadInput, match="not ready after --startup 4 s"):
            await fleet.ready()
        assert len(fleet.servers) == 2 and len((tmp_path / "pids").read_text().split()) == 4
    asyncio.run(main())
    assert not alive(tmp_path)


def test_somebody_elses_server_on_our_port_is_neither_used_nor_labelled(tiny_dir, tmp_path, monkeypatch):
    other = Dressed(tiny_dir, root="/somebody/elses/model")

    async def main():
        async with other.serve():
            monkeypatch.setattr(serving, "free_port", lambda: int(other.url.rsplit(":", 1)[1]))
            args = arguments(tiny_dir, "--engine", "vllm", "--vllm-python", stand_in(tmp_path, "time.sleep(600)"), *LIGHT)
            args.output = str(tmp_path)
            with pytest.raises(BadInput, match="/somebody/elses/model answers there, not ours"):
                await Fleet(args, records.policy_version(tiny_dir)).ready()
    asyncio.run(main())
    assert other.label == "default" and not alive(tmp_path)


def test_the_error_of_an_earlier_start_is_not_told_again(tmp_path):
    log = tmp_path / "vllm-0.log"
    log.write_text("ValueError: of last week\n")

    async def main():
        server = vllm_server.Server("http://127.0.0.1:1", "v", log)
        await server.launch({}, ["/bin/sh", "-c", "echo ValueError: of today"])
        await server.wait_ready(10)
    with pytest.raises(BadInput, match="of today"):
        asyncio.run(main())


@pytest.mark.parametrize("options", [("--vllm-python", str(ROOT / "README.md")), ("--vllm-python", "/nowhere"), ("--vllm-args", "--a 'b")])
def test_a_vllm_that_cannot_be_started_is_one_line(tiny_dir, tmp_path, options):
    async def main():
        args = arguments(tiny_dir, "--engine", "vllm", *LIGHT, *options)
        args.output = str(tmp_path)
        await Fleet(args, "v").ready()
    with pytest.raises(BadInput, match="--vllm-"):
        asyncio.run(main())


def test_an_error_text_that_repeats_the_request_is_cut(tmp_path):
    async def handler(request):
        return web.json_response({"error": {"message": "bad input: " + "x" * 1_000_000}}, status=400)
    upstream = HttpUpstream("http://127.0.0.1:9", "v", "m")

    async def test(proxy, url):
        runner, base = await serve_model(handler)
        upstream.url = base + "/v1"
        status, answer = await post(url, {"messages": MESSAGES})
        assert status == 400 and len(answer["error"]["message"]) == 2000
        status, answer = await post(url, {"messages": MESSAGES, "max_tokens": "y" * 1_000_000})
        assert status == 400 and len(answer["error"]["message"]) < 200
        await runner.cleanup()
    run(test, upstream, tmp_path)
    assert (tmp_path / "calls.jsonl").stat().st_size < 10_000
