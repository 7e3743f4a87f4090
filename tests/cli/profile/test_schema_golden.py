"""The JSON schema of a profile, compared with its golden file."""

from support.cases import golden
from support.processes.commands import call_accel


def test_the_json_schema_equals_its_golden_file(capfd, home):
    result = call_accel(capfd, "config", "schema")
    assert result.returncode == 0, result.stderr
    golden.check("config/schema.json", result.stdout)
