"""What a check of the node says of what it saw."""

PASS = "pass"  # noqa: S105 - no password
WARN = "warn"
FAIL = "fail"

# A verdict, what was seen, and the remedy, which is empty where all is well.
Seen = tuple[str, str, str]
