"""Files that hold credentials: by their names, and small text files by the tokens in them."""

from __future__ import annotations

import codecs
import fnmatch
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

if TYPE_CHECKING:
    from detect_secrets.plugins.base import RegexBasedDetector

__all__ = ["FILES", "FOLDERS", "FoundToken", "TokenSearch", "find_tokens", "is_secret_name"]

# The names are from these sources, each with the words `gitignore`, `gitleaks` and so on beside it:
# gitignore: the templates of github.com/github/gitignore (CC0). gitleaks: the rules for paths of github.com/gitleaks/gitleaks.
# gitrob: the signatures of github.com/michenriksen/gitrob. SDK: the documentation of a service's client or SDK about its files.
FOLDERS: Final = (
    # SDK: AWS, Azure, Alibaba Cloud, Google Cloud, IBM Cloud, Oracle, Docker, Kubernetes, Databricks, Terraform, MinIO, Fly
    ".aws", ".azure", ".aliyun", ".bluemix", ".config/gcloud", ".docker", ".fly", ".gcloud", ".kube", ".mc", ".oci",
    ".terraform", ".terraform.d", "legacy_credentials",
    # SDK: Hugging Face, Kaggle, Lightning, RunPod, Snowflake, W&B's and GitHub's clients
    ".config/gh", ".config/doctl", ".config/rclone", ".huggingface", ".kaggle", ".runpod", ".snowflake", ".snowsql",
    # SDK: ssh, GnuPG, pass, keyrings of desktops; gitrob: chat programs, browsers, Chef
    ".boto", ".chef", ".direnv", ".gnupg", ".irssi", ".mozilla", ".password-store", ".pki", ".purple", ".recon-ng", ".ssh",
    ".local/share/keyrings",
)  # fmt: skip
"""Folders of which all files are secret, at any depth."""

_WORDS = (
    "access_key", "access_keys", "api_key", "api_keys", "auth_token", "client_secret", "client_secrets", "credential",
    "credentials", "creds", "encryption_key", "master_key", "passphrase", "passwd", "password", "passwords", "private_key",
    "secret", "secret_key", "secrets", "service_account", "access_token", "api_token", "bearer_token", "bot_token",
    "deploy_token", "gh_token", "github_token", "gitlab_token", "hf_token", "hub_token", "huggingface_token", "kaggle_token",
    "npm_token", "oauth_token", "openai_token", "personal_token", "pypi_token", "read_token", "refresh_token", "sas_token",
    "slack_token", "wandb_token", "write_token", "anthropic_key", "aws_key", "aws_keys", "azure_key", "gcp_key", "google_key",
    "hf_key", "openai_key", "rootkey", "wandb_key", "token",
)  # fmt: skip
_PREFIXED_WORDS = (
    "access_key", "access_keys", "api_key", "api_keys", "client_secret", "credentials", "creds", "hf_token", "password",
    "secret_key", "secrets", "service_account",
)  # fmt: skip
_ENDINGS = r"(\.(cfg|conf|csv|ini|json|properties|toml|txt|xml|ya?ml))?"
_SEPARATOR = "[_.-]?"


def _join_words(words: Iterable[str]) -> str:
    return f"({'|'.join(word.replace('_', _SEPARATOR) for word in words)}){_ENDINGS}"


