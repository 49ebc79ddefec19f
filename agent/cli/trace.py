"""`carver trace`: why calls were slow."""

import json
import time
from typing import TYPE_CHECKING

from agent.cli.words import Commands, verb

if TYPE_CHECKING:
    from agent.csi.client import Client
    from proto import carver_pb2 as carver


def add(commands: Commands) -> None:
    """Add the command."""
    trace = verb(
        commands,
        "trace",
        "show the slowest of the last calls, with what each waited for and its steps",
        lambda verbs, parsed: show(verbs.caller, parsed.most, as_json=parsed.json),
    )
    trace.add_argument("--most", type=int, default=10, metavar="N", help="so many; else 10")
    trace.add_argument("--json", action="store_true", help="as JSON")


def show(client: "Client", most: int, *, as_json: bool) -> None:
    """Print the calls, the slowest first."""
    calls = client.slowest_calls(most).calls
    if as_json:
        from google.protobuf.json_format import MessageToDict

        found = [
            MessageToDict(
                one, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
            )
            for one in calls
        ]
        print(json.dumps(found, indent=2))
        return
    for one in calls:
        print("\n".join(lines(one)))


def lines(call: "carver.TracedCall") -> list[str]:
    """A call in words: its own line, then one for each step with when it began."""
    began = time.strftime("%H:%M:%S", time.localtime(call.time_seconds))
    about = f" {call.volume}" if call.volume else ""
    return [
        f"{began} {call.method}{about} {call.code} {_ms(call.seconds)}",
        *(
            f"  at {_ms(one.after_seconds)}: {one.kind} {one.what} {_ms(one.seconds)}"
            for one in call.steps
        ),
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
