"""The host of scoring processes: whatever user code does, a call ends with a value or a status; the pool lives on."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from laminar.config import EnvironmentConfig, RewardConfig
from laminar.errors import ConfigError, EnvironmentFailure, LaminarError
from laminar.workers.environments.base import Prompt, Transcript
from laminar.workers.environments.host import EnvironmentHost

PROMPT = Prompt(7, "2+2=", "4", {"level": 1})
USER_CODE = '''
    import os, signal, subprocess, sys, time
    from laminar.workers.environments.base import Score, Turn
    from laminar.workers.environments.rewards import NoResult

    def act(prompt, transcript):
        """The reply says what the scorer does."""
        return globals()[transcript.replies[-1]]()

    def fine(): return 0.25
    def parts(): return {"right": 1.0, "short": 0.5}
    def nan(): return float("nan")
    def infinite(): return float("inf")
    def beyond_float32(): return 1e39
    def word(): return "1"
    def none(): return None
    def raises(): raise ValueError("first\\nbad \\ud800 scorer")
    def exits(): sys.exit(3)
    def dies(): print("about to die", flush=True); os._exit(9)
    def prints(): print("{noise}"); sys.stdout.write("no newline"); os.write(1, b"raw"); return 1
    def reads(): return len(sys.stdin.read())
    def sleeps(): time.sleep(60)
    def burns(): return 9**9**9**9
    def starts_another(): subprocess.run(["sleep", "61.25"])
    def refused():
        import urllib.request
        urllib.request.urlopen("http://127.0.0.1:9/")
    def says_no(): raise NoResult("the judge is busy")
    def leaks(): raise RuntimeError("refused key " + os.environ["JUDGE_API_KEY"])
    def leaks_in_print(): print(os.environ["JUDGE_API_KEY"]); os._exit(1)
    def process(): return os.getpid()
    def alarm():
        def ring(*_): raise TimeoutError("alarm rang")
        signal.signal(signal.SIGALRM, ring); signal.alarm(1); time.sleep(30)
    def leaves_alarm(): signal.setitimer(signal.ITIMER_REAL, 0.05); return 1.0

    async def awaited(prompt, transcript): return 0.75

    class Counting:
        resume = "replay"
        def __init__(self, goal=2): self.goal = goal
        def reset(self, prompt):
            if prompt.prompt == "raise": raise KeyError("level")
            return Turn([{"role": "user", "content": prompt.prompt}], state="0")
        def step(self, prompt, state, reply):
            if reply == "sleep": time.sleep(60)
            if reply == "odd": return "not a turn"
            if reply == "surrogate": return Turn([{"role": "user", "content": "\\ud800"}])
            if reply == "long": return Turn(state="x" * (65 << 20))
            count = int(state) + 1
            return Turn([{"role": "user", "content": f"{count}"}], state=str(count), done=count >= self.goal)
        def score(self, prompt, transcript): return Score(float(len(transcript.replies)), {"turns": 2.0})
    class Unfinished:
        resume = "state"
        def reset(self, prompt): ...
'''


@pytest.fixture
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_code.py").write_text(textwrap.dedent(USER_CODE))
    (tmp_path / "broken_code.py").write_text("import no_such_package_here\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("JUDGE_API_KEY", "sk-very-secret-value")


@asynccontextmanager
async def running(
    reward: str = "user_code:act",
    environment: str = "single-turn",
    *,
    timeout: float = 20.0,
    workers: int = 1,
    **options: Any,
) -> AsyncIterator[EnvironmentHost]:
    host = EnvironmentHost(
        EnvironmentConfig(name=environment, options=options),
        RewardConfig(name=reward, timeout=timeout),
        workers=workers,
    )
    await host.start()
    try:
        yield host
    finally:
        await host.close()


def said(reply: str) -> Transcript:
    return Transcript([reply], [{"role": "user", "content": "2+2="}], "stop")


async def failure(host: EnvironmentHost, reply: str) -> EnvironmentFailure:
    with pytest.raises(EnvironmentFailure) as caught:
        await host.score(PROMPT, said(reply))
    return caught.value


pytestmark = pytest.mark.usefixtures("user_code")


async def test_failures_are_contained_and_say_what_happened() -> None:
    """Case 40: 1 of 8 scorers raises: contained, status says so. Case 17: the error is in front of the user."""
    async with running() as host:
        raised = await failure(host, "raises")
        assert raised.status == "reward_error" and "ValueError: bad ? scorer" in str(raised)
        assert "user_code.py:" in str(raised)
        for reply, told in [
            ("nan", "nan, not a finite float32"),
            ("infinite", "inf, not a finite float32"),
            ("beyond_float32", "not a finite float32"),
            ("word", "str '1', not a number"),
            ("exits", "SystemExit: 3"),
            ("unknown", "KeyError: 'unknown'"),
        ]:
            error = await failure(host, reply)
            assert error.status == "reward_error" and told in str(error), reply
        assert (await host.score(PROMPT, said("fine"))).reward == 0.25
        assert host.counts == {"reward_error": 7, "ok": 1}


async def test_what_cannot_be_asked_is_no_result() -> None:
    """Case 41: the scorer's server refuses the connection: "no result", not reward 0."""
    async with running() as host:
        for reply in ("refused", "says_no", "none"):
            assert (await failure(host, reply)).status == "reward_no_result", reply