# gitrob (`credential`, `password`); SDK (AWS: credentials.csv, rootkey.csv, NAME_accessKeys.csv; Google: client_secret.json,
# application_default_credentials.json; Hugging Face: token; the examples of most services: api_key.txt, hf_token.txt)
_SPELLED = re.compile(rf"\.?{_join_words(_WORDS)}|.+[_.-]{_join_words(_PREFIXED_WORDS)}")
"""Words for credentials with the endings of text, not with those of code: `secrets.py` is a module."""
FILES: Final = (
    # SDK: Google, Firebase, Hugging Face, Elixir; files of tokens and recovery codes
    "client_secret*.json", "client-secret*.json", "service_account*.json", "service-account*.json", "*[_-]service[_-]account*.json", "*serviceaccountkey*.json",
    "*-firebase-adminsdk-*.json", "gcp[_-]*key*.json", "gcloud[_-]*key*.json", "sa[_-]key*.json", "keyfile.json", "*.token",
    "stored_tokens", "*.credentials", "*.secret", "*.secrets", "*.passwd", "*.secret.exs",
    ".*_api_key", ".*_token", "*recovery-codes*.txt", "*recovery_codes*.txt",
    # gitignore (Node, Python, Go, Rust, Terraform, ...), gitrob: environments and settings with keys
    ".env", ".env.*", ".env-*", ".env_*", "*.env", "*.env.local", ".envrc", ".envrc.*", ".flaskenv", ".renviron",
    "*.tfstate", "*.tfstate.*", "*.tfvars", "*.tfvars.json", "*.tfplan", ".terraformrc", "terraform.rc", "*.tfrc.json",
    "http-client.private.env.json", "local.settings.json", "google-services.json", "gha-creds-*.json", "auth.json",
    ".httr-oauth", ".streamlit/secrets.toml",
    # gitignore (Android, Java, Node, Ruby), gitleaks (pkcs12-file), gitrob: keys and certificates
    "*.pem", "*.key", "*.p12", "*.pfx", "*.pkcs12", "*.p8", "*.pvk", "*.ppk", "*.jks", "*.jceks", "*.bks", "*.keystore", "*.jwk",
    "*.keytab", "krb5cc_*", "*.agekey", "sops/age/keys.txt", "secring.*", "*private*.asc", "*private*.gpg", "*.ovpn", "*.tblk",
    "*.rdp", "*.cscfg", "*.publishsettings", "*.bek", "*.fve", "keystore", "keyring", "otr.private_key", "wallet.dat",
    "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*_rsa", "*_dsa", "*_ecdsa", "*_ed25519", "ssh_host_*_key", "deploy_key*",
    # gitrob: password managers, browsers and mail
    "*.kdb", "*.kdbx", "kdbx", "*.psafe3", "*.agilekeychain", "*.keychain", "*.keychain-db", "*.kwallet", "*.opvault",
    "logins.json", "key3.db", "key4.db", "signons.sqlite", "cookies.txt", "cookies.sqlite", ".muttrc", ".msmtprc", ".fetchmailrc",
    # SDK: package managers, git, containers, clusters
    ".npmrc", ".pypirc", ".gem/credentials", ".cargo/credentials*", ".m2/settings*.xml", ".gradle/gradle.properties",
    ".git-credentials", ".gitcredentials", ".gitconfig", ".config/hub", ".dvc/config.local", ".dockercfg", ".dockerconfigjson",
    "dockerconfig*.json", "kubeconfig", "kubeconfig.*", "kubeconfig[_-]*", "*.kubeconfig", "*[_-]kubeconfig*", "kube_config*",
    "kube-config*", "*[_-]secret.yaml", "*[_-]secret.yml", ".vault-token", ".vault_pass*", ".vault-pass*", "vault_pass*",
    "vault-pass*",
    # SDK: clouds and services
    ".s3cfg", ".s3curl", ".passwd-s3fs", "passwd-s3fs", ".boto.cfg", "rclone.conf", ".rclone.conf", "credentials.db", "adc.json",
    "access_tokens.db", "accesstokens.json", "azureprofile.json", "msal_token_cache*", "service_principal*", "azureauth.json",
    "*.azureauth", "cos_credentials", "awscreds*", "*accesskeys.csv", ".edgerc", ".tugboat", ".databrickscfg", ".bigqueryrc",
    ".modal.toml", ".vast_api_key", ".comet.config", "clearml.conf", "kaggle.json", "*.netrc", ".netrc*", "_netrc*", "netrc*",
    ".smbcredentials", ".curlrc", ".wgetrc", "jupyter_server_config.json", "jupyter_notebook_config.json",
    # SDK: databases; gitrob: web servers and editors that copy files
    ".pgpass", "pgpass.conf", ".pg_service.conf", "pg_service.conf", ".my.cnf", ".mylogin.cnf", ".mongorc.js", "robomongo.json",
    "*dbeaver-data-sources.xml", "mongoid.yml", ".htpasswd*", "htpasswd*", "proftpdpasswd", "wp-config.php", "localsettings.php",
    "config.inc.php", "secret_token.rb", "omniauth.rb", "carrierwave.rb", "knife.rb", "etc/shadow", "etc/passwd", "filezilla.xml",
    "recentservers.xml", "sitemanager.xml", "sftp-config.json", ".remote-sync.json", ".ftpconfig", "sftp.json", ".sftp.json",
    "webservers.xml", "ventrilo_srv.ini", "configuration.user.xpl", "jenkins.plugins.publish_over_ssh.*.xml", "salesforce.js",
    # gitignore (R, Node, Ruby, Python, Aider), gitrob: histories and start-up files of shells, in which tokens are typed
    ".*_history", ".*-history", ".*.history", ".*.history.md", ".history", ".zhistory", ".histfile", "fish_history", ".rhistory",
    ".lesshst", ".viminfo", ".bashrc", ".bash_profile", ".bash_aliases", ".zshrc", ".zprofile", ".zshenv", ".cshrc", ".profile",
    ".exports",
)  # fmt: skip
"""Patterns of names, or of names with their folders, in lower case."""
_TEMPLATE = re.compile(r"(\.env\.(example|sample|template|dist|defaults?)|(example|sample|template)\.env)")
"""Files that show which variables there are, and hold no values."""
_BACKUP = re.compile(r"(~|\.(bak|backup|copy|old|orig|save|swo|swp|tmp)|\.\d{1,2})$")


