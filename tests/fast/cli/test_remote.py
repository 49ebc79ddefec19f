"""Another node's command by ssh: a program in its place, which runs what it is told in a shell."""

import sys
from pathlib import Path

import pytest

from agent.core import errors
from agent.extras.transfer.remote import Remote

pytestmark = pytest.mark.starts_programs

CARVER = """\
import json, sys
words = sys.argv[1:]
if "--fail" in words:
    sys.exit("carver: no such volume")
read = len(sys.stdin.buffer.read()) if "receive" in words else 0
if "--quiet" not in words:
    print(json.dumps({"words": words, "read": read}))
"""


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    """As ssh does: the line is for a shell there."""
    ssh, carver = tmp_path / "ssh", tmp_path / "carver.py"
    ssh.write_text('#!/bin/sh\n[ "$1" = -q ] && [ "$2" = -- ] || exit 99\nexec sh -c "$4"\n')
    ssh.chmod(0o755)
    carver.write_text(CARVER)
    return Remote("node-b", [str(ssh), "-q"], [sys.executable, str(carver)])


def test_words_arrive_as_they_are_whatever_a_shell_makes_of_them(remote: Remote) -> None:
    odd = ["volume", "it's; rm -rf $HOME", "a  b", '"', "--json"]
    assert remote.ask(*odd)["words"] == odd


def test_what_the_other_side_says_is_told(remote: Remote) -> None:
    with pytest.raises(errors.NodeRefused, match="no such volume"):
        remote.ask("volume", "--fail")
    with pytest.raises(errors.NodeRefused, match="JSON"):
        remote.ask("volume", "--quiet")
    with pytest.raises(errors.NodeRefused, match="no such volume"):
        remote.feed("volume", "--fail", write=lambda put: put(b"x" * (1 << 20)))


def test_a_stream_goes_there_to_its_end(remote: Remote, tmp_path: Path) -> None:
    told = tmp_path / "told"
    (tmp_path / "carver.py").write_text(
        f"import sys\nopen({str(told)!r}, 'w').write(str(len(sys.stdin.buffer.read())))\n"
    )
    assert remote.feed("volume", "receive", "db", write=lambda put: put(b"x" * (3 << 20))) == {}
    assert int(told.read_text()) == 3 << 20


def test_what_is_said_of_a_stream_is_read_where_it_is_json(remote: Remote) -> None:
    told = remote.feed("volume", "receive", "db", "--verify", write=lambda put: put(b"x" * 4096))
    assert told["read"] == 4096


def test_what_fails_here_ends_what_runs_there(remote: Remote) -> None:
    def broken(_put: object) -> None:
        raise errors.SourceLost("snapshot", "it was lost")

    with pytest.raises(errors.SourceLost):
        remote.feed("volume", "receive", "db", write=broken)


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(errors.NodeRefused, match="no-such-ssh"):
        Remote("node-b", ["/no-such-ssh"], ["carver"]).ask("status", "--json")
