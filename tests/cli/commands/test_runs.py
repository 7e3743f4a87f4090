"""`accel logs` prints the last run that has logs."""

from in_process import run

from accel_cli.runner.run_dir import RunFolder


def test_a_launch_that_never_met_does_not_hide_the_run_before_it(tmp_path, capfd, cwd):
    trained = RunFolder.create(tmp_path, "train.py", {"exit_code": 0})
    rank = trained.get_rank(0, 0)
    rank.path.mkdir(parents=True)
    rank.output.write_text("step 1\n")
    alone = RunFolder.create(tmp_path, "alone.py", {"exit_code": 1})
    done = run(capfd, "logs", "--log-dir", tmp_path)
    assert (done.returncode, done.stdout) == (0, "step 1\n")
    assert done.stderr == (
        f"accel: {alone.path.name} started no process (exit code 1); these are the logs of {trained.path.name}\n"
    )
    named = run(capfd, "logs", "--log-dir", tmp_path, "--run", alone.path.name)
    assert (named.returncode, named.stdout) == (2, "")


def test_a_list_of_no_runs_names_the_folder_that_was_searched(tmp_path, capfd, cwd):
    done = run(capfd, "logs", "--list", "--log-dir", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", f"accel: no runs found in {tmp_path}\n")