_MODULES = frozenset({
    ".c", ".cc", ".cpp", ".cu", ".go", ".h", ".ipynb", ".java", ".jl", ".py", ".pyi", ".pyx", ".rs", ".ts",
})  # fmt: skip
"""Endings of files that are code whatever their name, such as `kubeconfig.py`."""


def is_secret_name(name: str) -> bool:
    """Return whether a file usually holds credentials, by its path in the source folder, in which `*` may stand."""
    *folders, file = name.lower().rstrip("/").split("/")
    path = "/".join(["", *folders])
    if any(f"/{folder}/" in f"{path}/{file}/" for folder in FOLDERS):
        return True
    if _TEMPLATE.fullmatch(file) or os.path.splitext(file)[1] in _MODULES:  # noqa: PTH122 - faster
        return False
    return any(_is_secret(path, spelling) for spelling in _list_spellings(file))


def _is_secret(path: str, file: str) -> bool:
    exact, patterns, paths = _compile_patterns()
    return (
        file in exact
        or bool(_SPELLED.fullmatch(file))
        or bool(patterns.match(file))
        or bool(paths.search(f"{path}/{file}"))
    )


@cache
def _compile_patterns() -> tuple[frozenset[str], re.Pattern[str], re.Pattern[str]]:
    """Return the names, an expression for the patterns of names, and one for those that have folders."""
    exact = {name for name in FILES if not set(name) & set("*?[/")}
    patterns = (fnmatch.translate(name) for name in FILES if name not in exact and "/" not in name)
    paths = (f"/{fnmatch.translate(name)}" for name in FILES if "/" in name)
    return frozenset(exact), re.compile("|".join(patterns)), re.compile("|".join(paths))


def _list_spellings(file: str) -> Iterator[str]:
    """Yield a name, and without the marks that editors and users give to copies."""
    yield file
    if file.startswith("#"):
        yield file.strip("#")
    while (short := _BACKUP.sub("", file)) != file:
        yield short
        if file.endswith((".swp", ".swo")):  # vim writes `.name.swp`
            yield short.removeprefix(".")
        file = short


