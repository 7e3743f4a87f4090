"""Files with credentials are not sent: by their names, and by the tokens in them. Ordinary files are."""

import base64
import json
import random
import string
import sys

import pytest

from accel_cli.errors import UsageError
from accel_cli.launchers import secret_files
from accel_cli.launchers.secret_files import find_tokens, is_secret_name
from accel_cli.launchers.source_files import check_selected, describe_selection, select_files

SECRET_NAMES = [
    ".env",
    ".env.local",
    ".env.production",
    ".env.development",
    ".env.test",
    ".env.backup",
    ".env.bak",
    ".env~",
    ".env.old",
    ".env.swp",
    "..env.swp",
    "#.env#",
    ".env-prod",
    ".env_dev",
    "prod.env",
    "conf/staging.env",
    "app.env.local",
    ".envrc",
    ".envrc.local",
    ".flaskenv",
    ".Renviron",
    ".aws/credentials",
    ".aws/config",
    "deploy/.aws/credentials",
    "credentials",
    "credentials.csv",
    "credentials.json",
    "credentials.yaml",
    "credentials.xml",
    "credentials.toml",
    "credentials.db",
    "credentials.json~",
    "credentials.json.bak",
    "credentials.old",
    "new_user_credentials.csv",
    "rootkey.csv",
    "admin_accessKeys.csv",
    "accessKeys.csv",
    "access_key.txt",
    "aws_credentials",
    "aws_credentials.json",
    "awscreds.txt",
    "aws_keys.csv",
    "aws-credentials.ini",
    ".azure/accessTokens.json",
    "accessTokens.json",
    "azureProfile.json",
    "msal_token_cache.json",
    "service_principal.json",
    "service_principal_entries.bin",
    "azureauth.json",
    "my.azureauth",
    "local.settings.json",
    "prod.publishsettings",
    "service.cscfg",
    "application_default_credentials.json",
    ".config/gcloud/access_tokens.db",
    ".config/gcloud/credentials.db",
    ".gcloud/key",
    "legacy_credentials/a/adc.json",
    "adc.json",
    "client_secret.json",
    "client_secrets.json",
    "client_secret_123-abc.apps.googleusercontent.com.json",
    "client-secret.json",
    "service-account.json",
    "service_account.json",
    "serviceAccount.json",
    "serviceAccountKey.json",
    "my-service-account.json",
    "project-firebase-adminsdk-x1-2.json",
    "google-services.json",
    "google_credentials.json",
    "gcp-key.json",
    "gcp_service_key.json",
    "gcloud-service-key.json",
    "sa-key.json",
    "keyfile.json",
    "gha-creds-1234.json",
    ".boto",
    ".boto.cfg",
    ".s3cfg",
    ".passwd-s3fs",
    "passwd-s3fs",
    ".aliyun/config.json",
    ".oci/config",
    ".oci/oci_api_key.pem",
    ".bluemix/cos_credentials",
    "cos_credentials",
    ".config/doctl/config.yaml",
    "rclone.conf",
    ".config/rclone/rclone.conf",
    ".mc/config.json",
    ".edgerc",
    ".tugboat",
    ".databrickscfg",
    ".snowsql/config",
    ".modal.toml",
    ".vast_api_key",
    ".fly/config.yml",
    ".huggingface/token",
    ".cache/huggingface/token",
    "huggingface/stored_tokens",
    "token",
    "token.txt",
    "token.json",
    "my.token",
    "hf_token",
    "hf_token.txt",
    "hf-token.txt",
    "huggingface_token.txt",
    "github_token",
    "github_token.txt",
    "gh_token.txt",
    "gitlab_token.txt",
    "slack_token.txt",
    "wandb_token.txt",
    "access_token.json",
    "auth_token.txt",
    "refresh_token.json",
    ".hf_token",
    "api_key",
    "api_key.txt",
    "api-key.txt",
    "apikey.txt",
    "apikey.json",
    "api_keys.json",
    "API_KEY.txt",
    "openai_api_key.txt",
    "openai_key.txt",
    "anthropic_key.txt",
    "wandb_api_key.txt",
    "wandb_key.txt",
    "google_api_key.txt",
    "secret",
    "secret.txt",
    "secret_key.txt",
    "secretkey.txt",
    "secrets.json",
    "secrets.toml",
    "secrets.yaml",
    "secrets.yml",
    "secret.yaml",
    "db-secret.yaml",
    "prod_secrets.yaml",
    ".secrets",
    ".streamlit/secrets.toml",
    ".credentials",
    "password",
    "password.txt",
    "passwords.txt",
    "passwords.csv",
    "passwd",
    "db_password.txt",
    "creds.json",
    "creds.txt",
    "db_creds.ini",
    "private_key.txt",
    "private-key.json",
    "master_key",
    "encryption_key.txt",
    "config/master.key",
    "recovery-codes.txt",
    "github-recovery-codes.txt",
    "kaggle.json",
    ".kaggle/kaggle.json",
    ".comet.config",
    "clearml.conf",
    "jupyter_server_config.json",
    ".netrc",
    "_netrc",
    "netrc",
    ".netrc.bak",
    ".netrc~",
    ".netrc.gpg",
    ".netrc-work",
    "my.netrc",
    ".NETRC",
    "terraform.tfstate",
    "terraform.tfstate.backup",
    "prod.tfstate",
    "terraform.tfvars",
    "prod.auto.tfvars",
    "secrets.tfvars.json",
    "plan.tfplan",
    ".terraformrc",
    "terraform.rc",
    ".terraform.d/credentials.tfrc.json",
    "credentials.tfrc.json",
    ".terraform/terraform.tfstate",
    ".terraform.tfstate.lock.info",
    ".vault-token",
    ".vault_pass",
    ".vault_pass.txt",
    "vault_password",
    "vault-password.txt",
    "vault_pass",
    ".kube/config",
    "kubeconfig",
    "kubeconfig.yaml",
    "kubeconfig-prod",
    "prod.kubeconfig",
    "kubeconfig.bak",
    "my-kubeconfig.yaml",
    "kube_config.yaml",
    ".docker/config.json",
    ".dockercfg",
    ".dockerconfigjson",
    "dockerconfig.json",
    ".ssh/config",
    ".ssh/id_rsa",
    "id_rsa",
    "id_rsa.pub",
    "id_dsa",
    "id_ecdsa",
    "id_ed25519",
    "id_ed25519_work",
    "github_rsa",
    "backup_ed25519",
    "ssh_host_rsa_key",
    "deploy_key",
    "server.pem",
    "server.key",
    "server.p12",
    "server.pfx",
    "server.pkcs12",
    "AuthKey_1.p8",
    "putty.ppk",
    "release.jks",
    "debug.keystore",
    "trust.bks",
    "store.jceks",
    "code.pvk",
    "krb5cc_0",
    "user.keytab",
    "keys.agekey",
    "sops/age/keys.txt",
    "secring.gpg",
    "private.asc",
    "my-private-key.asc",
    ".gnupg/secring.gpg",
    "office.ovpn",
    "vpn.tblk",
    "host.rdp",
    "passwords.kdb",
    "passwords.kdbx",
    "my.psafe3",
    "my.agilekeychain",
    "login.keychain",
    "login.keychain-db",
    ".password-store/a.gpg",
    "wallet.dat",
    "otr.private_key",
    "logins.json",
    "key4.db",
    "cookies.txt",
    "cookies.sqlite",
    ".muttrc",
    ".msmtprc",
    ".npmrc",
    ".pypirc",
    ".gem/credentials",
    ".cargo/credentials",
    ".cargo/credentials.toml",
    ".m2/settings.xml",
    ".gradle/gradle.properties",
    "auth.json",
    ".git-credentials",
    ".gitcredentials",
    ".gitconfig",
    ".config/hub",
    ".config/gh/hosts.yml",
    ".dvc/config.local",
    ".httr-oauth",
    ".pgpass",
    "pgpass.conf",
    ".pg_service.conf",
    ".my.cnf",
    ".mylogin.cnf",
    ".mongorc.js",
    "robomongo.json",
    ".dbeaver-data-sources.xml",
    "mongoid.yml",
    ".htpasswd",
    "htpasswd",
    "proftpdpasswd",
    "wp-config.php",
    "LocalSettings.php",
    "secret_token.rb",
    "etc/shadow",
    "filezilla.xml",
    "recentservers.xml",
    "sftp-config.json",
    ".vscode/sftp.json",
    ".remote-sync.json",
    ".ftpconfig",
    ".idea/WebServers.xml",
    "ventrilo_srv.ini",
    "config/prod.secret.exs",
    "http-client.private.env.json",
    ".smbcredentials",
    ".curlrc",
    ".wgetrc",
    ".bash_history",
    ".zsh_history",
    ".python_history",
    ".psql_history",
    ".mysql_history",
    ".sqlite_history",
    ".node_repl_history",
    ".irb_history",
    ".rediscli_history",
    ".sh_history",
    ".history",
    ".zhistory",
    ".local/share/fish/fish_history",
    ".Rhistory",
    ".lein-repl-history",
    ".lesshst",
    ".viminfo",
    ".aider.input.history",
    ".aider.chat.history.md",
    ".bashrc",
    ".bash_profile",
    ".zshrc",
    ".profile",
]
ORDINARY_NAMES = [
    "train.py",
    "README.md",
    "env",
    "environment.yml",
    "environment.yaml",
    "env.py",
    "env.yaml",
    ".env.example",
    ".env.sample",
    ".env.template",
    "example.env",
    "token.py",
    "tokens.py",
    "tokens.txt",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenization_bert.py",
    "token_ids.npy",
    "token/vocab.txt",
    "tokens.json",
    "vocab.txt",
    "merges.txt",
    "num_tokens.csv",
    "token_counts.json",
    "secrets.py",
    "secret.py",
    "secret/model.py",
    "key.py",
    "keys.py",
    "keys.json",
    "key.json",
    "keypoints.json",
    "keyboard.csv",
    "credentials.py",
    "credentials/__init__.py",
    "password.py",
    "passwords.py",
    "auth.py",
    "api_key.py",
    "apikeys.py",
    "test_api_key.py",
    "netrc.py",
    "kubeconfig.py",
    "kube_config.py",
    "service_principal.py",
    "service_account.py",
    "hf_token.py",
    "client_secret.py",
    "authorized_keys",
    "known_hosts",
    "aws/config.yaml",
    "azure/main.py",
    "docker/Dockerfile",
    "kube/job.yaml",
    "ssh/connect.py",
    "gcloud/setup.sh",
    "huggingface/model.py",
    "config.json",
    "config.yaml",
    "settings.json",
    "params.json",
    "data.csv",
    "counts.tpm",
    "history.csv",
    "history.json",
    "training_history.json",
    "metrics.jsonl",
    "main.tf",
    "variables.tf",
    "a.pem.py",
    "public.crt",
    "ca.crt",
    "requirements.txt",
    "pyproject.toml",
    "setup.cfg",
    "Makefile",
    "Dockerfile",
    ".gitignore",
    ".dockerignore",
    ".gitattributes",
    ".python-version",
    ".pre-commit-config.yaml",
    "model.safetensors",
    "weights.bin",
    "checkpoint.pt",
    "index.json",
    "generation_config.json",
    "preprocessor_config.json",
    "trainer_state.json",
    "serviceaccount-v1.json",
    "profile.yaml",
    "accel.yaml",
    "deepspeed.json",
    "launch.sh",
    "job.sbatch",
    "notebook.ipynb",
    "monkey.txt",
    "turkey.json",
    "passage.txt",
    "passing.csv",
    "secretary.csv",
    "compass.json",
    "sentinel.json",
    "tokenized/part-0.parquet",
    "keyword.txt",
    "hockey.csv",
    "cookies.csv",
]


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_a_file_with_the_name_of_credentials_is_not_sent(name):
    assert is_secret_name(name)
    assert is_secret_name(f"some/folder/{name}")


