"""What the tests share: processes, models, data sets, golden files."""
