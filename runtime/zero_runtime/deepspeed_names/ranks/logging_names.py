"""``deepspeed.utils.logging``: the logger named DeepSpeed, and lines printed by some ranks.

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
    """Creates loggers."""

    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.WARNING) -> logging.Logger:
        """A logger that writes to stderr.

        Args:
            name: of the logger.
            level: of messages to write.

        Raises:
            ConfigError: there is no name.
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
    """Whether this rank is one of ``ranks``; None and -1 are all of them."""
    mine = comm.get_rank() if comm.is_initialized() else int(os.environ.get("RANK", "0"))
    return ranks is None or len(ranks) == 0 or -1 in ranks or mine in ranks


def get_dist_msg(message: str, ranks: Sequence[int] | None = None) -> str | None:
    """``message`` with this rank before it, or None if this rank does not print."""
    if not _speaks(ranks):
        return None
    return f"[Rank {comm.get_rank() if comm.is_initialized() else -1}] {message}"


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log ``message`` on some ranks.

    Args:
        message: the text.
        ranks: who says it; None and [-1] for all.
        level: of the message.
    """
    line = get_dist_msg(message, ranks)
    if line is not None:
        logger.log(level, line, stacklevel=2)


@cache
def _log_once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """:func:`log_dist`, unless the same line was printed before."""
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
    """Write ``message``, with the rank in it, to the file ``path`` on some ranks.

    Raises:
        ConfigError: there is no path.
    """
    if path is None:
        raise ConfigError("print_json_dist needs the path of a file; pass path=")
    if _speaks(ranks):
        message["rank"] = comm.get_rank() if comm.is_initialized() else -1
        Path(path).write_text(json.dumps(message))


def get_current_level() -> int:
    """The logger's level."""
    return logger.getEffectiveLevel()


def get_log_level_from_string(log_level_str: str) -> int:
    """The number of a level.

    Raises:
        ConfigError: there is no such level.
    """
    level = log_levels.get(log_level_str.lower())
    if level is None:
        raise ConfigError(f"there is no log level {log_level_str!r}; expected one of {', '.join(log_levels)}")
    return level


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the logger's level, and that of its handlers."""
    level = get_log_level_from_string(log_level_str)
    chosen = custom_logger if custom_logger is not None else logger
    chosen.setLevel(level)
    for handler in chosen.handlers:
        handler.setLevel(level)


def should_log_le(max_log_level_str: str) -> bool:
    """Whether messages of this level are written."""
    return get_current_level() <= get_log_level_from_string(max_log_level_str)


def print_configuration(args: Any, name: str) -> None:
    """Log every attribute of ``args``."""
    logger.info(f"{name}:")
    for attribute in sorted(vars(args)):
        logger.info(f"  {attribute} = {getattr(args, attribute)}")
