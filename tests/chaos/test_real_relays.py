"""A run of two hosts: weights go from relay to relay over a real network, and rollouts of the second host follow."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faults import SHORT_LEASE, CutNetwork, Etcds
from observer import Observer
from real_run import REPOSITORY, RealRun, Worker
from recording import Recorder

from laminar.buffer.records import Load, RelayLoad

pytestmark = [pytest.mark.chaos, pytest.mark.nightly, pytest.mark.timeout(600)]


@pytest.fixture
def network() -> Iterator[CutNetwork]:
    network = CutNetwork()
    yield network
    network.close()


@pytest.fixture
def etcds(tmp_path: Path, network: CutNetwork) -> Iterator[Etcds]:
    etcds = Etcds(tmp_path / "etcds", also=network.address)
    yield etcds
    etcds.close()


class SecondHost:
    """Workers in a network of their own, under a host name of their own. Only the store's folder is shared."""

    def __init__(self, run: RealRun, network: CutNetwork, etcds: Etcds) -> None:
        rename = ["unshare", "--uts", "sh", "-c", 'hostname second-host && exec "$@"', "sh"]
        self.run = run
        self.prefix = [*network.prefix, *rename]
        self.endpoint = f"{network.address}:{etcds.members[0].client_port}"

    def start(self, kind: str) -> Worker:
        return self.run.start_worker(kind, prefix=self.prefix, endpoint=self.endpoint)


def relay_load(seen: Observer, relay: str) -> RelayLoad | None:
    value = seen.value(seen.keys.load("relay", relay))
    return RelayLoad.parse(value) if value else None


def received(seen: Observer, relay: str) -> int:
    """The newest version that came to a relay from another; -1 if none has."""
    load = relay_load(seen, relay)
    return load.hop.version if load is not None and load.hop is not None else -1


def rollout_version(seen: Observer, rollout: str) -> int:
    value = seen.value(seen.keys.load("rollout", rollout))
    return Load.parse(value).version if value else -1


def relay_status(run: RealRun) -> str:
    """What `laminar relay status` prints."""
    command = [sys.executable, "-m", "laminar.cli", "relay", "status", str(run.store)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_rollouts_of_a_second_host_follow_by_its_relay_and_a_killed_relay_catches_up(
    real_run: Callable[..., RealRun], etcds: Etcds, network: CutNetwork, recorder: Recorder
) -> None:
    run = real_run(
        SHORT_LEASE, f'relay.bind="{network.address}/30"', "run.max_steps=40", "rollout.max_running=16",
        endpoints=etcds.endpoints,
    )  # fmt: skip
    seen = run.begin()
    second = SecondHost(run, network, etcds)
    relay = second.start("relay")
    first_relay = run.joined(relay)
    rollout = run.joined(second.start("rollout"))
    assert "second_host" in first_relay and "second_host" in rollout
    run.until(lambda: received(seen, first_relay) >= 0, "a version came to the second host")
    run.until(lambda: rollout_version(seen, rollout) >= 0, "its rollout has loaded a version")
    run.until(lambda: bool(seen.claims_of(rollout)), "and generates under it")
    home = next(id for id in seen.workers("relay") if id != first_relay)
    load = relay_load(seen, first_relay)
    assert load is not None and load.hop is not None and load.hop.peers == [home], "from the trainer's relay"

    before = seen.version()
    relay.process.send_signal(signal.SIGKILL)
    struck_at = time.monotonic()
    again = run.joined(second.start("relay"))
    run.until(lambda: received(seen, again) > before, "the relay that was started for it has caught up")
    recovery_s = time.monotonic() - struck_at
    run.until(lambda: rollout_version(seen, rollout) > before, "and the rollout goes on to newer versions")
    recorder.fault("relay of a second host", recovery_s)
    told = relay_status(run)
    assert all(relay.rsplit("-", 1)[-1] in told for relay in (home, again)), told
    run.assert_ended_well()
