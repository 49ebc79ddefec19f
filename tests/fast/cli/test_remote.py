"""Another node's command by ssh: a program in its place, which runs the command in a shell."""

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


def test_words_arrive_unchanged_through_a_shell(remote: Remote) -> None:
    odd = ["volume", "it's; rm -rf $HOME", "a  b", '"', "--json"]
    assert remote.ask(*odd)["words"] == odd


def test_the_other_node_s_error_is_quoted(remote: Remote) -> None:
    with pytest.raises(errors.NodeRefused, match="no such volume"):
        remote.ask("volume", "--fail")
    with pytest.raises(errors.NodeRefused, match="JSON"):
        remote.ask("volume", "--quiet")
    with pytest.raises(errors.NodeRefused, match="no such volume"):
        remote.feed("volume", "--fail", write=lambda put: put(b"x" * (1 << 20)))


def test_a_stream_arrives_whole(remote: Remote, tmp_path: Path) -> None:
    answer = tmp_path / "count"
    (tmp_path / "carver.py").write_text(
        f"import sys\nopen({str(answer)!r}, 'w').write(str(len(sys.stdin.buffer.read())))\n"
    )
    assert remote.feed("volume", "receive", "db", write=lambda put: put(b"x" * (3 << 20))) == {}
    assert int(answer.read_text()) == 3 << 20


def test_the_answer_to_a_stream_is_decoded(remote: Remote) -> None:
    answer = remote.feed("volume", "receive", "db", "--verify", write=lambda put: put(b"x" * 4096))
    assert answer["read"] == 4096


def test_a_failure_here_ends_the_command_there(remote: Remote) -> None:
    def broken(_put: object) -> None:
        raise errors.SourceLost("snapshot", "it was lost")

    with pytest.raises(errors.SourceLost):
        remote.feed("volume", "receive", "db", write=broken)


def test_a_missing_program_is_named() -> None:
    with pytest.raises(errors.NodeRefused, match="no-such-ssh"):
        Remote("node-b", ["/no-such-ssh"], ["carver"]).ask("status", "--json")