@pytest.mark.parametrize("name", ORDINARY_NAMES)
def test_a_file_with_an_ordinary_name_is_sent(name):
    assert not is_secret_name(name)


def test_a_pattern_that_names_a_secret_sends_it(tmp_path):
    names = {"api_key.txt", "conf/terraform.tfvars", ".huggingface/token", "tokens.txt"}
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert set(select_files(tmp_path).secrets) == names - {"tokens.txt"}
    assert not select_files(tmp_path, ["api_key.txt", "*.tfvars", ".huggingface/**"]).secrets
    assert set(select_files(tmp_path, ["**", "*.txt", "conf/*"]).secrets) == names - {"tokens.txt"}


def make(alphabet, length, seed=0):
    """Return random characters, so that no token stands in this file."""
    return "".join(random.Random(seed).choices(alphabet, k=length))


WORD, HEX = string.ascii_letters + string.digits, "0123456789abcdef"
KEY = "-----BEGIN {}PRIVATE KEY-----{}" + make(WORD, 64)
PART = base64.urlsafe_b64encode(json.dumps({"alg": "HS256", "sub": "4711"}).encode()).decode().rstrip("=")
TOKENS = {
    "AWS Access Key": ["AKIA" + make(string.ascii_uppercase, 16), f'aws_secret_access_key = "{make(WORD, 40)}"'],
    "Anthropic Key": ["sk-ant-api03-" + make(WORD, 93) + "AA"],
    "Azure Storage Account access key": ["AccountKey=" + make(WORD, 86) + "=="],
    "Basic Auth Credentials": [f"postgres://me:{make(WORD, 12)}@db.internal/x"],
    "Databricks Token": ["dapi" + make(HEX, 32)],
    "GitHub Fine-Grained Token": ["github_pat_" + make(WORD, 82)],
    "GitHub Token": [f"gh{kind}_" + make(WORD, 36) for kind in "pousr"],
    "GitLab Token": ["glpat-" + make(WORD, 20)],
    "Google API Key": ["AIza" + make(WORD, 35)],
    "Groq Key": ["gsk_" + make(WORD, 52)],
    "Hugging Face Token": ["hf_" + make(string.ascii_letters, 34), "api_org_" + make(string.ascii_letters, 34)],
    "JSON Web Token": [f"{PART}.{PART}.{make(WORD, 43)}"],
    "NPM tokens": ["//registry.npmjs.org/:_authToken=npm_" + make(WORD, 30)],
    "NVIDIA Key": ["nvapi-" + make(WORD, 64)],
    "npm Token": ["npm_" + make(WORD, 36)],
    "OpenAI Token": [
        "sk-proj-" + make(WORD, 60) + "-" + make(WORD, 13) + "T3BlbkFJ" + make(WORD, 74), "sk-" + make(WORD, 20) + "T3BlbkFJ" + make(WORD, 20)],
    "Private Key": [
        KEY.format("", "\n"), KEY.format("RSA ", "\nProc-Type: 4,ENCRYPTED\n\n"), KEY.format("OPENSSH ", "\\n"),
        KEY.format("EC ", '\\n" +\n  "'),
    ],
    "PyPI Token": ["pypi-AgEIcHlwaS5vcmc" + make(WORD, 80)],
    "Replicate Token": ["r8_" + make(WORD, 37)],
    "SendGrid API Key": ["SG." + make(WORD, 22) + "." + make(WORD, 43)],
    "Slack Token": ["xoxb-123456-" + make(HEX, 24), "https://hooks.slack.com/services/T1/B2/" + make(WORD, 24)],
    "Stripe Access Key": ["sk_live_" + make(WORD, 24)],
    "Vault Token": ["hvs." + make(WORD, 95)],
    "W&B Key": ["WANDB_API_KEY=" + make(HEX, 40), "wandb_v1_" + make(WORD, 60)],
}  # fmt: skip
SAMPLES = [
    pytest.param(kind, text, id=f"{kind} {index}")
    for kind, texts in TOKENS.items()
    for index, text in enumerate(texts)
]


