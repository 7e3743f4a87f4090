"""The harness of the data tests travels with the functions they ship to ranks."""

from __future__ import annotations

import cloudpickle
import walks

cloudpickle.register_pickle_by_value(walks)
