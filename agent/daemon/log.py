"""Formats of the log on standard error: a line of text, or a JSON object, for each event."""

import json
import logging
import sys
import time
from typing import Any


class TextFormatter(logging.Formatter):
    """Formatter of lines `level message key=value …`, without a time, which journald adds."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as one line; a line break in a message or a value is escaped."""
        extra = getattr(record, "fields", {})
        fields = " ".join(f"{key}={_plain(value)}" for key, value in extra.items())
        line = f"{record.levelname.lower()} {_one_line(record.getMessage())} {fields}".rstrip()
        if record.exc_info:
            line += " " + _plain(self.formatException(record.exc_info))
        return line


class JsonFormatter(logging.Formatter):
    """Formatter of log records as JSON objects, with the time in UTC."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as a JSON object in one line."""
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
    """Log to standard error, from `level` on, in the format "json" or "text"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)


def _one_line(text: str) -> str:
    """A text in which each unprintable character, such as a line break, is escaped as in JSON."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)


def _plain(value: object) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text and text else json.dumps(text)
