"""The log on standard error: one line, or one JSON object, for each event."""

import json
import logging
import sys
import time
from typing import Any


class TextFormatter(logging.Formatter):
    """`LEVEL message key=value …`; the journal adds the time."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as one line; another's text cannot start another line."""
        given = getattr(record, "fields", {})
        fields = " ".join(f"{key}={_plain(value)}" for key, value in given.items())
        line = f"{record.levelname.lower()} {_one_line(record.getMessage())} {fields}".rstrip()
        if record.exc_info:
            line += " " + _plain(self.formatException(record.exc_info))
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object for each record."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as one line."""
        event: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event, ensure_ascii=False, default=str)


def configure(log_format: str, level: str) -> None:
    """Log to standard error, in one of the two formats."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)


def _one_line(text: str) -> str:
    """A text without line breaks and other control characters, which stand there as in JSON."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else json.dumps(one)[1:-1] for one in text)


def _plain(value: object) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text and text else json.dumps(text)
