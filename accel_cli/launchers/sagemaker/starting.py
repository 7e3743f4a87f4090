"""Starts a job whose files are sent: there is one job in the end, or none and its files are gone."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from accel_cli import console
from accel_cli.errors import AccelError, UsageError
from accel_cli.jobs.base import UnreachableError
from accel_cli.launchers.sagemaker import upload
from accel_cli.launchers.sagemaker.aws import Account, code, is_no_job
from accel_cli.launchers.sagemaker.request import CHANNEL, Facts

__all__ = ["start"]

_TAKEN = frozenset({"ResourceInUse", "ResourceInUseException"})
_PAUSES_S = (5.0, 10.0, 15.0)
"""How long a role is waited for that was made a moment ago: what IAM knows reaches SageMaker late."""


def start(account: Account, request: Mapping[str, Any], facts: Facts, again: str = "") -> None:
    """Start a job.

    Args:
        account: Whose job it is.
        request: The arguments of CreateTrainingJob.
        facts: Where its files are, which are deleted if it does not start.
        again: Options with which `accel jobs` finds it.

    Raises:
        UsageError: AWS refuses it.
        AccelError: It does not start; or whether it did is not known, and the message says so.
        KeyboardInterrupt: The person broke it off; a note says what there is.
    """
    try:
        _create(account, request)
    except AccelError as error:
        if not _started_all_the_same(account, request, error):
            raise type(error)(f"{error}; {_left(account, facts)}") from error
    except BaseException:
        _say_what_there_is(account, request, facts, again)
        raise


def _create(account: Account, request: Mapping[str, Any]) -> None:
    """Ask for the job, and again where only the role may be too new."""
    for pause in (*_PAUSES_S, None):
        try:
            with account.speaking(f"start job {request['TrainingJobName']}"):
                account.client("sagemaker").create_training_job(**request)
        except UsageError as error:
            if pause is None or "assume role" not in str(error.__cause__):
                raise
            if pause == _PAUSES_S[0]:
                console.note("SageMaker cannot assume the role yet, as happens with a new one; trying again")
            time.sleep(pause)
        else:
            return


def _started_all_the_same(account: Account, request: Mapping[str, Any], error: AccelError) -> bool:
    """Whether only the answer was lost, and not the question.

    Raises:
        AccelError: That is not known; or another launch has started a job with these files.
    """
    taken = code(error.__cause__) in _TAKEN
    if not taken and not isinstance(error, UnreachableError):
        return False
    mine = _is_mine(account, request, f"{error}; whether the job started is not known")
    if mine and taken and not _tried_again(error):
        raise error  # at the same moment, under the same name: the files are that job's now
    return mine


def _tried_again(error: AccelError) -> bool:
    """Whether botocore had asked before, so that the job that is in the way may be the one it asked for."""
    answer: Mapping[str, Any] = getattr(error.__cause__, "response", None) or {}
    return bool(answer.get("ResponseMetadata", {}).get("RetryAttempts"))


def _is_mine(account: Account, request: Mapping[str, Any], unknown: str) -> bool:
    """Whether there is a job of the name that reads the files of this one.

    Raises:
        AccelError: AWS does not say.
    """
    name = request["TrainingJobName"]
    try:
        with account.speaking(f"look for job {name}"):
            sagemaker = account.client("sagemaker")
            try:
                there = sagemaker.describe_training_job(TrainingJobName=name)
            except sagemaker.exceptions.ClientError as error:
                if not is_no_job(error):
                    raise
                return False
    except AccelError as error:
        raise AccelError(
            f"{unknown}, since AWS does not say ({error}). accel jobs status {name} shows it, and its files are left"
        ) from error
    return _files(there) == _files(request)


def _files(job: Mapping[str, Any]) -> list[str]:
    channels = [one for one in job.get("InputDataConfig", ()) if one["ChannelName"] == CHANNEL]
    return [one["DataSource"]["S3DataSource"]["S3Uri"] for one in channels]


def _left(account: Account, facts: Facts) -> str:
    """Delete the files, and say what has become of them."""
    try:
        with account.speaking("delete them"):
            upload.remove(account.client("s3"), facts.bucket, f"{facts.prefix}/bundle", account=facts.account)
    except AccelError as error:
        return (
            f"what was sent is still there ({error}): aws s3 rm --recursive {facts.home}/bundle/ deletes it"
        )
    return "what was sent is deleted"


def _say_what_there_is(account: Account, request: Mapping[str, Any], facts: Facts, again: str) -> None:
    """After the person broke it off."""
    try:
        if _is_mine(account, request, "broken off; whether the job started is not known"):
            console.note(f"job {facts.name} has started already; accel jobs stop {facts.name}{again} ends it")
        else:
            console.note(f"no job was started; {_left(account, facts)}")
    except AccelError as error:
        console.note(str(error))
