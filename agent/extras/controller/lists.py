"""One list of all nodes' lists, page by page.

The nodes come in the order of their names. A token is `NODE:COUNT:TOKEN`: the node to go on with,
for how many entries it was asked before, and its own token. A list is whole or refused: if
a node does not answer, or with what cannot be true, its name is the error. So no node can hide or
replace what others say; what they have is still found by its id. Each list ends: a page has as many
entries as asked for at most, its token is beyond the one before (answer_rules.py), and one node is
asked for so many entries of a list at most, whatever it answers. A node that has more to say is
asked alone, so that the number of its pages has no other node list anything again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

from agent.extras.controller.answer_rules import MOST_PAGE_BYTES
from agent.extras.controller.nodes import Node, Nodes, Refused, unavailable
from agent.requests.requests import MOST_ENTRIES

# The most entries that one node is asked for at once. What it answers fits into a page
# (answer_rules.py), and a page has no more bytes, however many nodes' answers are in it.
_OF_A_NODE = 500
_AT_ONCE = 16
# The most entries that a node is asked for in one list: ten times what a volume group's metadata
# have room for.
_MOST_OF_A_NODE = 100_000

# Calls a node: its answer.
Ask = Callable[[Node, Any], Awaitable[Any]]


async def page(nodes: Nodes, request: Any, answer: Any, ask: Ask) -> Any:
    """Fill `answer`, an empty list response, with the page that a request asks for.

    `ask` sends a request for a list to one node. Raises Refused for a bad token, and what `ask`
    raises.
    """
    if request.max_entries < 0:
        raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "max_entries: must not be negative")
    most = min(request.max_entries or MOST_ENTRIES, MOST_ENTRIES)
    left, count, token = _from(nodes, request.starting_token)
    size_bytes = 0
    while left:
        now = left[: 1 if token else _AT_ONCE]
        room = most - len(answer.entries)
        first = _request(request, token, room)
        others = [_request(request, "", room)] * (len(now) - 1)
        answers = await asyncio.gather(
            *(ask(node, one) for node, one in zip(now, [first, *others], strict=True))
        )
        for found in answers:
            more_bytes = found.ByteSize()
            is_full = size_bytes > 0 and size_bytes + more_bytes > MOST_PAGE_BYTES
            if len(answer.entries) + len(found.entries) > most or is_full:
                # It is asked again: for fewer, or on the next page.
                break
            answer.entries.extend(found.entries)
            size_bytes += more_bytes
            # Not what it answered: a page may be short, or have what another node is to tell.
            token, count = found.next_token, count + first.max_entries
            if token and count > _MOST_OF_A_NODE:
                raise unavailable(
                    f"node {left[0].name} lists more than {_MOST_OF_A_NODE} entries, and no end"
                )
            if token:
                break
            left, count = left[1:], 0
        if left and (len(answer.entries) >= most or is_full):
            answer.next_token = f"{left[0].name}:{count}:{token}"
            return answer
    return answer


def _from(nodes: Nodes, token: str) -> tuple[Sequence[Node], int, str]:
    """The nodes that a page is of; for how many entries the first was asked, and its token."""
    every = nodes.require_all()
    if not token:
        return every, 0, ""
    name, count, inner = (*token.split(":", 2), "", "")[:3]
    if not (count.isascii() and count.isdigit()) or nodes.get(name) is None:
        # CSI spec, ListVolumes errors: the caller begins anew.
        raise Refused(
            grpc.StatusCode.ABORTED,
            f"starting_token: {token!r} names no node of the cluster; list from the start",
        )
    return [one for one in every if one.name >= name], int(count), inner


def _request(request: Any, token: str, room: int) -> Any:
    made = type(request)()
    made.CopyFrom(request)
    made.starting_token = token
    made.max_entries = min(room, _OF_A_NODE)
    return made
