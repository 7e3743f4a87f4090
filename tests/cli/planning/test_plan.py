"""Serialization of plans."""

import os

from hypothesis import given
from hypothesis import strategies as st

from accel_cli.planning.plan import AgentSettings, Plan

TEXTS = st.binary().map(os.fsdecode)  # arguments may hold bytes that are not valid UTF-8
PLANS = st.builds(
    Plan,
    argv=st.lists(TEXTS, max_size=3).map(tuple),
    env=st.dictionaries(TEXTS, TEXTS, max_size=3),
    target=TEXTS,
    process_description=TEXTS,
    node_summary=TEXTS,
    layout=TEXTS,
    job=st.none(),
    agent=st.none() | st.builds(AgentSettings, monitor_interval=st.floats(allow_nan=False)),
)


@given(PLANS)
def test_a_plan_is_unchanged_after_json(plan):
    read = Plan.from_json(plan.to_json())
    assert read == plan
    assert read.agent is None or isinstance(read.agent, AgentSettings)
