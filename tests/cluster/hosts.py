"""Hosts with a network of their own: namespaces of this machine, joined by a bridge."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from tests.forked_starts.sitecustomize import SERVER

HEAD, NODES = "head", ("node1", "node2")
ADDRESSES = {"head": "10.77.0.254", "node1": "10.77.0.1", "node2": "10.77.0.2"}
_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}

# "$0" is the host's own /etc/hosts, "$1" its name; the rest is the command. A namespace of `ip
# netns exec` would hide the control groups that slurmd looks for.
_ENTER = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'


def missing() -> str | None:
    """Return the reason why this machine can have no such hosts, or None where it can.

    To find out, a network namespace is made and deleted.
    """
    absent = sorted({package for name, package in _PACKAGES.items() if shutil.which(name) is None})
    if absent:
        return f"needs Debian packages: apt-get install {' '.join(absent)}"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    name = f"pathoseg-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"needs CAP_SYS_ADMIN, to make network namespaces: {tried.stderr.strip()}"
    _ip("netns", "delete", name)
    return None


class Hosts:
    """A head and two nodes, which share all files but /etc/hosts.

    As on Debian, a host's own name is a loopback address to itself.

    Args:
        folder: Where their files are kept.

    Attributes:
        agent: A program that mpirun can call in the place of ssh, and that as ssh leaves the
            caller's environment behind.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.agent = folder / "agent"

    def __enter__(self) -> Self:
        for host in ADDRESSES:
            _ip("netns", "add", _space(host))
            _ip("-n", _space(host), "link", "set", "lo", "up")
            names = ADDRESSES | {host: "127.0.1.1", "localhost": "127.0.0.1"}
            lines = "".join(f"{address} {name}\n" for name, address in names.items())
            (self._folder / host).write_text(lines)
        head = ["-n", _space(HEAD)]
        _ip(*head, "link", "add", "bridge", "type", "bridge")
        _ip(*head, "address", "add", f"{ADDRESSES[HEAD]}/24", "dev", "bridge")
        _ip(*head, "link", "set", "bridge", "up")
        for node in NODES:
            there = ["peer", "name", "eth0", "netns", _space(node)]
            _ip(*head, "link", "add", node, "type", "veth", *there)
            _ip(*head, "link", "set", node, "master", "bridge", "up")
            _ip("-n", _space(node), "address", "add", f"{ADDRESSES[node]}/24", "dev", "eth0")
            _ip("-n", _space(node), "link", "set", "eth0", "up")
        words = self.command("$host", "sh", "-c", "$*")
        text = " ".join(
            f'"{word}"' if "$host" in word else shlex.quote(word) for word in words[:-1]
        )
        own = 'env -i HOME="$HOME" PATH=/usr/local/bin:/usr/bin:/bin'
        # As if the host's login set it, so that ranks are forked there, too. It leads nowhere
        # without the caller's PYTHONPATH, which mpirun has to bring.
        own += f" {SERVER}={shlex.quote(os.environ.get(SERVER, ''))}"
        self.agent.write_text(f'#!/bin/sh\nhost=$1; shift\nexec {own} {text} "$*"\n')
        self.agent.chmod(0o755)
        return self

    def __exit__(self, *_: object) -> None:
        for host in ADDRESSES:
            for number in self.running(host):
                subprocess.run(["kill", "-9", str(number)], capture_output=True, check=False)
            _ip("netns", "delete", _space(host))

    def command(self, host: str, *arguments: object) -> list[str]:
        """Return the command line that runs a command on a host.

        Args:
            host: One of `ADDRESSES`.
            arguments: The program and its arguments.

        Returns:
            A command that enters the host's network, with its name and /etc/hosts, and runs there.
        """
        enter = ["nsenter", f"--net=/run/netns/{_space(host)}", "unshare", "--uts", "--mount"]
        own = str(self._folder / host)
        return [*enter, "sh", "-c", _ENTER, own, host, *map(str, arguments)]

    @contextmanager
    def cut(self, node: str) -> Iterator[None]:
        """Takes a node off the network for a while, as a pulled cable does."""
        _ip("-n", _space(node), "link", "set", "eth0", "down")
        try:
            yield
        finally:
            _ip("-n", _space(node), "link", "set", "eth0", "up")

    def slow(self, node: str, rate: str) -> None:
        """Limits what a node sends, in `tc`'s own units: `20mbit`."""
        limit = ["tbf", "rate", rate, "burst", "16kb", "latency", "50ms"]
        words = ["tc", "-n", _space(node), "qdisc", "replace", "dev", "eth0", "root", *limit]
        subprocess.run(words, check=True)

    def running(self, host: str) -> list[int]:
        """The processes of a host."""
        told = subprocess.run(
            ["ip", "netns", "pids", _space(host)], check=True, capture_output=True, text=True
        )
        return [int(number) for number in told.stdout.split()]


def _space(host: str) -> str:
    return f"pathoseg-{os.getpid()}-{host}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
