"""Recorded answers of the commands of Slurm."""

from __future__ import annotations

__all__ = ["line"]

LINE = (
    "JobId={id} {array}JobName={name} UserId=ann(1000) GroupId=ann(1000) MCS_label=N/A Priority=1 Nice=0 Account=(null) "
    "QOS=(null) JobState={state} Reason={reason} Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 "
    "ExitCode={code} RunTime=00:01:02 TimeLimit=01:00:00 SubmitTime=2026-01-02T03:04:05 NodeList=n[0-1] "
    "BatchHost=n0 NumNodes=2 Command=(null) WorkDir=/home/ann StdErr={log} StdIn=/dev/null StdOut={log} Power= "
)


def line(**changes):
    """Return a line of `scontrol show job --oneliner`."""
    fields = {
        "id": "12",
        "array": "",
        "name": "train.py",
        "state": "RUNNING",
        "reason": "None",
        "code": "0:0",
        "log": "/l/slurm-%j.out",
    }
    return LINE.format(**(fields | changes))
