"""Hostfiles: what is read, what is refused and how, and which host this machine is."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from shardwise.cli.hostfile import Host, find_this_host, parse_hostfile, read_hostfile
from shardwise.errors import ConfigError


def test_hosts_slots_comments_and_blank_lines() -> None:
    text = "# the cluster\nnode-a slots=4\n\n  node-b\tslots = 2   # the old one\n10.0.0.7 slots=8\n"
    assert parse_hostfile(text) == [Host("node-a", 4), Host("node-b", 2), Host("10.0.0.7", 8)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("node-b slot=2", "line 2: expected 'host slots=N', got 'node-b slot=2'"),
        ("node-b", "line 2: expected 'host slots=N', got 'node-b'"),
        ("node-b slots=2 slots=3", "line 2: expected 'host slots=N', got 'node-b slots=2 slots=3'"),
        ("node-b slots=-1", "line 2: expected 'host slots=N', got 'node-b slots=-1'"),
        ("node-b slots=0", "line 2: slots must be at least 1, got 'node-b slots=0'"),
        ("node-a slots=2", "line 2: host 'node-a' is listed twice, got 'node-a slots=2'"),
    ],
)
def test_a_bad_line_is_shown_with_its_number(line: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hostfile(f"node-a slots=4\n{line}\n", "hosts.txt")
    assert said in str(caught.value)
    assert "hosts.txt" in str(caught.value)


def test_all_bad_lines_are_shown_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hostfile("one\ntwo\nnode slots=1\n")
    assert "line 1" in str(caught.value)
    assert "line 2" in str(caught.value)
    assert "line 3" not in str(caught.value)


def test_no_hosts_and_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no hosts"):
        parse_hostfile("# nothing\n")
    with pytest.raises(ConfigError, match=r"absent\.txt: cannot be read"):
        read_hostfile(tmp_path / "absent.txt")


def test_this_machine_is_found_by_name_before_address() -> None:
    others = [Host("absent.invalid", 1), Host("127.0.0.1", 1)]
    assert find_this_host([*others, Host(socket.gethostname(), 1)]) == 2
    assert find_this_host(others) == 1


def test_not_being_listed_and_being_listed_twice_ask_for_the_node_rank() -> None:
    with pytest.raises(ConfigError, match=r"none of its hosts \(absent\.invalid\) .*--node-rank"):
        find_this_host([Host("absent.invalid", 1)])
    with pytest.raises(ConfigError, match=r"are all this machine; .*--node-rank"):
        find_this_host([Host("localhost", 1), Host(socket.gethostname(), 1)])
