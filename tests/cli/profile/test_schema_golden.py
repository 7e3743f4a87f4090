"""The JSON schema of a profile, compared with its golden file."""

import golden
import in_process


def test_the_json_schema_equals_its_golden_file(capfd, home):
    done = in_process.run(capfd, "config", "schema")
    assert done.returncode == 0, done.stderr
    golden.check("config/schema.json", done.stdout)
