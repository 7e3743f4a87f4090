"""The contract of a store, for the store of objects and an S3 server: what depends on the service and its client."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from runtime.storage.test_store_contract import (  # noqa: F401 - tests of the contract
    NEW,
    OLD,
    read,
    store,
    test_a_draft_is_not_visible_before_the_commit_and_nothing_stays_of_a_discarded_one,
    test_a_removed_checkpoint_is_absent_at_once_and_its_name_is_free,
    test_an_open_checkpoint_is_read_to_its_end_while_it_is_replaced,
    test_of_two_saves_to_one_key_that_overlap_one_is_complete_and_the_other_an_error,
    test_other_processes_put_parts_and_files_of_hooks_into_a_draft_that_one_has_begun,
    test_parts_are_read_as_they_were_put_in_any_range,
    write,
)
from support.object_stores.fault_proxy import Hook
from support.object_stores.faults import EXPIRED, PASSING
from support.object_stores.runs import open_objects

from accel_runtime.extensions.object_stores.store import ObjectStore
from accel_runtime.storage.errors import CheckpointError, StoreError
from accel_runtime.storage.manifest import NAME


class S3Case:
    """Stores of one client, behind a proxy; `FileCase` describes the functions."""

    keeps_what_is_read = False

    def __init__(self, client, server, url):
        self._client, self._server, self._bucket = client, server, url.removeprefix("s3://").partition("/")[0]
        self.parent = f"{url}/checkpoints"

    def build(self):
        return ObjectStore(self._client), None

    def list_files(self):
        prefix = self.parent.partition(f"{self._bucket}/")[2]
        return sorted(key.removeprefix(f"{prefix}/") for key in self._server.list_sizes(self._bucket, prefix))


@pytest.fixture(params=["proxy", "server"])
def case(request, s3_server, s3_proxy, s3_url):
    """Return a driver behind the proxy, and one without it: the proxy removes the quotes of ETags."""
    address = s3_proxy.address() if request.param == "proxy" else s3_server.address
    with open_objects(address) as objects:
        yield S3Case(objects.client, s3_server, s3_url)


@pytest.mark.parametrize("fault", PASSING)
def test_saves_and_reads_have_their_results_with_each_fault_that_passes(s3_proxy, s3_url, fault):
    kind, options = PASSING[fault]
    data = {name: bytes([number]) * 300_000 for number, name in enumerate("abc")}
    with open_objects(s3_proxy.address()) as objects:
        s3_proxy.inject(kind, **options)
        for save in ("a1", "b2", "c3"):
            write(objects, f"{s3_url}/mine", save, data)
            assert read(objects, f"{s3_url}/mine") == (save, data)
        assert objects.delete(f"{s3_url}/mine")
        assert objects.list(s3_url) == []
    assert s3_proxy.count_faults() > 0


def test_a_range_is_read_once_and_no_other_byte(s3_proxy, s3_url):
    with open_objects(s3_proxy.address()) as objects:
        write(objects, f"{s3_url}/mine", "a1", {"large": bytes(9 << 20)})
        with objects.open(f"{s3_url}/mine") as snapshot:
            s3_proxy.forget()
            for start, size in ((0, 10), (3 << 20, 5 << 20), (9 << 20, 1)):
                snapshot.get_range("large", start, memoryview(bytearray(size)))
    assert s3_proxy.bytes_read() == 10 + (5 << 20)


def test_an_answer_without_a_body_to_expired_credentials_is_tried_again_with_new_ones_once(s3_proxy, s3_url):
    """The answer to HEAD has no code."""
    with open_objects(s3_proxy.address()) as objects:
        write(objects, f"{s3_url}/mine", "a1", OLD)
        key = f"{s3_url}/mine/{NAME}"
        size = objects.client.find_size(key)
        with s3_proxy.faults(EXPIRED, method="HEAD", count=1):
            assert objects.client.find_size(key) == size
        with s3_proxy.faults(EXPIRED, method="HEAD"), pytest.raises(StoreError) as raised:
            objects.client.find_size(key)
        assert "or renew the credentials" in raised.value.cure


def test_a_save_that_another_process_ends_within_its_commit_is_an_error(s3_proxy, s3_url):
    """It saves to the same key, or takes the save for a crashed one, just before the request of the commit."""
    with ExitStack() as stack:
        slow, fast = (
            stack.enter_context(open_objects(s3_proxy.address(name), leftover_age_s=-3600))
            for name in ("slow", "fast")
        )
        for name, act, expected in (
            ("saved", lambda key: write(fast, key, "b2", NEW), ("b2", NEW)),
            ("removed", lambda key: fast.begin(key, "b2").discard(), ("a1", OLD)),
        ):
            key = f"{s3_url}/{name}"
            write(slow, key, "a1", OLD)
            commit = {"method": "PUT", "key": f"{name}/{NAME}$", "client": "slow", "count": 1}
            s3_proxy.inject(Hook(lambda _, act=act, key=key: act(key)), **commit)
            with pytest.raises(CheckpointError, match="another process"):
                write(slow, key, "c3", NEW)
            assert read(slow, key) == expected