CODE: Final = frozenset({
    ".bash", ".c", ".cc", ".cpp", ".cu", ".cuh", ".cxx", ".go", ".h", ".hpp", ".java", ".jl", ".js", ".lua", ".pl", ".py", ".pyi",
    ".pyx", ".r", ".rb", ".rs", ".sbatch", ".scala", ".sh", ".slurm", ".ts", ".zsh",
})  # fmt: skip
"""Endings of source code: a job fails without the file, so it is not left out."""
_MAX_FILE_BYTES = 2 << 20
_MAX_BYTES = 64 << 20
"""Searching them took 3.7 s on a busy machine."""
_MAX_WORD = 2048
_LONG_WORD = re.compile(rf"[\w+/=.-]{{{_MAX_WORD},}}")
"""An image in a notebook, in which some expressions would search again from each character."""
_MIN_PASSWORD = 8
_PLACEHOLDER = re.compile(
    r"example|placeholder|changeme|change_me|dummy|redacted|your[-_]?|my[-_]?(pass|token|key|secret)|(?<![a-z])(user|pass|password|"
    r"passwd|pwd|secret|token|key|name)(?![a-z])|[<>{}$*]|\.\.\.|%\(|%s|xxxx|0{8}|1234567",
    re.IGNORECASE,
)
_MIN_CHARACTERS = 8
"""Different characters of a token that is not a placeholder."""
# detect-secrets has no detectors of these formats. From the documentation of the services, and the rules of gitleaks. Each with
# a text in lower case that it contains.
_FORMATS: Final = (
    ("Hugging Face Token", "hf_", r"hf_[A-Za-z]{34}(?!\w)"),
    ("Hugging Face Token", "api_org_", r"api_org_[A-Za-z]{34}(?!\w)"),
    ("Anthropic Key", "sk-ant-", r"sk-ant-(?:api|admin)\d\d-[\w-]{80,120}"),
    ("OpenAI Token", "t3blbkfj", r"sk-(?:proj|svcacct|admin)-[\w-]{20,200}T3BlbkFJ[\w-]{20,200}"),
    ("Google API Key", "aiza", r"AIza[\w-]{35}(?![\w-])"),
    ("Google OAuth Secret", "gocspx-", r"GOCSPX-[\w-]{28}(?![\w-])"),
    ("GitHub Fine-Grained Token", "github_pat_", r"github_pat_\w{82}"),
    ("AWS Bedrock Key", "absk", r"ABSK[A-Za-z0-9+/]{109,269}"),
    ("Databricks Token", "dapi", r"dapi[0-9a-f]{32}(?!\w)"),
    ("DigitalOcean Token", "_v1_", r"do[oprt]_v1_[0-9a-f]{64}"),
    ("Grafana Token", "glsa_", r"glsa_[A-Za-z0-9]{32}_[A-Fa-f0-9]{8}"),
    ("Grafana Token", "glc_", r"glc_[A-Za-z0-9+/]{40,400}"),
    ("Groq Key", "gsk_", r"gsk_[A-Za-z0-9]{52}(?!\w)"),
    ("NVIDIA Key", "nvapi-", r"nvapi-[\w-]{60,70}"),
    ("npm Token", "npm_", r"npm_[A-Za-z0-9]{36}(?!\w)"),
    ("Perplexity Key", "pplx-", r"pplx-[A-Za-z0-9]{48}(?!\w)"),
    ("Replicate Token", "r8_", r"r8_[A-Za-z0-9]{37}(?!\w)"),
    ("Slack App Token", "xapp-", r"xapp-\d-[A-Z0-9]+-\d+-[a-z0-9]+"),
    ("Vault Token", "hvs.", r"hvs\.[\w-]{90,120}"),
    ("W&B Key", "wandb_v1_", r"wandb_v1_\w{40,200}"),
    ("W&B Key", "wandb_api_key", r"WANDB_API_KEY[\"']?\s{0,4}[:=]\s{0,4}[\"']?(?:local-)?([0-9a-f]{40})(?!\w)"),
    # With the key itself: code that only looks for such a line has none.
    ("Private Key", "private key", (
        r"-----BEGIN[ A-Z0-9]{0,40}PRIVATE KEY(?: BLOCK)?-----(?:\\[nr]|[\s\"'+,\\]|[A-Za-z-]+: [^\n]{0,200}\n){1,40}?"
        r"([A-Za-z0-9+/=]{40})"
    )),
)  # fmt: skip


@dataclass(frozen=True)
class FoundToken:
    """A token in a file; its value is never kept."""

    name: str
    line: int
    kind: str
    is_code: bool
    """Whether the file is source code."""


@dataclass(frozen=True)
class TokenSearch:
    """The first token of each file that has one, the number of small files that were not read, and the bytes of the others."""

    found: tuple[FoundToken, ...]
    num_unread: int = 0
    num_bytes: int = 0


def find_tokens(source: Path, names: Iterable[str]) -> TokenSearch:
    """Return the first token of each small text file: keys of services, private keys and passwords in URLs.

    The smallest files come first, until 64 MiB were read.
    """
    sizes = sorted(
        (size, name) for name in names if 0 < (size := _get_size(source / name)) <= _MAX_FILE_BYTES
    )
    found, total, num_read = [], 0, 0
    for size, name in sizes:
        if total + size > _MAX_BYTES:
            break
        total += size
        num_read += 1
        text = _read_text(source / name)
        if token := _find_first(text):
            is_code = Path(name).suffix.lower() in CODE or text.startswith("#!")
            found.append(FoundToken(name, *token, is_code))
    found.sort(key=lambda token: token.name)
    return TokenSearch(tuple(found), len(sizes) - num_read, total)


