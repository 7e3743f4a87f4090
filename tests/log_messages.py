"""Collect what is logged, also on ranks, where pytest's `caplog` is not."""

from __future__ import annotations

import logging
from contextlib import contextmanager


@contextmanager
def collect_messages(name):
    """Give a list that takes the messages of the logger `name` as they are written."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
