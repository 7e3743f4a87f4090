"""Locations: a URL is recognized in every form in which scripts pass it, and everything else is a path."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_runtime.environment.locations import (
    URL_SCHEMES,
    StoreURL,
    is_url,
    join_location,
    normalize_location,
    split_url,
)
from accel_runtime.foundation.options import ProjectConfiguration

NAMES = st.text("abc-_.0 #%", min_size=1, max_size=5).filter(lambda name: name not in {".", ".."})


@given(st.sampled_from(["s3", "gs", "az"]), st.lists(NAMES, min_size=1, max_size=4))
def test_a_url_that_has_become_a_path_is_the_same_url(scheme, names):
    url = f"{scheme}://{'/'.join(names)}"
    assert normalize_location(url) == normalize_location(Path(url)) == normalize_location(f"{url}/") == url
    assert is_url(Path(url))
    assert split_url(url) == (f"{scheme}://{names[0]}", "/".join(names[1:]))
    assert join_location(Path(url), "checkpoints") == f"{url}/checkpoints"


def test_the_url_of_a_store_has_the_parts_of_a_path_and_equals_its_text():
    text = "s3://bucket/run/checkpoints/checkpoint_3"
    url = StoreURL(text)
    assert (url.name, url.parent.name, url.parent.parent) == (
        "checkpoint_3",
        "checkpoints",
        "s3://bucket/run",
    )
    assert url.parent / "checkpoint_3" == url.parent / Path("checkpoint_3") == url == str(url) == text
    assert {url: 1}[text] == 1
    assert os.fspath(url) == f"{url}" == normalize_location(url) == text
    assert (StoreURL("s3://bucket").parent, StoreURL("s3://bucket").name) == ("s3://bucket", "")
    copied = pickle.loads(pickle.dumps(url))  # noqa: S301 - of this test
    assert (type(copied), copied) == (StoreURL, url)


@pytest.mark.parametrize("text", ["runs/1", "/s3/bucket", "s3", "./ftp://host/x", "C:/x", "s3:x", "a b://x"])
def test_other_texts_are_paths(text):
    assert not is_url(text)
    assert normalize_location(text) == str(Path.cwd() / text)


@pytest.mark.parametrize(
    "text",
    ["s4://bucket/x", "S3://bucket/x", "hdfs://host/x", "file:///tmp/x", "ftp://host/x", "https://host/x"],
)
@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize(
    "use", [is_url, normalize_location, lambda text: ProjectConfiguration(project_dir=text)]
)
def test_a_url_with_another_scheme_is_refused_with_the_known_ones(use, kind, text):
    scheme = text.partition(":")[0]
    with pytest.raises(ValueError, match=rf"{scheme}:// is not a known scheme\.") as caught:
        use(kind(text))
    assert all(f"{scheme}://" in str(caught.value) for scheme in URL_SCHEMES)


@pytest.mark.parametrize("text", ["s3://", "s3:///", "gs://bucket/../other", "az://bucket/."])
def test_a_url_without_a_bucket_or_with_dots_is_refused(text):
    with pytest.raises(ValueError, match=r"Invalid location .*: expected (s3|gs|az)://BUCKET/PATH\."):
        normalize_location(text)


def test_the_checkpoints_of_a_project_in_a_store_are_below_its_url_and_trackers_need_a_directory():
    project = ProjectConfiguration(project_dir=Path("s3://bucket/run"))
    assert project.checkpoints == "s3://bucket/run/checkpoints"
    assert project.checkpoints.name == "checkpoints"
    assert project.logs is None
    assert ProjectConfiguration(project_dir="s3://bucket/run", logging_dir="logs").logs == Path("logs")
    with pytest.raises(ValueError, match="trackers write files"):
        ProjectConfiguration(logging_dir="s3://bucket/logs")
