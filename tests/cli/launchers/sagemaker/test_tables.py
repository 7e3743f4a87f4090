import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accel_cli.errors import UsageError
from accel_cli.launchers.sagemaker import tables

INPUTS = "channel_name\tdata_location\n"
METRICS = "metric_name\tmetric_regex\n"


@pytest.fixture
def file(tmp_path):
    def write(content):
        path = tmp_path / "Table.tsv"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def refused(read, path):
    with pytest.raises(UsageError) as caught:
        read(path)
    return str(caught.value).replace(str(path), "FILE")


def test_the_files_of_accelerate_are_read(file):
    text = INPUTS + "train\ts3://bucket/train\nval-1.x\ts3://bucket\n"
    assert tables.inputs(file(text)) == {"train": "s3://bucket/train", "val-1.x": "s3://bucket"}
    text = METRICS + "accuracy\t'accuracy': ([0-9.]+)\nf1\t'f1': (.*?),\n"
    assert tables.metrics(file(text)) == {"accuracy": "'accuracy': ([0-9.]+)", "f1": "'f1': (.*?),"}


def test_an_access_point_is_a_place_in_s3(file):
    place = "s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/mine/data"
    assert tables.inputs(file(f"{INPUTS}a\t{place}\n")) == {"a": place}


@pytest.mark.parametrize(
    "text",
    [
        "channel_name\tdata_location\r\ntrain\ts3://bucket/x\r\n",
        "channel_name\tdata_location\ntrain\ts3://bucket/x",
        "channel_name\tdata_location\ntrain\ts3://bucket/x\n\n  \n\r\n",
        "\ufeffchannel_name\tdata_location\ntrain\ts3://bucket/x\n",
        "channel_name \t data_location\n train\t s3://bucket/x \n",
    ],
)
def test_ends_of_lines_and_empty_ones_at_the_end_do_not_matter(file, text):
    assert tables.inputs(file(text)) == {"train": "s3://bucket/x"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "FILE:1: expected the line channel_name, a tab, data_location, and below it a line for each; got ''"),
        ("train\ts3://bucket/x\n", r"FILE:1: expected the line channel_name, a tab, data_location, and below it a line for each; got 'train\ts3://bucket/x'"),
        ("channel_name,data_location\n", "FILE:1: expected the line"),
        (INPUTS, "FILE: expected at least one line below channel_name, data_location"),
        (INPUTS + "train\n", "FILE:2: expected channel_name, a tab, data_location; data_location is missing"),
        (INPUTS + "train\t\n" + "b\ts3://bucket", "FILE:2: expected channel_name, a tab, data_location; data_location is missing"),
        (INPUTS + "\ts3://bucket\n", "FILE:2: expected channel_name, a tab, data_location; channel_name is missing"),
        (INPUTS + "\na\ts3://bucket\n", "FILE:2: expected channel_name, a tab, data_location; the line is empty"),
        (INPUTS + "a\ts3://bucket\tmore\n", "FILE:2: expected channel_name, a tab, data_location; there are 3 columns"),
        (INPUTS + "a s3://bucket\n", "FILE:2: expected channel_name, a tab, data_location; data_location is missing"),
        (INPUTS + "a\ts3://bucket\nb\ts3://bucket\na\ts3://other\n", "FILE:4: 'a' is there already"),
        (INPUTS + "my data\ts3://bucket\n", "FILE:2: 'my data' is no name for a channel"),
        (INPUTS + "x" * 65 + "\ts3://bucket\n", "is no name for a channel: expected at most 64"),
        (INPUTS + "accel\ts3://bucket\n", "FILE:2: 'accel' is the channel of accel's own files"),
        (INPUTS + "a\t/data/train\n", "FILE:2: 'a' is at '/data/train': expected a place in S3 like s3://bucket/folder"),
        (INPUTS + "a\ts3:/bucket\n", "expected a place in S3"),
        (INPUTS + "a\ts3://Bucket/x\n", "expected a place in S3"),
        (INPUTS + "a\ts3://\n", "expected a place in S3"),
        (b"channel_name\tdata_location\n\xff\xfe\t1\n", "FILE: expected text in UTF-8; the byte at 27 is none of it"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_refused_with_its_line(file, text, said):
    assert said in refused(tables.inputs, file(text))


def test_all_lines_that_cannot_be_used_are_said_at_once(file):
    said = refused(tables.inputs, file(INPUTS + "a b\ts3://bucket\n\nc\n"))
    assert [line.split(": ")[0] for line in said.splitlines()] == ["FILE:2", "FILE:3", "FILE:4"]


def test_limits_of_metrics(file):
    assert "too long an expression" in refused(tables.metrics, file(METRICS + "a\t" + "x" * 501))
    assert "'" + "n" * 256 + "' is too long" in refused(tables.metrics, file(METRICS + "n" * 256 + "\tx"))
    assert "FILE:3: 'a' is there already" in refused(tables.metrics, file(METRICS + "a\tx\na\ty\n"))


def test_a_file_that_is_not_there_is_said_with_its_name(tmp_path):
    path = tmp_path / "Inputs.TSV"
    assert refused(tables.inputs, path) == "FILE: cannot be read: No such file or directory"
    assert "cannot be read" in refused(tables.inputs, tmp_path)


WORD = st.text(st.characters(exclude_characters="\t\n\r", exclude_categories=["Cs"]), min_size=1, max_size=40)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.dictionaries(
        WORD.map(str.strip).filter(bool), WORD.map(str.strip).filter(bool), min_size=1, max_size=4
    )
)
def test_names_and_expressions_arrive_as_they_are(file, rows):
    text = METRICS + "".join(f"{name}\t{regex}\n" for name, regex in rows.items())
    assert tables.metrics(file(text)) == rows


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.binary(max_size=60)
    | st.text(max_size=30).map(lambda text: (INPUTS + text).encode(errors="replace"))
)
def test_whatever_is_in_a_file_the_answer_is_a_table_or_one_message(file, content):
    for read in (tables.inputs, tables.metrics):
        try:
            assert read(file(content))
        except UsageError as error:
            assert "Table.tsv" in str(error)