@pytest.mark.parametrize(
    "frame", ["{}", "token: {}\n", '{{"key": "{}"}}', "x\n" * 9 + "key = '{}'  # mine\n"]
)
@pytest.mark.parametrize(("kind", "text"), SAMPLES)
def test_a_file_with_a_token_is_not_sent_and_is_listed_with_the_reason(tmp_path, kind, text, frame):
    (tmp_path / "notes.txt").write_text(frame.format(text))
    (tmp_path / "train.py").write_text("import torch\n")
    selection = select_files(tmp_path)
    line = frame.split("{}")[0].count("\n") + 1
    reason = f"not sent, since they may hold secrets: notes.txt (line {line}: {kind})"
    assert [file.name for file in selection.files] == ["train.py"]
    assert reason in [*describe_selection(selection)][-1]
    assert selection.notes[0].startswith(reason)
    assert text not in str(selection)
    with pytest.raises(UsageError, match=r"notes.txt is needed, but is not sent: it may hold secrets"):
        check_selected(selection, "notes.txt")
    assert [file.name for file in select_files(tmp_path, ["*.txt"]).files] == ["train.py"]
    assert [file.name for file in select_files(tmp_path, ["notes.txt"]).files] == ["notes.txt", "train.py"]


TOKEN = TOKENS["GitHub Token"][0]