async def test_user_output_does_not_disturb_the_answers() -> None:
    async with running() as host:
        assert (await host.score(PROMPT, said("prints"))).reward == 1
        assert (await host.score(PROMPT, said("reads"))).reward == 0
        score = await host.score(PROMPT, said("parts"))
        assert score.reward == 1.5 and score.parts == {"right": 1.0, "short": 0.5}
    async with running("user_code:awaited") as host:
        assert (await host.score(PROMPT, said("any"))).reward == 0.75


async def test_an_alarm_works_in_a_scorer() -> None:
    """Case 38: a scorer that uses signal.alarm works, since it runs in its process's main thread."""
    async with running() as host:
        error = await failure(host, "alarm")
        assert error.status == "reward_timeout" and "alarm rang" in str(error)
        assert (await host.score(PROMPT, said("leaves_alarm"))).reward == 1.0
        await asyncio.sleep(0.2)
        assert (await host.score(PROMPT, said("fine"))).reward == 0.25


async def test_endless_scorers_are_killed_and_the_pool_lives_on() -> None:
    """Case 39: a scorer evaluates `9**9**9**9`, four times, pool of 2: killed at the limit, the pool lives on."""
    async with running(workers=2, timeout=1.0) as host:
        errors = await asyncio.gather(*(failure(host, "burns") for _ in range(4)))
        assert [e.status for e in errors] == ["reward_timeout"] * 4
        assert "reward.timeout = 1 s" in str(errors[0])
        scores = await asyncio.gather(*(host.score(PROMPT, said("fine")) for _ in range(4)))
        assert [s.reward for s in scores] == [0.25] * 4


async def test_of_those_who_wait_for_a_scoring_process_one_speaks_for_all(caplog: pytest.LogCaptureFixture) -> None:
    """256 trajectories that wait for a slow judge would fill the log."""
    begun = time.monotonic()
    async with running(timeout=0.5) as host:
        await asyncio.gather(*(failure(host, "sleeps") for _ in range(7)))
    told = [r for r in caplog.records if "has waited 0.5 s for one of 1 scoring processes" in r.getMessage()]
    assert 1 <= len(told) <= (time.monotonic() - begun) / 0.5
    assert "raise reward.workers" in told[0].getMessage()


async def test_a_limit_also_kills_what_the_scorer_started() -> None:
    async with running(timeout=1.0) as host:
        assert (await failure(host, "starts_another")).status == "reward_timeout"
        assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "61.25"]]


async def test_a_blocking_scorer_does_not_block_the_loop() -> None:
    """Case 19: a reward blocks its process; leases keep being renewed, generation goes on."""
    async with running(timeout=1.5) as host:
        blocked = asyncio.create_task(failure(host, "sleeps"))
        ticks = 0
        while not blocked.done():
            await asyncio.sleep(0.05)
            ticks += 1
        assert ticks >= 15 and blocked.result().status == "reward_timeout"


async def test_stopping_takes_seconds_while_a_judge_sleeps() -> None:
    """Case 18: the judge sleeps 60 s and the run is stopped: stopping takes seconds."""
    async with running(timeout=60.0, workers=2) as host:
        calls = [asyncio.create_task(host.score(PROMPT, said("sleeps"))) for _ in range(3)]
        await asyncio.sleep(0.5)
        begun = time.monotonic()
        await host.close()
        results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
        assert time.monotonic() - begun < 5
        assert all(isinstance(r, LaminarError) and not isinstance(r, EnvironmentFailure) for r in results)


async def test_a_cancelled_call_leaves_no_stale_answer() -> None:
    async with running() as host:
        call = asyncio.create_task(host.score(PROMPT, said("sleeps")))
        await asyncio.sleep(0.3)
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call
        assert (await host.score(PROMPT, said("fine"))).reward == 0.25


