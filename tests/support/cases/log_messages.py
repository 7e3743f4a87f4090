"""Collect log messages, also on ranks, where pytest's `caplog` does not exist."""

from __future__ import annotations

import logging
from contextlib import contextmanager


@contextmanager
def collect_messages(name):
    """Yield a list to which the messages of the logger `name` are added."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
