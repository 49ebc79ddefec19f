"""One list of what all nodes have, made of the nodes' own lists, page by page.

The nodes come in the order of their names. A page's token is `NODE:COUNT:TOKEN`: the node to go on
with, the number of entries for which that node was asked before, and the node's own token.

A list is complete or refused. If a node does not answer, or answers what cannot be true, the call
fails with the node's name. So no node can hide or replace what others list. What the other nodes
have is still found by its id.

Each list ends. A page has at most as many entries as asked for, a node's token is beyond the one
before (answer_rules.py), and one node is asked for a limited number of entries in a list, whatever
it answers. A node that has further pages is asked alone, so no other node lists anything again
because of them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

from agent.extras.controller.answer_rules import MOST_PAGE_BYTES
from agent.extras.controller.nodes import Node, Nodes, Refused, unavailable
from agent.requests.requests import MOST_ENTRIES

# Largest number of entries that one node is asked for at once. An answer with so many entries fits
# into a page (answer_rules.py), and a page has no more bytes, however many nodes' answers it has.
_OF_A_NODE = 500
# Largest number of nodes that are asked at the same time.
_AT_ONCE = 16
# Largest number of entries that a node is asked for in one list: ten times what the metadata of a
# volume group have space for.
_MOST_OF_A_NODE = 100_000

# A function that calls a node and returns its answer.
Ask = Callable[[Node, Any], Awaitable[Any]]


async def page(nodes: Nodes, request: Any, answer: Any, ask: Ask) -> Any:
    """Fill `answer`, an empty list response, with the page that a request asks for.

    `ask` sends a request for a list to one node. Raises Refused for a bad token, and what `ask`
    raises.

    1. Ask the node of the token alone, or up to 16 nodes at once without a node's token.
    2. Append the nodes' answers in order, while they fit into the page. A node whose answer does
       not fit is asked again, for fewer entries or on the next page.
    3. If a node has a further page, go on with that node; else with the next one.
    4. The page ends if it is full, or if no node is left. A full page has a token.
    """
    if request.max_entries < 0:
        raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "max_entries: must not be negative")
    most_entries = min(request.max_entries or MOST_ENTRIES, MOST_ENTRIES)
    remaining_nodes, count, token = _from(nodes, request.starting_token)
    size_bytes = 0
    while remaining_nodes:
        batch = remaining_nodes[: 1 if token else _AT_ONCE]
        free_entries = most_entries - len(answer.entries)
        first_request = _request(request, token, free_entries)
        other_requests = [_request(request, "", free_entries)] * (len(batch) - 1)
        node_pages = await asyncio.gather(
            *(
                ask(node, part_request)
                for node, part_request in zip(batch, [first_request, *other_requests], strict=True)
            )
        )
        for node_page in node_pages:
            page_bytes = node_page.ByteSize()
            is_full = size_bytes > 0 and size_bytes + page_bytes > MOST_PAGE_BYTES
            if len(answer.entries) + len(node_page.entries) > most_entries or is_full:
                # An answer that does not fit is dropped. The node is asked again: for fewer
                # entries, or on the next page.
                break
            answer.entries.extend(node_page.entries)
            size_bytes += page_bytes
            # The count is of requested entries, not of returned ones: a page may be short, or lack
            # entries that another node must list.
            token, count = node_page.next_token, count + first_request.max_entries
            if token and count > _MOST_OF_A_NODE:
                raise unavailable(
                    f"node {remaining_nodes[0].name} lists more than {_MOST_OF_A_NODE} entries, and"
                    " no end"
                )
            if token:
                break
            remaining_nodes, count = remaining_nodes[1:], 0
        if remaining_nodes and (len(answer.entries) >= most_entries or is_full):
            answer.next_token = f"{remaining_nodes[0].name}:{count}:{token}"
            return answer
    return answer


def _from(nodes: Nodes, token: str) -> tuple[Sequence[Node], int, str]:
    """Parse a page's token: return the nodes to list, and the position in the first one's list.

    The position is the number of entries that the first node was asked for before, and that node's
    own token. Raises Refused.
    """
    all_nodes = nodes.require_all()
    if not token:
        return all_nodes, 0, ""
    name, count, node_token = (*token.split(":", 2), "", "")[:3]
    if not (count.isascii() and count.isdigit()) or nodes.get(name) is None:
        # The caller begins a new list after this code (CSI spec, ListVolumes errors).
        raise Refused(
            grpc.StatusCode.ABORTED,
            f"starting_token: {token!r} names no node of the cluster; list from the start",
        )
    return [node for node in all_nodes if node.name >= name], int(count), node_token


def _request(request: Any, token: str, free_entries: int) -> Any:
    copy = type(request)()
    copy.CopyFrom(request)
    copy.starting_token = token
    copy.max_entries = min(free_entries, _OF_A_NODE)
    return copy
