"""The JSON schema of a profile is that of its golden file."""

import golden
import in_process


def test_the_json_schema_is_that_of_its_golden_file(capfd, home):
    done = in_process.run(capfd, "config", "schema")
    assert done.returncode == 0, done.stderr
    golden.check("config/schema.json", done.stdout)
