"""Ranks on several hosts: a slow link, and one that is cut in the middle of a step."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.cluster.hosts import ADDRESSES, NODES, Hosts
from tests.cluster.lab import PATHOSEG, Lab, assert_same_run
from tests.forked_starts.sitecustomize import SERVER

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(900)]

MPIRUN = Path(__file__).resolve().parents[2] / "pipelines/hosts/mpirun.sh"
# What a process finds out of where it is; and at the end whether it is forked.
_WHERE = """
import platform, socket
from pathlib import Path
names = [socket.gethostname(), platform.node(), *(name for _, name in socket.if_nameindex())]
print(*names, *map(socket.gethostbyname, ("node1", "node2")), Path("/etc/hosts").read_text())
print("tests.fork_server" in Path("/proc/self/cmdline").read_text())
"""
# Starts a command as a rank on each node, and gives the processes to wait for.
Starter = Callable[[Hosts, Lab, list[str]], "list[subprocess.Popen[str]]"]


def by_mpi(hosts: Hosts, lab: Lab, command: list[str]) -> list[subprocess.Popen[str]]:
    where = {"HOSTS": ",".join(f"{node}:1" for node in NODES)}
    agent = {"PRTE_MCA_plm_ssh_agent": str(hosts.agent)}
    named = [Path(command[0]).name, *command[1:]]  # PATH says where it is, on both hosts
    return [lab.start(hosts.command(NODES[0], MPIRUN, *named), **where, **agent)]


def by_gloo(hosts: Hosts, lab: Lab, command: list[str]) -> list[subprocess.Popen[str]]:
    meeting = {"MASTER_ADDR": NODES[0], "MASTER_PORT": "29500"}
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    return [
        lab.start(hosts.command(node, *command), **meeting, **world, RANK=str(rank))
        for rank, node in enumerate(NODES)
    ]


@pytest.mark.parametrize("node", NODES)
def test_a_forked_process_is_on_its_host(hosts: Hosts, tmp_path: Path, node: str) -> None:
    """Compare what it finds there with what an interpreter of its own and one by the agent find."""
    script = tmp_path / "where.py"
    script.write_text(_WHERE)
    command = [sys.executable, str(script)]
    path = f"PYTHONPATH={shlex.quote(os.environ['PYTHONPATH'])}"
    alone = _told(hosts.command(node, "env", "-u", SERVER, *command))
    forked = _told(hosts.command(node, *command))
    by_agent = _told([str(hosts.agent), node, f"{path} {shlex.join(command)}"])
    assert (alone.pop(), forked.pop(), by_agent.pop()) == ("False", "True", "True")
    assert forked == by_agent == alone
    assert forked[0].split()[:2] == [node, node]
    assert {"lo", "eth0", ADDRESSES[NODES[node == NODES[0]]]} <= {*forked[0].split()}
    assert hosts.running(node) == []


def _told(command: list[str]) -> list[str]:
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.splitlines()


@pytest.fixture
def slow_link(hosts: Hosts) -> Iterator[None]:
    """A link that a step keeps busy, most of its time."""
    with ExitStack() as stack:
        for node in NODES:
            hosts.slow(node, "60mbit")
            stack.callback(hosts.slow, node, "10gbit")
        yield


@pytest.mark.usefixtures("slow_link")
@pytest.mark.parametrize("start", [by_mpi, by_gloo])
def test_a_link_that_is_cut_in_a_step_costs_no_more_than_the_time(
    start: Starter, hosts: Hosts, lab: Lab
) -> None:
    run = start.__name__
    training = lab.training(run, "--order", "gpipe")
    started = start(hosts, lab, training)
    lab.wait_for_epochs(run, 2)
    with hosts.cut(NODES[1]):
        output = _end(hosts, started, code=2)
    assert "Error: Rank 1 has given no sign of life for 10 s" in output
    assert "(Rank 0 waited for " in output
    assert lab.epochs(run) < lab.epochs(lab.undisturbed.name)
    _end(hosts, start(hosts, lab, [*training, "--resume"]), code=0)
    assert_same_run(lab.folder / run, lab.undisturbed)


@pytest.mark.parametrize("start", [by_mpi, by_gloo])
def test_ranks_on_several_hosts_segment_what_one_process_does(
    start: Starter, hosts: Hosts, lab: Lab
) -> None:
    alone, out = lab.segmented, f"slides-{start.__name__}"
    started = start(hosts, lab, [PATHOSEG, "infer", *lab.inference(out)])
    _hold_the_first(hosts, lab.folder / out / "states")
    _end(hosts, started, code=0)
    assert lab.results(out) == alone
    assert _began(lab.folder / out / "states") == set(NODES)


def _hold_the_first(hosts: Hosts, states: Path) -> None:
    """Stop the host that begins first until the other one has begun a slide: no load decides."""
    _until(lambda: _began(states) != set())
    first = next(iter(_began(states)))
    held = [psutil.Process(pid) for pid in hosts.running(first)]
    held = [each for each in held if Path(each.cmdline()[0]).name.startswith("python")]
    for process in held:
        process.suspend()
    try:
        _until(lambda: _began(states) == set(NODES))
    finally:
        for process in held:
            process.resume()


def _began(states: Path) -> set[str]:
    """The hosts that have begun a slide."""
    return {json.loads(path.read_text())["host"] for path in states.glob("[!.]*.json")}


def _until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 200
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


def _end(hosts: Hosts, started: list[subprocess.Popen[str]], code: int) -> str:
    """The output of rank 0, once nothing is left running on any node."""
    outputs = [process.communicate(timeout=200)[0] for process in started]
    codes = {process.returncode for process in started}
    if codes != {code}:
        pytest.fail(f"exit codes {codes}, not {code}:\n" + "\n".join(outputs))  # all that was said
    assert [hosts.running(node) for node in NODES] == [[], []]
    return outputs[0]
