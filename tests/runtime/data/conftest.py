"""The harness of the data tests travels with the functions they ship to ranks."""

from __future__ import annotations

import cloudpickle
import read_epochs

cloudpickle.register_pickle_by_value(read_epochs)
