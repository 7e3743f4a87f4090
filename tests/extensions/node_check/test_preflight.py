"""The decision of a preflight about bad nodes."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_cli.errors import UsageError
from accel_cli.extensions.node_check.preflight import Preflight, Verdict, decide
from accel_cli.runner import preparations
from accel_runtime.extensions.node_check.verdict import NodeFinding

BAD = NodeFinding(1, "bad", "has no network")


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("num_nodes", "num_spares", "min_nodes", "continues"),
    [(3, 0, 2, True), (3, 0, 3, False), (3, 1, 3, True), (2, 0, 1, True), (2, 5, 2, True), (2, 0, 2, False)],
)
def test_a_bad_node_is_left_out_if_enough_remain(num_nodes, num_spares, min_nodes, continues):
    verdict = decide([BAD], num_nodes, num_spares, min_nodes)
    assert verdict == Verdict({1: "has no network"}, continues)


@given(
    st.lists(
        st.builds(NodeFinding, st.integers(0, 7), st.sampled_from(["bad", "note"]), st.text()), max_size=12
    )
)
def test_notes_leave_out_no_node_and_one_node_remains(findings):
    verdict = decide(findings, 8, 8, 1)
    assert verdict.reasons.keys() == {finding.node for finding in findings if finding.is_bad}
    assert verdict.continues == (0 < len(verdict.reasons) < 8)


def test_all_reasons_about_a_node_are_in_one_line():
    findings = [BAD, NodeFinding(1, "note", "is far away"), NodeFinding(1, "bad", "computes wrong")]
    assert decide(findings, 3, 0, 1).reasons == {1: "has no network; computes wrong"}


def test_a_verdict_is_the_same_on_all_nodes():
    verdict = decide([BAD], 3, 0, 2)
    assert Verdict.from_json(json.loads(json.dumps(asdict(verdict)))) == verdict


class Bootstrap:
    """The store of a run that has left out h1."""

    def __init__(self, name):
        self.node = self
        self.name = name

    def get_value(self, key):
        return "no network" if key == "preflight/bad/h1 (10.0.0.1)" else None


def test_a_node_that_was_left_out_is_refused_and_another_is_not():
    Preflight.refuse_bad_node(Bootstrap("h2 (10.0.0.2)"))
    with pytest.raises(UsageError, match=r"h1 \(10\.0\.0\.1\) cannot join: .* left it out \(no network\)"):
        Preflight.refuse_bad_node(Bootstrap("h1 (10.0.0.1)"))


def test_a_preflight_is_refused_by_an_installation_without_the_check(monkeypatch):
    monkeypatch.setattr(preparations, "NODE_CHECKS", {})
    with pytest.raises(UsageError, match=r"Cannot use launcher\.preflight: true: this installation"):
        preparations.find_node_check("preflight")