async def test_a_scorer_that_ends_its_process_is_replaced() -> None:
    async with running() as host:
        error = await failure(host, "dies")
        assert error.status == "reward_error"
        assert "exit code 9" in str(error) and "about to die" in str(error)
        pid = int((await host.score(PROMPT, said("process"))).reward)
        os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.2)
        assert (await host.score(PROMPT, said("process"))).reward != pid


async def test_secrets_do_not_leave_in_messages(caplog: pytest.LogCaptureFixture) -> None:
    """Case 63: an API key in the environment is found nowhere in what a run records."""
    caplog.set_level(logging.DEBUG)
    async with running() as host:
        for reply in ("leaks", "leaks_in_print"):
            error = await failure(host, reply)
            assert "sk-very-secret-value" not in str(error) and "[JUDGE_API_KEY]" in str(error)
    assert "sk-very-secret-value" not in caplog.text


async def test_an_environment_of_several_turns() -> None:
    async with running("exact", "user_code:Counting", goal=2) as host:
        assert host.resume == "replay"
        turn = await host.reset(PROMPT)
        assert turn.messages == [{"role": "user", "content": "2+2="}] and turn.state == "0"
        turn = await host.step(PROMPT, turn.state, "a")
        assert not turn.done and turn.messages[0]["content"] == "1"
        assert (await host.step(PROMPT, turn.state, "b")).done
        score = await host.score(PROMPT, said("b"))
        assert score.reward == 1.0 and score.parts == {"turns": 2.0}


async def test_environment_failures_have_statuses_of_their_own() -> None:
    async with running("exact", "user_code:Counting", timeout=60.0) as host:
        for prompt, reply, told in [
            (Prompt(1, "raise"), None, "KeyError: 'level'"),
            (PROMPT, "odd", "returned str, expected a Turn"),
            (PROMPT, "surrogate", "surrogates not allowed"),
            (PROMPT, "long", "the limit is 67108864"),
        ]:
            with pytest.raises(EnvironmentFailure) as caught:
                await (host.reset(prompt) if reply is None else host.step(prompt, "0", reply))
            assert caught.value.status == "environment_error" and told in str(caught.value)
    async with running("exact", "user_code:Counting", timeout=1.0) as host:
        with pytest.raises(EnvironmentFailure, match="step of prompt 7 took more") as caught:
            await host.step(PROMPT, "0", "sleep")
        assert caught.value.status == "environment_timeout"


@pytest.mark.parametrize(
    ("reward", "environment", "told"),
    [
        ("broken_code:act", "single-turn", "'broken_code:act'.*No module named 'no_such_package_here'"),
        ("user_code:akt", "single-turn", "did you mean 'act'"),
        ("exakt", "single-turn", "did you mean 'exact'"),
        ("exact", "user_code:Unfinished", "lacks step, score"),
        ("exact", "single-trun", "'single-trun' is neither built in nor of the form module:name"),
        ("user_code:Unfinished", "single-turn", "not a function"),
    ],
)
async def test_what_cannot_be_loaded_is_named_at_the_start(reward: str, environment: str, told: str) -> None:
    host = EnvironmentHost(EnvironmentConfig(name=environment), RewardConfig(name=reward), workers=1)
    with pytest.raises(ConfigError, match=told):
        await host.start()


HOLDER = """
import asyncio
from laminar.config import EnvironmentConfig, RewardConfig
from laminar.workers.environments.base import Prompt, Transcript
from laminar.workers.environments.host import EnvironmentHost

async def main():
    host = EnvironmentHost(EnvironmentConfig(), RewardConfig(name="user_code:act", timeout=60), workers=2)
    await host.start()
    pids = [int((await host.score(Prompt(0, "x"), Transcript(["process"], [], "stop"))).reward) for _ in range(2)]
    print(*pids, flush=True)
    await host.score(Prompt(0, "x"), Transcript(["burns"], [], "stop"))

asyncio.run(main())
"""


async def test_nothing_outlives_a_killed_host() -> None:
    holder = await asyncio.create_subprocess_exec(sys.executable, "-c", HOLDER, stdout=asyncio.subprocess.PIPE)
    assert holder.stdout is not None
    pids = [int(pid) for pid in (await asyncio.wait_for(holder.stdout.readline(), 60)).split()]
    assert len(set(pids)) == 2 and all(psutil.pid_exists(pid) for pid in pids)
    holder.kill()
    await holder.wait()
    gone = [p for p in pids if _ended(p, within_s=5.0)]
    assert gone == pids


def _ended(pid: int, *, within_s: float) -> bool:
    try:
        psutil.Process(pid).wait(within_s)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True