def _get_size(path: Path) -> int:
    """Return the size of a regular file, and 0 for all others."""
    try:
        status = path.lstat()
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def _read_text(path: Path) -> str:
    """Return the text of a small file; an empty one if it is binary or cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            data = file.read(_MAX_FILE_BYTES)
    except OSError:
        return ""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16", "replace")
    return "" if b"\0" in data else data.decode("utf-8", "replace")


def _find_first(text: str) -> tuple[int, str] | None:
    """Return the line and the kind of the first token."""
    if not text:
        return None
    if any(len(line) > _MAX_WORD for line in text.split("\n")):
        text = _LONG_WORD.sub("", text)
    lower = text.lower()
    first: tuple[int, str] | None = None
    for detector in _load_detectors():
        if any(part in lower for part in detector.texts):
            matches = (match for pattern in detector.patterns for match in pattern.finditer(text))
            start = min((match.start() for match in matches if detector.check(match)), default=None)
            if start is not None and (first is None or start < first[0]):
                first = start, detector.kind
    return first and (text.count("\n", 0, first[0]) + 1, first[1])


@dataclass(frozen=True)
class _Detector:
    """A kind of tokens."""

    kind: str
    texts: tuple[str, ...]
    """In lower case; a token contains one of them. Searching for them is fast."""
    patterns: tuple[re.Pattern[str], ...]
    check: Callable[[re.Match[str]], bool]


@cache
def _load_detectors() -> tuple[_Detector, ...]:
    """Return the kinds of tokens.

    Only detectors of formats: those of entropy and of words flag notebooks, checksums and vocabularies. The scanner of
    detect-secrets is not used, since it sends what it finds to services to verify it; docs/design/secret-files.md.
    """
    # Slow, since it imports requests.
    from detect_secrets.plugins.aws import AWSKeyDetector  # noqa: PLC0415
    from detect_secrets.plugins.azure_storage_key import AzureStorageKeyDetector  # noqa: PLC0415
    from detect_secrets.plugins.basic_auth import BasicAuthDetector  # noqa: PLC0415
    from detect_secrets.plugins.github_token import GitHubTokenDetector  # noqa: PLC0415
    from detect_secrets.plugins.gitlab_token import GitLabTokenDetector  # noqa: PLC0415
    from detect_secrets.plugins.jwt import JwtTokenDetector  # noqa: PLC0415
    from detect_secrets.plugins.npm import NpmDetector  # noqa: PLC0415
    from detect_secrets.plugins.openai import OpenAIDetector  # noqa: PLC0415
    from detect_secrets.plugins.pypi_token import PypiTokenDetector  # noqa: PLC0415
    from detect_secrets.plugins.sendgrid import SendGridDetector  # noqa: PLC0415
    from detect_secrets.plugins.slack import SlackDetector  # noqa: PLC0415
    from detect_secrets.plugins.square_oauth import SquareOAuthDetector  # noqa: PLC0415
    from detect_secrets.plugins.stripe import StripeDetector  # noqa: PLC0415

    # Each with texts in lower case, of which a token contains one.
    detectors: tuple[tuple[RegexBasedDetector, tuple[str, ...]], ...] = (
        (AWSKeyDetector(), ("akia", "asia", "abia", "acca", "a3t", "aws")),
        (AzureStorageKeyDetector(), ("accountkey=",)),
        (BasicAuthDetector(), ("://",)),
        (GitHubTokenDetector(), ("ghp_", "gho_", "ghu_", "ghs_", "ghr_")),
        (GitLabTokenDetector(), ("glpat-", "gldt-", "glft-", "glsoat-", "glrt-", "gr1348941", "glcbt-", "glimt-", "glptt-", "glagent-", "gloas-")),
        (JwtTokenDetector(), ("eyj",)),
        (NpmDetector(), ("_authtoken=",)),
        (OpenAIDetector(), ("t3blbkfj",)),
        (PypiTokenDetector(), ("pypi-ag",)),
        (SendGridDetector(), ("sg.",)),
        (SlackDetector(), ("xox", "hooks.slack.com")),
        (SquareOAuthDetector(), ("sq0csp-",)),
        (StripeDetector(), ("k_live_",)),
    )  # fmt: skip

    def check(detector: RegexBasedDetector, match: re.Match[str]) -> bool:
        return _is_real(match) and any(detector.analyze_string(match[0]))  # that of JWT decodes it

    return (
        *(
            _Detector(detector.secret_type, texts, tuple(detector.denylist), partial(check, detector))
            for detector, texts in detectors
        ),
        *(_Detector(kind, (text,), (re.compile(pattern),), _is_real) for kind, text, pattern in _FORMATS),
    )


def _is_real(match: re.Match[str]) -> bool:
    """Return False for placeholders, as documentation has them, and for parts of longer words."""
    # The first group is a password or a key, or only the prefix of a token.
    value = match[1] if match.re.groups and len(match[1] or "") >= _MIN_PASSWORD else match[0]
    value = re.split(r"[\s\"']", value, maxsplit=1)[0]  # the expression of npm has no end
    if match[0].startswith("://") and value == match[0]:  # a short password
        return False
    before = match.string[max(0, match.start() - 2) : match.start()]
    is_part = match[0][0].isalnum() and before[-1:].isalnum() and not before.startswith("\\")
    return not is_part and not _PLACEHOLDER.search(unquote(value)) and len(set(value)) >= _MIN_CHARACTERS
