"""Pickle the helpers of the data tests by value, since ranks cannot import them."""

from __future__ import annotations

import cloudpickle
from support.runs import read_epochs

cloudpickle.register_pickle_by_value(read_epochs)
