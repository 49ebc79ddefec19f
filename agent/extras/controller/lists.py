"""One list of what all nodes have, made of the nodes' own lists, page by page.

The nodes come in the order of their names. The token of a page is `NODE:COUNT:TOKEN`: the node with
which the next page begins, the number of entries for which that node was asked before, and that
node's own token.

A list is complete or refused. If a node does not answer, or gives an answer that cannot be true,
the call fails with the node's name. So no node can hide or replace the entries of other nodes.
Volumes of the other nodes can still be found by their ids.

Each list ends: a page has at most as many entries as the request allows, each token of a node comes
after the node's token before (answer_rules.py), and one node is asked for a limited number of
entries in a list. A node that has further pages is asked alone, so that no other node must list its
entries a second time.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

from agent.extras.controller.answer_rules import MOST_PAGE_BYTES
from agent.extras.controller.nodes import Node, Nodes, Refused, unavailable
from agent.requests.requests import MOST_ENTRIES

# Maximum number of entries for which one node is asked at once. An answer with so many entries fits
# into a page (answer_rules.py). A page with the answers of many nodes has the same limit in bytes.
_OF_A_NODE = 500
# Maximum number of nodes that are asked for a page of a list at the same time.
_AT_ONCE = 16
# Maximum number of entries for which a node is asked in one list: ten times as many as the metadata
# of a volume group has space for.
_MOST_OF_A_NODE = 100_000

# Type of a function that sends a request for a list to a node, and returns the node's answer.
Ask = Callable[[Node, Any], Awaitable[Any]]


async def page(nodes: Nodes, request: Any, answer: Any, ask: Ask) -> Any:
    """Fill `answer`, an empty list response, with the page that a request asks for, and return it.

    `ask` sends a request for a list to one node. Raises Refused for a bad token or a negative
    number of entries, if a node does not answer, or if a node's list does not end; and what `ask`
    raises.

    1. If a node's own token is known, ask that node alone; otherwise ask up to 16 nodes at once.
    2. Append the nodes' answers in order, while they fit into the page. A node whose answer does
       not fit is asked again: for fewer entries, or in the call for the next page.
    3. If a node has a further page, go on with that node; else with the next node.
    4. The page ends if it is full, or if no node is left. If nodes are left, the page has a token.
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
                # Drop an answer that does not fit. The node is asked again: for fewer entries, or
                # in the call for the next page.
                break
            answer.entries.extend(node_page.entries)
            size_bytes += page_bytes
            # Count the requested entries, not the returned ones: a node's page may have fewer
            # entries, as those that another node must list were removed.
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
    """Parse the token of a page: return the nodes whose entries are still to be listed.

    Also returned is the position in the first node's list: the number of entries for which that
    node was asked before, and that node's own token. Raises Refused if a node does not answer, or
    if the token is invalid or names no node of the cluster.
    """
    all_nodes = nodes.require_all()
    if not token:
        return all_nodes, 0, ""
    name, count, node_token = (*token.split(":", 2), "", "")[:3]
    if not (count.isascii() and count.isdigit()) or nodes.get(name) is None:
        # Answer ABORTED, after which the caller begins a new list (CSI spec, ListVolumes errors).
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