@pytest.mark.parametrize("name", ["train.py", "pkg/a.pyx", "run.sh", "job.sbatch", "kernel.cu", "script"])
def test_source_code_with_a_token_is_refused_unless_it_is_named(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n\ntoken = '{TOKEN}'\n")
    with pytest.raises(UsageError) as error:
        select_files(tmp_path)
    assert f"1 file(s) of source code contain a token or a password: {name}:3 (GitHub Token)." in str(
        error.value
    )
    assert TOKEN not in str(error.value)
    with pytest.raises(UsageError):
        select_files(tmp_path, ["**"])
    assert [file.name for file in select_files(tmp_path, [name]).files] == [name]
    assert select_files(tmp_path, [], [name]).files == ()


@pytest.mark.parametrize(
    "text",
    [
        "https://user:password@host/", "https://me:short@host/", "https://{user}:{password}@host", "http://$USER:$PASSWORD@host",
        "postgres://postgres:my-password@localhost", "AKIAIOSFODNN7EXAMPLE", "hf_" + "x" * 34, "ghp_" + "0" * 36,
        "if '-----BEGIN PRIVATE KEY-----' in text:", "-----BEGIN RSA PRIVATE KEY-----\n...\n", "hf_transfer_download_of_a_model",
        "-----BEGIN CERTIFICATE-----\n" + make(WORD, 64), "sha256:" + make(HEX, 64), make(WORD + "+/", 4000),
        f"commit {make(HEX, 40)}", "arn:aws:sagemaker:us-east-1:123456789012:labeling-job/name-of-a-job-that-is-long-enough",
        "x" + make(WORD, 3) + "AKIA" + make(string.ascii_uppercase, 16), "WANDB_API_KEY=$WANDB_API_KEY", 'os.environ["HF_TOKEN"]',
        json.dumps({"cells": [{"outputs": [{"image/png": base64.b64encode(random.Random(1).randbytes(90_000)).decode()}]}]}),
        json.dumps({"model": {"vocab": {make(WORD, 8, seed): seed for seed in range(3000)}}}), "token " * 9,
    ],
)  # fmt: skip
def test_ordinary_text_has_no_token(tmp_path, text):
    (tmp_path / "a.py").write_text(text)
    assert find_tokens(tmp_path, ["a.py"]).found == ()


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "latin-1"])
def test_text_of_every_encoding_is_searched(tmp_path, encoding):
    (tmp_path / "a").write_bytes(f"Schlüssel {TOKEN}".encode(encoding))
    assert [token.kind for token in find_tokens(tmp_path, ["a"]).found] == ["GitHub Token"]


