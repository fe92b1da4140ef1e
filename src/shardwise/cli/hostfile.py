"""DeepSpeed hostfiles: `host slots=N` lines, and which of the hosts this machine is."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from shardwise.errors import ConfigError

_LINE = re.compile(r"(?P<name>\S+)\s+slots\s*=\s*(?P<slots>\d+)")


@dataclass(frozen=True)
class Host:
    """One line of a hostfile: a host name or address, and how many ranks run there."""

    name: str
    slots: int


def read_hostfile(path: Path) -> list[Host]:
    """Read a hostfile; the order of its lines is the order of the nodes.

    Raises:
        ConfigError: the file cannot be read, or lines are malformed; each with its line number and line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"hostfile {path}: cannot be read: {error}") from error
    return parse_hostfile(text, str(path))


def parse_hostfile(text: str, name: str = "hostfile") -> list[Host]:
    """Parse the text of a hostfile; `name` is used in errors.

    Raises:
        ConfigError: no host, a malformed line, zero slots, or a host that is listed twice.
    """
    hosts: dict[str, Host] = {}
    problems: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.split("#", 1)[0].strip()
        if not content:
            continue
        match = _LINE.fullmatch(content)
        if match is None:
            problems.append(f"line {number}: expected 'host slots=N', got {line.strip()!r}")
        elif int(match["slots"]) < 1:
            problems.append(f"line {number}: slots must be at least 1, got {line.strip()!r}")
        elif match["name"] in hosts:
            problems.append(f"line {number}: host {match['name']!r} is listed twice, got {line.strip()!r}")
        else:
            hosts[match["name"]] = Host(match["name"], int(match["slots"]))
    if problems:
        raise ConfigError(f"hostfile {name}:\n  " + "\n  ".join(problems))
    if not hosts:
        raise ConfigError(f"hostfile {name}: no hosts; expected lines like 'worker-1 slots=8'")
    return list(hosts.values())


def find_this_host(hosts: Sequence[Host]) -> int:
    """The index of the host that is this machine, by host name first, by address otherwise.

    Raises:
        ConfigError: no host, or more than one, is this machine.
    """
    names = _own_names()
    matches = [index for index, host in enumerate(hosts) if host.name in names]
    if not matches:
        addresses = _own_addresses()
        matches = [index for index, host in enumerate(hosts) if addresses & _addresses_of(host.name)]
    if len(matches) == 1:
        return matches[0]
    listed = ", ".join(host.name for host in hosts)
    if matches:
        which = ", ".join(hosts[index].name for index in matches)
        raise ConfigError(f"hostfile: {which} are all this machine; say which one to be with --node-rank")
    raise ConfigError(
        f"hostfile: none of its hosts ({listed}) is this machine ({', '.join(sorted(names))}); "
        f"run this on one of them, or say which one this is with --node-rank 0 to {len(hosts) - 1}"
    )


def _own_names() -> set[str]:
    name = socket.gethostname()
    return {"localhost", name, name.split(".", 1)[0], socket.getfqdn()}


def _own_addresses() -> set[str]:
    addresses = [address for interface in psutil.net_if_addrs().values() for address in interface]
    inet = (socket.AF_INET, socket.AF_INET6)
    return {address.address.split("%", 1)[0] for address in addresses if address.family in inet}


def _addresses_of(name: str) -> set[str]:
    try:
        return {str(info[4][0]).split("%", 1)[0] for info in socket.getaddrinfo(name, None)}
    except OSError:  # A name that does not resolve here is not this machine.
        return set()
