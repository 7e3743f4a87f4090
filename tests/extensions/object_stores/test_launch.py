"""Launched scripts with checkpoints in S3: forked workers that use the same client, a restart, and errors without secrets."""

from __future__ import annotations

import os
from textwrap import dedent

import pytest
from support.object_stores.fault_proxy import Answer
from support.object_stores.server import ACCESS_KEY, SECRET_KEY, client_variables
from support.processes.commands import run_accel

TOKEN = "token/of+the/session/0123456789abcdef=="
TRAIN = """
import os, sys
import torch
from accel_runtime import Accelerator, ProjectConfiguration

URL = sys.argv[1]
accelerator = Accelerator(
    project_config=ProjectConfiguration(
        project_dir=URL, automatic_checkpoint_naming=True, total_limit=2, async_save=True
    )
)


class Objects(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        # A client with native threads, in a forked worker.
        import obstore
        from obstore.store import from_url

        assert torch.utils.data.get_worker_info() is not None
        bucket = from_url(URL.rsplit("/", 1)[0], client_options={"allow_http": True})
        return torch.frombuffer(bytearray(obstore.get(bucket, "sample").bytes()), dtype=torch.float32)


model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(Objects(), batch_size=2, num_workers=2, multiprocessing_context="fork")
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()
steps = optimizer.steps
for epoch in range(loader.epoch, 2):
    for batch in loader:
        accelerator.backward(model(batch).mean())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state()
        if len(sys.argv) > 2 and steps == 0 and optimizer.steps == 5 and accelerator.is_main_process:
            accelerator.wait_for_checkpoint()
            os._exit(3)
accelerator.wait_for_checkpoint()
assert "obstore" not in sys.modules
accelerator.print("steps", steps, optimizer.steps, len(accelerator.checkpoints.list()))
"""
SAVE = """
import sys
from accel_runtime import Accelerator

accelerator = Accelerator()
accelerator.save_state(sys.argv[1])
"""


@pytest.fixture
def launch(cwd):
    """Return a function that launches a script on the CPU with the variables of a client."""

    def run(source, *arguments, address, processes=1, options=(), **variables):
        (cwd / "train.py").write_text(dedent(source))
        command = ("launch", "--cpu", "--nproc-per-node", processes, *options, "train.py", *arguments)
        environ = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        return run_accel(*command, cwd=cwd, env=environ | client_variables(address) | variables)

    return run


def put_sample(server, url):
    bucket = url.removeprefix("s3://").partition("/")[0]
    server.client.put_object(Bucket=bucket, Key="sample", Body=b"\0\0\x80\x3f" * 4)


@pytest.mark.slow
def test_forked_workers_use_the_client_while_checkpoints_are_saved_in_the_background(
    launch, s3_server, s3_proxy, s3_url
):
    put_sample(s3_server, s3_url)
    result = launch(TRAIN, s3_url, address=s3_proxy.address(), processes=2)
    assert result.returncode == 0, result.stderr
    assert "steps 0 8 2" in result.stdout, result.stdout
    assert len(s3_proxy.select(method="GET", key="^sample$")) == 32


@pytest.mark.slow
def test_a_run_that_is_restarted_goes_on_with_the_newest_checkpoint(launch, s3_server, s3_proxy, s3_url):
    put_sample(s3_server, s3_url)
    restart = ("--max-restarts", 1)
    result = launch(TRAIN, s3_url, "crash", address=s3_proxy.address(), processes=2, options=restart)
    assert result.returncode == 0, result.stderr
    assert "steps 5 8 2" in result.stdout, result.stdout + result.stderr


ERRORS = {
    "expired": (Answer(400, "ExpiredToken", "The provided token has expired."), "ExpiredToken"),
    "invalid key": (
        Answer(403, "InvalidAccessKeyId", "The key does not exist in our records."),
        "InvalidAccessKeyId",
    ),
}


def find_secrets(text):
    return [secret for secret in (ACCESS_KEY, SECRET_KEY, TOKEN) if secret in text]


def read_files(folder):
    return "".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
@pytest.mark.parametrize("error", ERRORS)
def test_an_error_of_credentials_names_the_cure_and_no_secret_is_in_any_output(
    launch, s3_proxy, s3_url, tmp_path, error
):
    """The answers repeat the access key and the token, as those of AWS do; all logs are on."""
    answer, code = ERRORS[error]
    s3_proxy.inject(answer)
    debug = {"ACCEL_LOG_LEVEL": "debug", "RUST_LOG": "trace", "RUST_BACKTRACE": "1"}
    result = launch(SAVE, f"{s3_url}/x", address=s3_proxy.address(), AWS_SESSION_TOKEN=TOKEN, **debug)
    assert result.returncode != 0
    output = result.stdout + result.stderr
    assert code in output, output
    assert "Renew the credentials" in output
    assert any(request.headers["x-amz-security-token"] == TOKEN for request in s3_proxy.requests)
    assert find_secrets(output) == []
    assert find_secrets(read_files(tmp_path)) == []