def test_binary_large_and_special_files_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(secret_files, "_MAX_FILE_BYTES", 1000)
    (tmp_path / "binary").write_bytes(b"\0" + TOKEN.encode())
    (tmp_path / "large").write_text(" " * 1000 + TOKEN)
    (tmp_path / "link").symlink_to("/dev/zero")
    secret_files.os.mkfifo(tmp_path / "pipe")
    names = ["binary", "large", "link", "pipe", "gone"]
    assert find_tokens(tmp_path, names) == secret_files.TokenSearch((), 0, len(TOKEN) + 1)


def test_files_beyond_the_limit_are_reported_and_the_smallest_are_searched_first(tmp_path, monkeypatch):
    monkeypatch.setattr(secret_files, "_MAX_BYTES", 100)
    (tmp_path / "a_large.txt").write_text("x" * 90)
    (tmp_path / "z_small.txt").write_text(TOKEN)
    selection = select_files(tmp_path)
    assert selection.secrets == ("z_small.txt",)
    assert selection.notes[0] == "1 files were not searched for tokens, after 40 B"


def test_nothing_is_sent_to_verify_a_token(tmp_path, monkeypatch):
    import socket

    def refuse(*_):
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    (tmp_path / "a.txt").write_text("\n".join(text for texts in TOKENS.values() for text in texts))
    assert len(find_tokens(tmp_path, ["a.txt"]).found) == 1


def test_the_names_do_not_import_the_detectors():
    import subprocess

    code = "import sys, accel_cli.launchers.source_files as s; assert 'detect_secrets' not in sys.modules and 'requests' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
