"""Log lines for people (console) or for machines (json), alike in the server and in the engine process.

No secret and no input text is ever logged.
"""

from __future__ import annotations

import logging
import logging.config
from typing import Any

import orjson


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the record's `fields`, and an exception if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line of `record`."""
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line).decode()


def configure_logging(level: str, line_format: str) -> None:
    """Sends all loggers, those of libraries too, to stderr.

    Args:
        level: Least severe level that is logged, such as "info".
        line_format: "console" or "json".
    """
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {
                "console": {"format": "%(asctime)s %(levelname)-7s %(name)s: %(message)s", "datefmt": "%H:%M:%S"},
                "json": {"()": JsonFormatter},
            },
            "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": line_format}},
            "root": {"level": level.upper(), "handlers": ["stderr"]},
            "loggers": {name: {"level": "WARNING"} for name in ("httpx", "httpcore", "urllib3", "filelock")},
        }
    )
