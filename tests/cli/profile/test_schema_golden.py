"""The JSON schema of a profile, compared with its golden file."""

import golden
import in_process


def test_the_json_schema_equals_its_golden_file(capfd, home):
    result = in_process.run(capfd, "config", "schema")
    assert result.returncode == 0, result.stderr
    golden.check("config/schema.json", result.stdout)
