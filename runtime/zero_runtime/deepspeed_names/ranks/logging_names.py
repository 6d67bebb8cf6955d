"""``deepspeed.utils.logging``: the logger named DeepSpeed, and messages that only some ranks print.

The logger has the name under which scripts find it (``logging.getLogger("DeepSpeed")``) and writes to stderr.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from zero_runtime import comm, log
from zero_runtime.errors import ConfigError

log_levels: Final = log.LEVELS


class DeepSpeedLogger(logging.Logger):
    """A logger that can print a warning only once."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._said: set[str] = set()

    def warning_once(self, message: object, *arguments: Any, **options: Any) -> None:
        """Warn, unless the same warning was printed before."""
        if str(message) not in self._said:
            self._said.add(str(message))
            self.warning(message, *arguments, **options)


class LoggerFactory:
    """A factory of loggers."""

    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.WARNING) -> logging.Logger:
        """Return a logger that writes to stderr.

        Args:
            name: The name of the logger.
            level: The lowest level of messages that are written.

        Raises:
            ConfigError: ``name`` is None.
        """
        if name is None:
            raise ConfigError("create_logger needs a name; pass name=")
        previous = logging.getLoggerClass()
        logging.setLoggerClass(DeepSpeedLogger)
        try:
            logger = logging.getLogger(name)
        finally:
            logging.setLoggerClass(previous)
        logger.setLevel(level)
        logger.propagate = False
        if not logger.handlers:
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(
                logging.Formatter(
                    "[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s"
                )
            )
            logger.addHandler(handler)
        return logger


logger: Final = LoggerFactory.create_logger("DeepSpeed", log.level())


def _speaks(ranks: Sequence[int] | None) -> bool:
    """Return whether this rank is one of ``ranks``. None, an empty sequence and -1 mean all ranks."""
    mine = comm.get_rank() if comm.is_initialized() else int(os.environ.get("RANK", "0"))
    return ranks is None or len(ranks) == 0 or -1 in ranks or mine in ranks


def get_dist_msg(message: str, ranks: Sequence[int] | None = None) -> str | None:
    """Return ``message`` with this rank as a prefix; None if this rank does not print the message."""
    if not _speaks(ranks):
        return None
    return f"[Rank {comm.get_rank() if comm.is_initialized() else -1}] {message}"


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log ``message`` on some ranks.

    Args:
        message: The text.
        ranks: The ranks that log the message; None and [-1] for all ranks.
        level: The level of the message.
    """
    line = get_dist_msg(message, ranks)
    if line is not None:
        logger.log(level, line, stacklevel=2)


@cache
def _log_once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log ``message`` like :func:`log_dist`, unless the same message was logged before."""
    _log_once(message, None if ranks is None else tuple(ranks), level)


@cache
def warning_once(message: str) -> None:
    """Warn, unless the same warning was printed before."""
    logger.warning(message)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Print ``message`` on some ranks."""
    line = get_dist_msg(message, ranks)
    if line is not None:
        print(line, flush=True)


def print_json_dist(
    message: dict[str, Any], ranks: Sequence[int] | None = None, path: str | None = None
) -> None:
    """Add the rank to ``message``, and write the result to the file ``path`` on some ranks.

    Raises:
        ConfigError: ``path`` is None.
    """
    if path is None:
        raise ConfigError("print_json_dist needs the path of a file; pass path=")
    if _speaks(ranks):
        message["rank"] = comm.get_rank() if comm.is_initialized() else -1
        Path(path).write_text(json.dumps(message))


def get_current_level() -> int:
    """Return the level of the logger."""
    return logger.getEffectiveLevel()


def get_log_level_from_string(log_level_str: str) -> int:
    """Return the number of a level.

    Raises:
        ConfigError: There is no such level.
    """
    level = log_levels.get(log_level_str.lower())
    if level is None:
        raise ConfigError(f"there is no log level {log_level_str!r}; expected one of {', '.join(log_levels)}")
    return level


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of the logger and of the handlers of the logger."""
    level = get_log_level_from_string(log_level_str)
    chosen = custom_logger if custom_logger is not None else logger
    chosen.setLevel(level)
    for handler in chosen.handlers:
        handler.setLevel(level)


def should_log_le(max_log_level_str: str) -> bool:
    """Return whether messages of this level are written."""
    return get_current_level() <= get_log_level_from_string(max_log_level_str)


def print_configuration(args: Any, name: str) -> None:
    """Log every attribute of ``args``."""
    logger.info(f"{name}:")
    for attribute in sorted(vars(args)):
        logger.info(f"  {attribute} = {getattr(args, attribute)}")
