"""Files that hold credentials: by their names, and small text files by the tokens in them."""

from __future__ import annotations

import codecs
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import unquote

if TYPE_CHECKING:
    from detect_secrets.plugins.base import RegexBasedDetector

__all__ = [
    "CODE",
    "SECRET_NAMES",
    "FoundToken",
    "SecretName",
    "TokenSearch",
    "find_rows",
    "find_tokens",
    "is_secret_file",
    "is_secret_name",
    "names_secret",
]


class SecretName(NamedTuple):
    """Names of files that hold credentials."""

    pattern: str
    """In lower case, for the name of a file, or with folders before it; with `/` at the end for a folder and all of its files.

    `*`, `?`, `[...]` and `{a,b}` are as in a shell, `**/` is any number of folders, and `{key id}` is the number of a key of
    Google Cloud. `~` at the end makes it words: each `_` is a separator or nothing, and after them there may be the name of an
    environment (`_prod`) and an ending of text, not one of code: `secrets.py` is a module.
    """
    source: str
    """The program or service that has such files; or gitignore, gitleaks or gitrob, if it is in its rules."""
    example: str
    """A name that no other row matches."""
    content: str = ""
    """Expression of the text in such a file that holds credentials, for names that ordinary files have too."""


_GOOGLE = r'"(private_key|refresh_token|client_secret)"'
_SESSION = r"(?i)cookie|sessionid|csrf|(access|auth|id|refresh|session)_?token\b|password|authorization|(?<![\w-])[\w-]{32,}(?![\w-])"
"""Also a long word: a session of Telethon is one."""
# gitignore: the templates of github.com/github/gitignore (CC0). gitleaks: the rules for paths of github.com/gitleaks/gitleaks.
# gitrob: the signatures of github.com/michenriksen/gitrob. Others: the documentation of the program or service about its files.
SECRET_NAMES: Final = (
    # Environments and settings with keys
    SecretName(".env[._-]*", "gitignore", ".env.ci"),
    SecretName("*.env", "gitignore", ".env"),
    SecretName("*.env.{local,dev,development,test,staging,prod,production}", "dotenv", "app.env.local"),
    SecretName("env.{local,prod,production,staging,secret}", "dotenv", "env.production"),
    SecretName(".envrc", "direnv", ".envrc"),
    SecretName(".envrc.*", "direnv", ".envrc.local"),
    SecretName(".direnv/", "direnv", ".direnv/python/env"),
    SecretName(".flaskenv", "Flask", ".flaskenv"),
    SecretName(".renviron", "R", ".Renviron"),
    SecretName(".pam_environment", "pam_env", ".pam_environment"),
    SecretName("local.settings.json", "Azure Functions", "local.settings.json"),
    SecretName("connectionstrings.config", "ASP.NET", "connectionStrings.config"),
    SecretName("appsettings.{production,prod,local,secrets}.json", "ASP.NET", "appsettings.Production.json"),
    SecretName("http-client.private.env.json", "gitignore", "http-client.private.env.json"),
    SecretName("google-services.json", "gitignore", "google-services.json"),
    SecretName("googleservice-info.plist", "Firebase", "GoogleService-Info.plist"),
    SecretName("*.secret.exs", "gitignore", "config/prod.secret.exs"),
    SecretName("mongoid.yml", "gitrob", "mongoid.yml"),
    SecretName("secret_token.rb", "gitrob", "config/initializers/secret_token.rb"),
    SecretName("omniauth.rb", "gitrob", "config/initializers/omniauth.rb"),
    SecretName("carrierwave.rb", "gitrob", "config/initializers/carrierwave.rb"),
    SecretName("knife.rb", "gitrob", "knife.rb"),
    SecretName(".chef/", "gitrob", ".chef/config"),
    SecretName("salesforce.js", "gitrob", "salesforce.js"),
    SecretName("wp-config.php", "gitrob", "wp-config.php"),
    SecretName("localsettings.php", "gitrob", "LocalSettings.php"),
    SecretName("config.inc.php", "gitrob", "config.inc.php"),
    SecretName("settings.local.php", "Drupal", "settings.local.php"),
    SecretName("configuration.user.xpl", "gitrob", "configuration.user.xpl"),
    SecretName("ventrilo_srv.ini", "gitrob", "ventrilo_srv.ini"),
    SecretName(".secrets/", "act, tools of services", ".secrets/prod"),
    SecretName(".credentials/", "Google's samples", ".credentials/gmail.bin"),
    SecretName("secrets/*.{txt,json,yaml,yml,toml,ini,cfg,conf,xml,properties}", "Docker Compose", "secrets/prod.yaml"),
    SecretName("run/secrets/*", "Docker Compose", "run/secrets/db"),
    # Words for credentials, with the endings of text
    SecretName("access_key~", "AWS", "access_key.txt"),
    SecretName("access_keys~", "AWS", "accessKeys.json"),
    SecretName("access_token~", "OAuth", "accesstoken.json"),
    SecretName("admin_token~", "services", "admintoken.json"),
    SecretName("api_key~", "services", "API_KEY.txt"),
    SecretName("api_keys~", "services", "api_keys.json"),
    SecretName("api_secret~", "services", "apisecret.json"),
    SecretName("api_token~", "services", "apitoken.json"),
    SecretName("app_secret~", "services", "appsecret.txt"),
    SecretName("auth_token~", "OAuth", "authtoken.json"),
    SecretName("bearer_token~", "OAuth", "bearertoken.json"),
    SecretName("bot_token~", "Telegram, Discord", "bottoken.json"),
    SecretName("client_secret~", "OAuth", "clientsecret.yaml"),
    SecretName("client_secrets~", "OAuth", "clientsecrets.yaml"),
    SecretName("credential~", "gitrob", "credential.txt"),
    SecretName("credentials~", "gitrob", "credentials.xlsx"),
    SecretName("creds~", "services", "creds.json"),
    SecretName("deploy_token~", "GitLab", "deploytoken.json"),
    SecretName("encryption_key~", "services", "encryption_key.txt"),
    SecretName("github_token~", "GitHub", "githubtoken.json"),
    SecretName("gitlab_token~", "GitLab", "gitlabtoken.json"),
    SecretName("hf_token~", "Hugging Face", "hftoken.json"),
    SecretName("hub_token~", "Hugging Face, Docker", "hubtoken.json"),
    SecretName("huggingface_token~", "Hugging Face", "huggingfacetoken.json"),
    SecretName("kaggle_token~", "Kaggle", "kaggletoken.yaml"),
    SecretName("login_token~", "services", "logintoken.json"),
    SecretName("master_key~", "Rails", "master_key"),
    SecretName("mnemonic~", "wallets", "mnemonic.txt"),
    SecretName("npm_token~", "npm", "npmtoken.json"),
    SecretName("oauth_token~", "OAuth", "oauthtoken.json"),
    SecretName("openai_token~", "OpenAI", "openaitoken.json"),
    SecretName("passphrase~", "GnuPG", "passphrase.txt"),
    SecretName("passwd~", "gitrob", "passwd"),
    SecretName("password~", "gitrob", "password.txt"),
    SecretName("password_list~", "services", "password-list.txt"),
    SecretName("passwords~", "gitrob", "passwords.docx"),
    SecretName("personal_token~", "GitHub", "personaltoken.json"),
    SecretName("pgpass~", "PostgreSQL", "pgpass.conf"),
    SecretName("private_key~", "gitrob", "private_key.txt"),
    SecretName("private_keys~", "services", "private_keys.json"),
    SecretName("privkey~", "services", "privkey.txt"),
    SecretName("pypi_token~", "PyPI", "pypitoken.json"),
    SecretName("recovery_key~", "BitLocker", "recovery_key.txt"),
    SecretName("recovery_phrase~", "wallets", "recovery-phrase.txt"),
    SecretName("refresh_token~", "OAuth", "refreshtoken.json"),
    SecretName("registry_auth~", "Docker", "registry_auth.json"),
    SecretName("root_key~", "AWS", "rootkey.csv"),
    SecretName("root_token~", "Vault", "roottoken.json"),
    SecretName("sas_token~", "Azure", "sastoken.json"),
    SecretName("secret~", "gitrob", "secret.txt"),
    SecretName("secret_key~", "services", "secretkey.txt"),
    SecretName("secrets~", "gitrob", "secrets.toml"),
    SecretName("seed_phrase~", "wallets", "seed_phrase.txt"),
    SecretName("service_account~", "Google Cloud", "serviceAccount.yaml"),
    SecretName("service_account_key~", "Google Cloud", "serviceaccountkey.yaml"),
    SecretName("service_principal~", "Azure", "servicePrincipal.json"),
    SecretName("session_cookie~", "browsers", "session_cookie"),
    SecretName("session_token~", "AWS", "sessiontoken.json"),
    SecretName("signing_key~", "services", "signing_key.txt"),
    SecretName("slack_token~", "Slack", "slacktoken.json"),
    SecretName("ssh_key~", "ssh", "ssh-key.txt"),
    SecretName("ssh_keys~", "ssh", "ssh_keys.json"),
    SecretName("token~", "services", "token.json"),
    SecretName("*unseal[_-]key*", "Vault", "vault-unseal-keys.txt"),
    SecretName("user_token~", "Slack", "usertoken.json"),
    SecretName("vault_keys~", "Vault", "vault_keys.json"),
    SecretName("vault_init~", "Vault", "vault-init.json"),
    SecretName("vault_token~", "Vault", "vaulttoken.json"),
    SecretName("wandb_token~", "W&B", "wandbtoken.json"),
    SecretName("wifi_password~", "routers", "wifipassword.txt"),
    SecretName("read_token~", "Hugging Face", "readtoken.json"),
    SecretName("write_token~", "Hugging Face", "writetoken.json"),
    SecretName("anthropic_key~", "Anthropic", "anthropic_key.txt"),
    SecretName("aws_key~", "AWS", "aws_key.csv"),
    SecretName("aws_keys~", "AWS", "aws_keys.csv"),
    SecretName("aws_secrets~", "AWS", "awssecrets.json"),
    SecretName("azure_key~", "Azure", "azure_key.txt"),
    SecretName("cohere_key~", "Cohere", "cohere_key.txt"),
    SecretName("gcp_key~", "Google Cloud", "gcp_key.txt"),
    SecretName("gemini_key~", "Google", "gemini-key.txt"),
    SecretName("google_key~", "Google Cloud", "google_key.txt"),
    SecretName("hf_key~", "Hugging Face", "hf_key.txt"),
    SecretName("jwt_key~", "JSON Web Tokens", "jwt_key.txt"),
    SecretName("openai_key~", "OpenAI", "openai_key.txt"),
    SecretName("wandb_key~", "W&B", "wandb_key.txt"),
    SecretName("*_access_key~", "AWS", "admin_access_key.csv"),
    SecretName("*_access_keys~", "AWS", "admin_access_keys.json"),
    SecretName("*_account_key~", "Azure", "cosmos_account_key.txt"),
    SecretName("*_storage_key~", "Azure", "azure-storage-key.txt"),
    SecretName("*_api_key~", "services", "openai_api_key.txt"),
    SecretName("*_api_keys~", "services", "all-api-keys.json"),
    SecretName("*_credential~", "services", "db-credential.json"),
    SecretName("*_credentials~", "Google Cloud, AWS", "db_credentials.xlsx"),
    SecretName("*_creds~", "services", "db_creds.ini"),
    SecretName("*_passphrase~", "services", "gpg_passphrase.txt"),
    SecretName("*_password~", "services", "db_password.txt"),
    SecretName("*_passwords~", "browsers", "wifi_passwords.docx"),
    SecretName("*_passwd~", "services", "replica_passwd.txt"),
    SecretName("*_private_key~", "services", "jwt_private_key.json"),
    SecretName("*_secret~", "services", "stripe-secret.json"),
    SecretName("*_secret_key~", "services", "django_secret_key.txt"),
    SecretName("*_secrets~", "services", "prod_secrets.yaml"),
    SecretName("*_service_account~", "Google Cloud", "my-service-account.json"),
    SecretName("*_sessionid~", "browsers", "tiktok_sessionid"),
    SecretName("*_token~", "services", ".codecov_token"),
    SecretName("*credentials.{csv,json,txt,yaml,yml,ini,toml,xml,properties,cfg,conf}", "Google Cloud, AWS", "gcpcredentials.json"),
    SecretName("*passwords.{csv,json,txt,xlsx}", "browsers", "allpasswords.csv"),
    SecretName(".credentials_*", "GitHub Actions runner", ".credentials_rsaparams"),
    SecretName("*.pass", "services", "db.pass"),
    SecretName("token.pickle.*", "Google's samples", "token.pickle.json"),
    SecretName("*recovery[ _-]codes*.txt", "GitHub", "github-recovery-codes.txt"),
    SecretName("*backup[ _-]codes*.txt", "Google", "Backup-codes-me.txt"),
    SecretName("*backup[ _-]key*.txt", "Element, Authy", "element-backup-keys.txt"),
    SecretName("{2fa,*[_-]2fa}[._-]*", "services", "github-2fa.txt"),
    SecretName(".google_authenticator", "Google Authenticator", ".google_authenticator"),
    SecretName("totp*.{txt,json,csv}", "authenticators", "totp_seeds.txt"),
    SecretName("aegis*.json", "Aegis", "aegis-export-20260101.json", r'"(slots|entries)"'),
    SecretName("andotp*", "andOTP", "andOTP_accounts.json"),
    SecretName("wallet.dat", "Bitcoin", "wallet.dat"),
    SecretName("utc--*", "Ethereum", "keystore/UTC--2026-01-01T00-00-00.000Z--ab"),
    SecretName("*.wallet", "wallets", "my.wallet"),
    SecretName(".solana/", "Solana", ".solana/id.json"),
    # Keys and certificates
    SecretName("*.pem", "gitrob", "server.pem"),
    SecretName("*.key", "OpenSSL", "server.key"),
    SecretName("*.priv", "services", "server.priv"),
    SecretName("*.privkey", "services", "server.privkey"),
    SecretName("*.prv", "services", "server.prv"),
    SecretName("*.p12", "gitleaks", "server.p12"),
    SecretName("*.pfx", "gitleaks", "server.pfx"),
    SecretName("*.pkcs12", "gitrob", "server.pkcs12"),
    SecretName("*.pkcs8", "OpenSSL", "server.pkcs8"),
    SecretName("*.p8", "Apple", "AuthKey_1.p8"),
    SecretName("*.pvk", "Windows", "code.pvk"),
    SecretName("*.snk", ".NET", "assembly.snk"),
    SecretName("*.ppk", "PuTTY", "putty.ppk"),
    SecretName("*.jks", "gitignore", "release.jks"),
    SecretName("*.jceks", "Java", "store.jceks"),
    SecretName("*.bks", "Android", "trust.bks"),
    SecretName("*.keystore", "gitignore", "debug.keystore"),
    SecretName("*.truststore", "Java", "cluster.truststore"),
    SecretName("*.sso", "Oracle", "cwallet.sso"),
    SecretName("*.jwk", "JSON Web Keys", "signing.jwk"),
    SecretName("*.jwks", "JSON Web Keys", "signing.jwks"),
    SecretName("*.jwt", "JSON Web Tokens", "me.jwt"),
    SecretName("*.keytab", "Kerberos", "user.keytab"),
    SecretName("*.mobileprovision", "Xcode", "app.mobileprovision"),
    SecretName("*.provisionprofile", "Xcode", "app.provisionprofile"),
    SecretName("*.cscfg", "gitrob", "service.cscfg"),
    SecretName("*.bek", "gitrob", "disk.bek"),
    SecretName("*.fve", "gitrob", "disk.fve"),
    SecretName("*.ovpn", "gitrob", "office.ovpn"),
    SecretName("*.tblk", "gitrob", "vpn.tblk"),
    SecretName("wg[0-9].conf", "WireGuard", "wg0.conf"),
    SecretName("wpa_supplicant*.conf", "wpa_supplicant", "wpa_supplicant.conf"),
    SecretName("*.rdp", "gitrob", "host.rdp"),
    SecretName("*.vncpass", "VNC", "host.vncpass"),
    SecretName("keystore", "gitrob", "keystore"),
    SecretName("keyring", "gitrob", "keyring"),
    SecretName("krb5cc_*", "Kerberos", "krb5cc_0"),
    SecretName("keyfile.json", "Google Cloud", "keyfile.json"),
    SecretName("*serviceaccountkey*.json", "Firebase", "prod-serviceAccountKey-2.json"),
    # ssh
    SecretName(".ssh/", "ssh", ".ssh/config"),
    SecretName("id_rsa*", "gitrob", "id_rsa.pub"),
    SecretName("id_dsa*", "gitrob", "id_dsa.pub"),
    SecretName("id_ecdsa*", "gitrob", "id_ecdsa_sk"),
    SecretName("id_ed25519*", "gitrob", "id_ed25519_work"),
    SecretName("*_rsa", "gitrob", "github_rsa"),
    SecretName("*_dsa", "gitrob", "backup_dsa"),
    SecretName("*_ecdsa", "gitrob", "backup_ecdsa"),
    SecretName("*_ed25519", "gitrob", "backup_ed25519"),
    SecretName("ssh_host_*_key", "ssh", "ssh_host_rsa_key"),
    SecretName("*deploy[_-]key*", "GitHub", "my-deploy-key-2"),
    SecretName("*-keypair*", "AWS", "ec2-keypair"),
    SecretName("ssh-agent.sock", "ssh", "ssh-agent.sock"),
    SecretName(".shosts", "ssh", ".shosts"),
    SecretName(".rhosts", "rsh", ".rhosts"),
    # GnuPG, age, sops, and encrypted files
    SecretName(".gnupg/", "GnuPG", ".gnupg/pubring.kbx"),
    SecretName("private-keys-v1.d/", "GnuPG", "private-keys-v1.d/ab.bin"),
    SecretName("secring.*", "GnuPG", "secring.kbx"),
    SecretName("*private*.asc", "gitrob", "private.asc"),
    SecretName("*secret*.asc", "GnuPG", "secrets-export.asc"),
    SecretName("*[_-]key.asc", "GnuPG", "gpg-key.asc"),
    SecretName("*.gpg", "GnuPG", "backup.tar.gz.gpg"),
    SecretName("*.pgp", "GnuPG", "backup.pgp"),
    SecretName("*.age", "age", "backup.age"),
    SecretName("*.agekey", "age", "keys.agekey"),
    SecretName("age[_-]{key,keys}", "age", "age-keys"),
    SecretName("age[_-]key*.{txt,key,bin}", "age", "age-key-prod.txt"),
    SecretName("sops/age/keys.txt", "sops", "sops/age/keys.txt"),
    SecretName("*.sops.{yaml,yml,json,ini,env}", "sops", "values.sops.yaml"),
    SecretName("*.enc.{yaml,yml,json,env,ini}", "sops", "values.enc.yaml"),
    SecretName("*.{yaml,yml,json,txt,tar,tgz,gz,zip,pem,toml,ini,cfg}.enc", "OpenSSL, Travis CI", "deploy.tar.enc"),
    SecretName("*.{yaml,yml,json,txt,tar,tgz,gz,zip,toml,ini,cfg}.aes", "AES Crypt", "archive.zip.aes"),
    SecretName("*.vault", "Ansible", "config.vault"),
    SecretName("*.luks", "LUKS", "header.luks"),
    SecretName("{keys,key,keystore,certs,tokens,cookies,ssh,gpg,env,dotenv,vault}.{zip,7z,rar,tar,tgz,tar.gz,tar.xz,tar.bz2,tar.zst}", "archives of these", "keys.tar.gz"),
    SecretName("{keys,key,tokens,cookies,env,dotenv,vault,config,backup}.enc", "archives of these", "keys.enc"),
    SecretName("*[_-]{key,keys}.enc", "Travis CI", "travis_key.enc"),
    SecretName("git-crypt-key", "git-crypt", "git-crypt-key"),
    SecretName(".git-crypt/", "git-crypt", ".git-crypt/keys/default/0/a"),
    SecretName(".transcrypt", "transcrypt", ".transcrypt"),
    SecretName(".blackbox/", "BlackBox", ".blackbox/pubring"),
    # Password managers
    SecretName(".password-store/", "pass", ".password-store/a.txt"),
    SecretName(".local/share/keyrings/", "GNOME", ".local/share/keyrings/login.bin"),
    SecretName("kdbx", "gitrob", "kdbx"),
    SecretName("*.kdb", "gitrob", "mine.kdb"),
    SecretName("*.kdbx", "gitrob", "mine.kdbx"),
    SecretName("*.psafe3", "gitrob", "my.psafe3"),
    SecretName("*.pwsafe", "Password Safe", "my.pwsafe"),
    SecretName("*.agilekeychain", "1Password", "my.agilekeychain"),
    SecretName("*.opvault", "1Password", "my.opvault"),
    SecretName("*.1pif", "1Password", "data.1pif"),
    SecretName("*.1pux", "1Password", "export.1pux"),
    SecretName("*.keychain", "gitrob", "login.keychain"),
    SecretName("*.keychain-db", "macOS", "login.keychain-db"),
    SecretName("*.kwallet", "gitrob", "my.kwallet"),
    SecretName("*.kwl", "KWallet", "kdewallet.kwl"),
    SecretName("*.enpassdb", "Enpass", "my.enpassdb"),
    SecretName("*.enpassdbsync", "Enpass", "my.enpassdbsync"),
    SecretName("*.bitwarden", "Bitwarden", "my.bitwarden"),
    SecretName("bitwarden*.{json,csv}", "Bitwarden", "bitwarden_export_20260101.json"),
    SecretName("1password*.{csv,txt,json}", "1Password", "1Password-export.csv"),
    SecretName("lastpass*.{csv,txt}", "LastPass", "lastpass_export.csv"),
    SecretName("keepass*.{xml,csv,html}", "KeePass", "keepass-export.xml"),
    SecretName("dashlane*.{csv,json}", "Dashlane", "dashlane-export.csv"),
    SecretName(".config/op/", "1Password", ".config/op/config"),
    SecretName(".op/", "1Password", ".op/config"),
    SecretName(".config/bitwarden cli/", "Bitwarden", ".config/Bitwarden CLI/data.json"),
    SecretName(".lastpass/", "LastPass", ".lastpass/key"),
    SecretName(".lpass/", "LastPass", ".lpass/key"),
    SecretName(".pki/", "NSS", ".pki/nssdb/pkcs11.txt"),
    # Browsers: passwords and session cookies
    SecretName(".mozilla/", "gitrob", ".mozilla/firefox/profiles.ini"),
    SecretName(".config/{google-chrome,chromium,bravesoftware,microsoft-edge,vivaldi,opera}/", "Chromium", ".config/google-chrome/Default/Preferences"),
    SecretName("login data", "Chromium", "Default/Login Data"),
    SecretName("login data for account", "Chromium", "Login Data For Account"),
    SecretName("web data", "Chromium", "Default/Web Data"),
    SecretName("local state", "Chromium", "Local State"),
    SecretName("logins.json", "Firefox", "logins.json"),
    SecretName("key[34].db", "Firefox", "key4.db"),
    SecretName("cert[89].db", "Firefox", "cert9.db"),
    SecretName("signons.sqlite", "gitrob", "signons.sqlite"),
    SecretName("sessionstore*.jsonlz4", "Firefox", "sessionstore-backups/sessionstore.jsonlz4"),
    SecretName("cookie", "browsers", "cookie"),
    SecretName("cookies", "Chromium", "Default/Cookies"),
    SecretName("cookies-journal", "Chromium", "Cookies-journal"),
    SecretName("*cookie.{txt,json,pkl,pickle,dat,jar,db,sqlite,lwp,yaml,yml}", "browsers, requests", "twitter_cookie.txt"),
    SecretName("*cookies.{txt,json,pkl,pickle,dat,jar,db,sqlite,lwp,yaml,yml,binarycookies}", "browsers, yt-dlp", "www.youtube.com_cookies.txt"),
    SecretName("cookies[._-]*.{txt,json,pkl,sqlite}", "browsers", "cookies-github-com.txt"),
    SecretName("*cookie[_-]jar", "curl", ".cookie_jar"),
    SecretName("*cookie[_-]jar.*", "curl", "my-cookie-jar.bin"),
    SecretName("*cookiejar", "curl", "cookiejar"),
    SecretName("cookiejar.*", "curl", "cookiejar.lwp"),
    SecretName("*.cookie", "curl", "site.cookie"),
    SecretName("*.cookies", "curl", "site.cookies"),
    SecretName(".pulse-cookie", "PulseAudio", ".pulse-cookie"),
    SecretName(".gitcookies", "git", ".gitcookies"),
    SecretName("*.session", "Telethon, Pyrogram", "bot.session"),
    SecretName("*.session-journal", "Telethon", "bot.session-journal"),
    SecretName("session.{pkl,pickle}", "requests", "session.pkl"),
    SecretName("{session,sessions}.json", "requests", "session.json", _SESSION),
    SecretName("session.txt", "requests", "session.txt", _SESSION),
    SecretName("{browser,chrome,discord,facebook,google,instagram,linkedin,login,reddit,selenium,telegram,tiktok,twitter,web,whatsapp,youtube}[_-]session*.{json,txt,pkl,pickle}", "requests", "instagram_session.json"),
    SecretName("sessions.{pkl,pickle}", "requests", "sessions.pkl"),
    SecretName("sessionid", "browsers", "sessionid"),
    SecretName("sessionid.txt", "browsers", "sessionid.txt"),
    SecretName("storage[_-]state.json", "Playwright", "storage_state.json"),
    SecretName("storagestate.json", "Playwright", "storageState.json"),
    SecretName(".auth/", "Playwright", "playwright/.auth/user.json"),
    SecretName(".xauthority", "X11", ".Xauthority"),
    SecretName(".iceauthority", "X11", ".ICEauthority"),
    SecretName(".vnc/", "VNC", ".vnc/xstartup"),
    # Mail and chat
    SecretName(".muttrc", "gitrob", ".muttrc"),
    SecretName(".mutt/", "Mutt", ".mutt/accounts"),
    SecretName(".msmtprc", "Mutt", ".msmtprc"),
    SecretName(".mailrc", "mail", ".mailrc"),
    SecretName(".mbsyncrc", "isync", ".mbsyncrc"),
    SecretName(".offlineimaprc", "OfflineIMAP", ".offlineimaprc"),
    SecretName(".fetchmailrc", "fetchmail", ".fetchmailrc"),
    SecretName(".getmailrc", "getmail", ".getmailrc"),
    SecretName(".esmtprc", "esmtp", ".esmtprc"),
    SecretName(".authinfo", "Emacs", ".authinfo"),
    SecretName(".irssi/", "gitrob", ".irssi/config"),
    SecretName(".weechat/", "WeeChat", ".weechat/irc.conf"),
    SecretName(".purple/", "gitrob", ".purple/accounts.xml"),
    SecretName(".recon-ng/", "gitrob", ".recon-ng/keys.bin"),
    SecretName(".twurlrc", "Twitter", ".twurlrc"),
    SecretName(".slack/", "Slack CLI", ".slack/config.json"),
    # Logins of programs that transfer files
    SecretName(".netrc*", "curl", ".netrc-work"),
    SecretName("_netrc*", "curl", "_netrc"),
    SecretName("netrc*", "curl", "netrc"),
    SecretName("*.netrc", "curl", "my.netrc"),
    SecretName(".curlrc", "curl", ".curlrc"),
    SecretName(".wgetrc", "wget", ".wgetrc"),
    SecretName(".smbcredentials", "Samba", ".smbcredentials"),
    SecretName(".smb/", "Samba", ".smb/smb.conf"),
    SecretName(".ftpconfig", "gitrob", ".ftpconfig"),
    SecretName(".ftppass", "grunt-ftp", ".ftppass"),
    SecretName(".remote-sync.json", "gitrob", ".remote-sync.json"),
    SecretName("sftp-config.json", "gitrob", "sftp-config.json"),
    SecretName("sftp-config-alt*.json", "Sublime Text", "sftp-config-alt.json"),
    SecretName("sftp.json", "VS Code", ".vscode/sftp.json"),
    SecretName(".sftp.json", "VS Code", ".sftp.json"),
    SecretName("deployment-config.json", "Atom", "deployment-config.json", r'(?i)"(password|passphrase|privatekey)"'),
    SecretName("webservers.xml", "JetBrains", ".idea/WebServers.xml"),
    SecretName("filezilla.xml", "gitrob", "filezilla.xml"),
    SecretName("recentservers.xml", "gitrob", "recentservers.xml"),
    SecretName("sitemanager.xml", "FileZilla", "sitemanager.xml"),
    SecretName("winscp.ini", "WinSCP", "WinSCP.ini"),
    SecretName("proftpdpasswd", "gitrob", "proftpdpasswd"),
    SecretName(".htpasswd*", "gitrob", ".htpasswd-users"),
    SecretName("htpasswd*", "gitrob", "htpasswd"),
    SecretName("*.htpasswd", "nginx", "users.htpasswd"),
    SecretName("*[_-]htpasswd", "nginx", "nginx_htpasswd"),
    SecretName("*htdigest", "Apache", ".htdigest"),
    SecretName("shadow", "gitrob", "etc/shadow"),
    SecretName("gshadow", "Linux", "etc/gshadow"),
    SecretName(".davfs2/", "davfs2", ".davfs2/davfs2.conf"),
    SecretName(".rclone.conf", "rclone", ".rclone.conf"),
    SecretName("rclone.conf", "rclone", "rclone.conf"),
    SecretName(".config/rclone/", "rclone", ".config/rclone/remotes"),
    SecretName(".tsh/", "Teleport", ".tsh/current-profile"),
    SecretName(".cloudflared/", "Cloudflare", ".cloudflared/cert.bin"),
    SecretName(".ngrok2/", "ngrok", ".ngrok2/config"),
    SecretName("ngrok.yml", "ngrok", "ngrok.yml"),
    SecretName(".config/ngrok/", "ngrok", ".config/ngrok/settings"),
    # git and code hosts, CI
    SecretName(".gitcredentials", "git", ".gitcredentials"),
    SecretName(".gitconfig", "gitrob", ".gitconfig"),
    SecretName(".config/git/", "git", ".config/git/config"),
    SecretName(".config/hub", "hub", ".config/hub"),
    SecretName(".config/gh/", "GitHub CLI", ".config/gh/config.yml"),
    SecretName(".config/glab-cli/", "GitLab CLI", ".config/glab-cli/config.yml"),
    SecretName(".config/github-copilot/", "GitHub Copilot", ".config/github-copilot/apps.json"),
    SecretName(".config/tea/", "Gitea", ".config/tea/config.yml"),
    SecretName(".gitlab-runner/", "GitLab Runner", ".gitlab-runner/config.toml"),
    SecretName(".subversion/", "Subversion", ".subversion/auth/svn.simple/a"),
    SecretName(".p4tickets", "Perforce", ".p4tickets"),
    SecretName(".cvspass", "CVS", ".cvspass"),
    SecretName(".circleci/cli.yml", "CircleCI", ".circleci/cli.yml"),
    SecretName(".travis/config.yml", "Travis CI", ".travis/config.yml"),
    SecretName("buildkite-agent.cfg", "Buildkite", "buildkite-agent.cfg"),
    SecretName("jenkins.plugins.publish_over_ssh.*.xml", "gitrob", "jenkins.plugins.publish_over_ssh.BapSshPublisherPlugin.xml"),
    SecretName(".sentryclirc", "Sentry", ".sentryclirc"),
    SecretName(".snyk/", "Snyk", ".snyk/config"),
    SecretName(".config/configstore/", "npm's configstore", ".config/configstore/snyk.json"),
    SecretName("gha-creds-*.json", "google-github-actions", "gha-creds-1a2b.json"),
    SecretName(".runner", "GitHub Actions runner", ".runner"),
    # Package managers
    SecretName(".npmrc", "npm", ".npmrc"),
    SecretName(".yarnrc.local", "Yarn", ".yarnrc.local"),
    SecretName(".pypirc", "PyPI", ".pypirc"),
    SecretName(".pip/", "pip", ".pip/pip.conf"),
    SecretName(".config/pip/", "pip", ".config/pip/pip.conf"),
    SecretName(".config/pypoetry/", "Poetry", ".config/pypoetry/config.toml"),
    SecretName(".config/uv/", "uv", ".config/uv/uv.toml"),
    SecretName(".local/share/uv/credentials/", "uv", ".local/share/uv/credentials/a"),
    SecretName(".condarc", "conda", ".condarc"),
    SecretName(".mambarc", "mamba", ".mambarc"),
    SecretName(".continuum/", "Anaconda", ".continuum/tokens/a.bin"),
    SecretName(".bundle/config", "Bundler", ".bundle/config"),
    SecretName(".cargo/credentials*", "Cargo", ".cargo/credentials.lock"),
    SecretName(".m2/settings*.xml", "Maven", ".m2/settings.xml"),
    SecretName("settings-security.xml", "Maven", "settings-security.xml"),
    SecretName(".gradle/gradle.properties", "Gradle", ".gradle/gradle.properties"),
    SecretName(".sbt/", "sbt", ".sbt/1.0/global"),
    SecretName(".ivy2/", "Ivy", ".ivy2/settings"),
    SecretName(".composer/", "Composer", ".composer/config.json"),
    SecretName("auth.json", "Composer, Docker, Codex", "auth.json"),
    SecretName(".hex/", "Hex", ".hex/hex.config"),
    SecretName(".pub-cache/", "Dart", ".pub-cache/hosted"),
    SecretName(".httr-oauth", "gitignore", ".httr-oauth"),
    # Containers and clusters
    SecretName(".docker/", "Docker", ".docker/config.json"),
    SecretName(".dockercfg", "Docker", ".dockercfg"),
    SecretName(".dockerconfigjson", "Kubernetes", ".dockerconfigjson"),
    SecretName("dockerconfig*.json", "Kubernetes", "dockerconfig.json"),
    SecretName("docker-config*.json", "Kubernetes", "docker-config.json"),
    SecretName("regcred*", "Kubernetes", "regcred.yaml"),
    SecretName("*pull[_-]secret*.{yaml,yml,json}", "OpenShift", "image-pull-secret-prod-eu.yaml"),
    SecretName(".config/containers/", "Podman", ".config/containers/registries.conf"),
    SecretName(".singularity/", "Singularity", ".singularity/docker-config"),
    SecretName(".apptainer/", "Apptainer", ".apptainer/remote.yaml"),
    SecretName(".enroot/", "enroot", ".enroot/config"),
    SecretName(".kube/", "Kubernetes", ".kube/config"),
    SecretName("kubeconfig", "Kubernetes", "kubeconfig"),
    SecretName("kubeconfig[._-]*", "Kubernetes", "kubeconfig.yaml"),
    SecretName("*.kubeconfig", "Kubernetes", "prod.kubeconfig"),
    SecretName("*[_-]kubeconfig*", "Kubernetes", "my-kubeconfig.yaml"),
    SecretName("*.kubeconfig.{yaml,yml,json}", "Kubernetes", "eks.kubeconfig.yaml"),
    SecretName("kube[_-]config*", "RKE", "kube_config.yaml"),
    SecretName("admin.conf", "kubeadm", "admin.conf"),
    SecretName("kubelet.conf", "kubeadm", "kubelet.conf"),
    SecretName("super-admin.conf", "kubeadm", "super-admin.conf"),
    SecretName("k3s.yaml", "K3s", "k3s.yaml"),
    SecretName("rke2.yaml", "RKE2", "rke2.yaml"),
    SecretName("*.rkestate", "RKE", "cluster.rkestate"),
    SecretName("bootstrap[_-]token*", "kubeadm", "bootstrap-tokens.yaml"),
    SecretName("sealed[_-]secrets[_-]key*", "Sealed Secrets", "sealed-secrets-key.yaml"),
    SecretName("talosconfig", "Talos", "talosconfig"),
    SecretName(".talos/", "Talos", ".talos/config"),
    SecretName(".minikube/", "minikube", ".minikube/client.crt"),
    SecretName(".config/helm/", "Helm", ".config/helm/repositories.yaml"),
    SecretName(".config/argocd/", "Argo CD", ".config/argocd/config"),
    SecretName(".argocd/", "Argo CD", ".argocd/config"),
    SecretName(".vault/", "Vault", ".vault/config"),
    SecretName("vault.{yml,yaml,json}", "Ansible", "group_vars/all/vault.yml"),
    SecretName("*[._-]vault.{yml,yaml}", "Ansible", "prod.vault.yml"),
    SecretName("vault[_-]{prod,production,staging,dev,test}.{yml,yaml}", "Ansible", "vault_prod.yml"),
    SecretName("*vault[_-]pass*", "Ansible", ".vault_pass.txt"),
    SecretName("*vault[_-]pass*.sh", "Ansible", ".vault_pass.sh"),
    SecretName(".vaultpass*", "Ansible", ".vaultpass"),
    SecretName("*ansible[_-]vault*", "Ansible", ".ansible_vault_key"),
    SecretName(".ansible/", "Ansible", ".ansible/galaxy.yml"),
    # Clouds
    SecretName(".aws/", "AWS", ".aws/config"),
    SecretName("*accesskeys.csv", "AWS", "rootAccessKeys.csv"),
    SecretName("awscreds*", "AWS", "awscreds-old.bin"),
    SecretName("aws[_-]credentials*", "AWS", "aws_credentials_file"),
    SecretName(".ec2/", "AWS", ".ec2/cert"),
    SecretName(".s3cfg", "s3cmd", ".s3cfg"),
    SecretName("s3cfg", "s3cmd", "s3cfg"),
    SecretName(".s3curl", "s3curl", ".s3curl"),
    SecretName(".passwd-s3fs", "s3fs", ".passwd-s3fs"),
    SecretName("passwd-s3fs", "s3fs", "passwd-s3fs"),
    SecretName(".boto", "Boto", ".boto"),
    SecretName(".boto.cfg", "gsutil", ".boto.cfg"),
    SecretName("boto.cfg", "Boto", "boto.cfg"),
    SecretName(".azure/", "Azure", ".azure/config"),
    SecretName("accesstokens.json", "Azure", "accessTokens.json"),
    SecretName("azureprofile.json", "Azure", "azureProfile.json"),
    SecretName("azurermcontext.json", "Azure", "AzureRmContext.json"),
    SecretName("tokencache.dat", "Azure", "TokenCache.dat"),
    SecretName("token[_-]cache*", "Azure, Databricks", "token-cache.json"),
    SecretName("msal_token_cache*", "Azure", "msal_token_cache.bin"),
    SecretName("service_principal_entries*", "Azure", "service_principal_entries.bin"),
    SecretName("azureauth*", "Azure ML", "azureauth.json"),
    SecretName("*.azureauth", "Azure", "my.azureauth"),
    SecretName("*.publishsettings", "gitrob", "prod.publishsettings"),
    SecretName(".config/gcloud/", "Google Cloud", ".config/gcloud/configurations/config_default"),
    SecretName(".gcloud/", "Google Cloud", ".gcloud/key"),
    SecretName(".gsutil/", "Google Cloud", ".gsutil/tracker"),
    SecretName("legacy_credentials/", "Google Cloud", "legacy_credentials/a/settings"),
    SecretName("access_tokens.db", "Google Cloud", "access_tokens.db"),
    SecretName("adc.json", "Google Cloud", "adc.json"),
    SecretName("client_secret[_-]*.json", "Google", "client_secret_123-abc.apps.googleusercontent.com.json"),
    SecretName("client-secret[_-]*.json", "Google", "client-secret-web.json"),
    SecretName("service[_-]account[_-]*.json", "Google Cloud", "service-account-file.json"),
    SecretName("*[_-]service[_-]account[_-]*.json", "Google Cloud", "ml-service-account-eu.json"),
    SecretName("*firebase*adminsdk*.json", "Firebase", "project-firebase-adminsdk-x1-2.json"),
    SecretName("firebase[_-]{key,keys}.json", "Firebase", "firebase-key.json"),
    SecretName("gcp[_-]*{key,keys}.json", "Google Cloud", "gcp_service_key.json"),
    SecretName("gcloud[_-]*{key,keys}.json", "Google Cloud", "gcloud-service-key.json"),
    SecretName("{gcs,gke,gcr,bigquery,bq,vertex,ga,google,google-cloud}[_-]*{key,keys}.json", "Google Cloud", "bigquery-key.json"),
    SecretName("gcp[_-]{sa,auth}.json", "Google Cloud", "gcp-auth.json"),
    SecretName("sa[_-]{key,keys}.json", "Google Cloud", "sa-key.json"),
    SecretName("sa.json", "Google Cloud", "sa.json"),
    SecretName("*[_-]sa.json", "Google Cloud", "trainer-sa.json", _GOOGLE),
    SecretName("*[_-]sa[_-]{key,keys}.json", "Google Cloud", "trainer-sa-key.json"),
    SecretName("*gserviceaccount.com*", "Google Cloud", "trainer@project.iam.gserviceaccount.com.json"),
    SecretName("*-{key id}.json", "Google Cloud", "trainer-my-project-0a1b2c3d4e5f.json", _GOOGLE),
    SecretName(".aliyun/", "Alibaba Cloud", ".aliyun/config.json"),
    SecretName(".ossutilconfig", "Alibaba Cloud", ".ossutilconfig"),
    SecretName(".tccli/", "Tencent Cloud", ".tccli/default.configure"),
    SecretName(".cos.conf", "Tencent Cloud", ".cos.conf"),
    SecretName(".hcloud/", "Huawei Cloud", ".hcloud/config.json"),
    SecretName(".obsutilconfig", "Huawei Cloud", ".obsutilconfig"),
    SecretName(".bluemix/", "IBM Cloud", ".bluemix/config.json"),
    SecretName(".ibmcloud/", "IBM Cloud", ".ibmcloud/config.json"),
    SecretName("cos_credentials*", "IBM Cloud", "cos_credentials_new.bin"),
    SecretName(".oci/", "Oracle Cloud", ".oci/config"),
    SecretName(".config/yandex-cloud/", "Yandex Cloud", ".config/yandex-cloud/config.yaml"),
    SecretName(".config/doctl/", "DigitalOcean", ".config/doctl/config.yaml"),
    SecretName(".config/hcloud/", "Hetzner", ".config/hcloud/cli.toml"),
    SecretName(".config/scw/", "Scaleway", ".config/scw/config.yaml"),
    SecretName(".config/linode-cli", "Linode", ".config/linode-cli"),
    SecretName(".config/exoscale/", "Exoscale", ".config/exoscale/exoscale.toml"),
    SecretName(".vultr-cli.yaml", "Vultr", ".vultr-cli.yaml"),
    SecretName(".civo.json", "Civo", ".civo.json"),
    SecretName(".tugboat", "DigitalOcean", ".tugboat"),
    SecretName(".edgerc", "Akamai", ".edgerc"),
    SecretName(".ovh.conf", "OVH", ".ovh.conf"),
    SecretName("ovh.conf", "OVH", "ovh.conf"),
    SecretName("*openrc", "OpenStack", "project-openrc"),
    SecretName("*openrc.sh", "OpenStack", "project-openrc.sh"),
    SecretName("clouds.{yaml,yml}", "OpenStack", "clouds.yaml", r"\b(auth|auth_url|password|application_credential_secret)[\"']?\s*:"),
    SecretName("secure.{yaml,yml}", "OpenStack", "secure.yaml"),
    SecretName(".mc/", "MinIO", ".mc/config.json"),
    SecretName(".mcli/", "MinIO", ".mcli/config.json"),
    SecretName(".b2_account_info", "Backblaze", ".b2_account_info"),
    SecretName(".config/b2/", "Backblaze", ".config/b2/account_info"),
    SecretName(".fly/", "Fly.io", ".fly/config.yml"),
    SecretName(".heroku/", "Heroku", ".heroku/config"),
    SecretName(".netlify/", "Netlify", ".netlify/config.json"),
    SecretName(".config/netlify/", "Netlify", ".config/netlify/config.json"),
    SecretName(".vercel/", "Vercel", ".vercel/project.json"),
    SecretName(".wrangler/", "Cloudflare", ".wrangler/config/default.toml"),
    SecretName(".dev.vars*", "Cloudflare", ".dev.vars.local"),
    SecretName(".config/stripe/", "Stripe", ".config/stripe/config.toml"),
    SecretName(".serverlessrc", "Serverless", ".serverlessrc"),
    SecretName(".pulumi/", "Pulumi", ".pulumi/workspaces.json"),
    SecretName(".terraform/", "gitignore", ".terraform/modules/modules.json"),
    SecretName(".terraform.d/", "Terraform", ".terraform.d/checkpoint_cache"),
    SecretName("*.tfstate", "gitignore", "prod.tfstate"),
    SecretName("*.tfstate.*", "gitignore", ".terraform.tfstate.lock.info"),
    SecretName("*.tfvars", "gitignore", "prod.auto.tfvars"),
    SecretName("*.tfvars.json", "gitignore", "prod.tfvars.json"),
    SecretName("*.tfplan", "gitignore", "plan.tfplan"),
    SecretName(".terraformrc", "gitignore", ".terraformrc"),
    SecretName("terraform.rc", "gitignore", "terraform.rc"),
    SecretName("*.tfrc.json", "Terraform", "credentials.tfrc.json"),
    SecretName("*.tfrc", "Terraform", "dev.tfrc"),
    # Services of machine learning
    SecretName(".huggingface/", "Hugging Face", ".huggingface/config"),
    SecretName(".cache/huggingface/", "Hugging Face", ".cache/huggingface/version.txt"),
    SecretName("stored_tokens", "Hugging Face", "huggingface/stored_tokens"),
    SecretName(".kaggle/", "Kaggle", ".kaggle/config"),
    SecretName("kaggle.json", "Kaggle", "kaggle.json"),
    SecretName("kaggle?*.json", "Kaggle", "kaggle-me.json", r'"key"\s*:\s*"[0-9a-f]{32}"|KGAT_'),
    SecretName(".wandb/", "W&B", ".wandb/settings"),
    SecretName(".config/wandb/", "W&B", ".config/wandb/settings"),
    SecretName(".comet.config", "Comet", ".comet.config"),
    SecretName(".neptune/", "Neptune", ".neptune/config"),
    SecretName(".clearml.conf", "ClearML", ".clearml.conf"),
    SecretName("clearml.conf", "ClearML", "clearml.conf"),
    SecretName("trains.conf", "ClearML", "trains.conf"),
    SecretName(".mlflow/", "MLflow", ".mlflow/config"),
    SecretName(".determined/", "Determined", ".determined/config"),
    SecretName(".grid/", "Lightning", ".grid/config.json"),
    SecretName(".prefect/", "Prefect", ".prefect/profiles.toml"),
    SecretName(".dbt/", "dbt", ".dbt/profiles.yml"),
    SecretName(".modal.toml", "Modal", ".modal.toml"),
    SecretName(".beam/", "Beam", ".beam/config.ini"),
    SecretName(".cerebrium/", "Cerebrium", ".cerebrium/config.yaml"),
    SecretName(".trussrc", "Baseten", ".trussrc"),
    SecretName(".bentoml/", "BentoML", ".bentoml/.yatai.yaml"),
    SecretName(".runpod/", "RunPod", ".runpod/config.toml"),
    SecretName(".vast_api_key.*", "Vast.ai", ".vast_api_key.new"),
    SecretName(".config/vastai/", "Vast.ai", ".config/vastai/vast"),
    SecretName(".lambda_cloud/", "Lambda", ".lambda_cloud/lambda_keys"),
    SecretName(".fluidstack/", "FluidStack", ".fluidstack/config"),
    SecretName(".paperspace/", "Paperspace", ".paperspace/config.json"),
    SecretName(".together/", "Together", ".together/config"),
    SecretName(".config/replicate/", "Replicate", ".config/replicate/hosts"),
    SecretName(".sky/", "SkyPilot", ".sky/config.yaml"),
    SecretName(".dstack/config.yml", "dstack", ".dstack/config.yml"),
    SecretName(".dstack/server/", "dstack", ".dstack/server/config.yml"),
    SecretName(".ngc/", "NVIDIA", ".ngc/config"),
    SecretName(".config/roboflow/", "Roboflow", ".config/roboflow/config.json"),
    SecretName(".config/ultralytics/", "Ultralytics", ".config/Ultralytics/settings.json"),
    SecretName(".config/openai/", "OpenAI", ".config/openai/config.json"),
    SecretName(".openai/", "OpenAI", ".openai/config"),
    SecretName(".anthropic/", "Anthropic", ".anthropic/config"),
    SecretName(".claude.json", "Anthropic", ".claude.json"),
    SecretName(".continue/config.{json,yaml}", "Continue", ".continue/config.json"),
    SecretName(".ollama/", "Ollama", ".ollama/history"),
    SecretName(".dvc/config.local", "DVC", ".dvc/config.local"),
    SecretName(".openml/", "OpenML", ".openml/config"),
    SecretName(".snowflake/", "Snowflake", ".snowflake/connections.toml"),
    SecretName(".snowsql/", "Snowflake", ".snowsql/config"),
    SecretName(".databrickscfg", "Databricks", ".databrickscfg"),
    SecretName(".databricks/", "Databricks", ".databricks/profile"),
    SecretName(".bigqueryrc", "Google Cloud", ".bigqueryrc"),
    SecretName(".cortex/", "Cortex", ".cortex/cli.yaml"),
    SecretName(".jupyter/", "Jupyter", ".jupyter/lab/settings"),
    SecretName("jupyter_server_config.json", "Jupyter", "jupyter_server_config.json"),
    SecretName("jupyter_notebook_config.json", "Jupyter", "jupyter_notebook_config.json"),
    SecretName("jupyterhub.sqlite", "Jupyter", "jupyterhub.sqlite"),
    SecretName("{jpserver,nbserver}-*.json", "Jupyter", "jpserver-123.json"),
    SecretName("kernel-????????-????-????-????-????????????.json", "Jupyter", "kernel-01234567-89ab-cdef-0123-456789abcdef.json"),
    # Databases
    SecretName("pgpass.conf.*", "PostgreSQL", "pgpass.conf.new"),
    SecretName(".pg_service.conf", "PostgreSQL", ".pg_service.conf"),
    SecretName("pg_service.conf", "PostgreSQL", "pg_service.conf"),
    SecretName(".my.cnf", "MySQL", ".my.cnf"),
    SecretName(".my.cnf.*", "MySQL", ".my.cnf.prod"),
    SecretName(".mylogin.cnf", "MySQL", ".mylogin.cnf"),
    SecretName(".mongorc.js", "MongoDB", ".mongorc.js"),
    SecretName(".mongoshrc.js", "MongoDB", ".mongoshrc.js"),
    SecretName(".dbshell", "MongoDB", ".dbshell"),
    SecretName("robomongo.json", "gitrob", "robomongo.json"),
    SecretName("*dbeaver-data-sources.xml", "gitrob", ".dbeaver-data-sources.xml"),
    SecretName("credentials-config.json", "DBeaver", ".dbeaver/credentials-config.json"),
    SecretName(".datagrip/", "JetBrains", ".datagrip/sources"),
    SecretName("datasources.local.xml", "JetBrains", ".idea/dataSources.local.xml"),
    SecretName(".odbc.ini", "ODBC", ".odbc.ini"),
    SecretName("odbc.ini", "ODBC", "odbc.ini"),
    SecretName("cqlshrc", "Cassandra", ".cassandra/cqlshrc"),
    SecretName(".cqlshrc", "Cassandra", ".cqlshrc"),
    SecretName(".influxdbv2/", "InfluxDB", ".influxdbv2/configs"),
    SecretName(".clickhouse-client/", "ClickHouse", ".clickhouse-client/config.xml"),
    SecretName("stored_secrets/", "DuckDB", ".duckdb/stored_secrets/a.bin"),
    SecretName("pgbouncer/userlist.txt", "PgBouncer", "pgbouncer/userlist.txt"),
    SecretName("users.acl", "Redis", "users.acl"),
    # Histories and start-up files of shells, in which tokens are typed
    SecretName(".*_history*", "gitrob", ".bash_history-1"),
    SecretName(".*-history", "gitignore", ".lein-repl-history"),
    SecretName(".*.history", "Aider", ".aider.input.history"),
    SecretName(".*.history.md", "Aider", ".aider.chat.history.md"),
    SecretName(".history", "gitrob", ".history"),
    SecretName(".zhistory", "zsh", ".zhistory"),
    SecretName(".histfile", "zsh", ".histfile"),
    SecretName(".zsh_sessions/", "zsh", ".zsh_sessions/a"),
    SecretName("{bash,zsh,python,psql,mysql}_history*", "gitrob", "bash_history"),
    SecretName("fish_history", "fish", ".local/share/fish/fish_history"),
    SecretName("fish_variables", "fish", ".config/fish/fish_variables"),
    SecretName("consolehost_history.txt", "PowerShell", "ConsoleHost_history.txt"),
    SecretName(".rhistory", "gitignore", ".Rhistory"),
    SecretName("history.sqlite", "IPython", ".ipython/profile_default/history.sqlite"),
    SecretName(".config/pgcli/", "pgcli", ".config/pgcli/history"),
    SecretName("xonsh-history*.json", "xonsh", "xonsh-history.json"),
    SecretName(".lesshst", "less", ".lesshst"),
    SecretName(".viminfo", "vim", ".viminfo"),
    SecretName(".bashrc", "gitrob", ".bashrc"),
    SecretName(".bash_profile", "gitrob", ".bash_profile"),
    SecretName(".bash_login", "bash", ".bash_login"),
    SecretName(".bash_aliases", "gitrob", ".bash_aliases"),
    SecretName(".zshrc", "gitrob", ".zshrc"),
    SecretName(".zprofile", "gitrob", ".zprofile"),
    SecretName(".zshenv", "zsh", ".zshenv"),
    SecretName(".zlogin", "zsh", ".zlogin"),
    SecretName(".cshrc", "gitrob", ".cshrc"),
    SecretName(".tcshrc", "tcsh", ".tcshrc"),
    SecretName(".kshrc", "ksh", ".kshrc"),
    SecretName(".xonshrc", "xonsh", ".xonshrc"),
    SecretName(".profile", "gitrob", ".profile"),
    SecretName(".exports", "gitrob", ".exports"),
    SecretName(".extra", "gitrob", ".extra"),
    # Tools that keep a token in a folder with a dot
    SecretName(".*/**/{access,auth,cookies,hosts,keys,login,session,sessions,tokens}.{db,ini,json,toml,txt,yaml,yml}", "tools of services", ".tool/sub/hosts.yml"),
    SecretName(".*/**/{auth,login,session,sessions}", "tools of services", ".tool/auth"),
    SecretName(".*/**/*apikey", "tools of services", ".tool/myapikey"),
    SecretName(".*/**/*[_-]key", "tools of services", ".tool/license-key"),
)  # fmt: skip
"""The names of files with credentials; a copy, an archive or an encrypted file of such a name counts too."""

CODE: Final = frozenset({
    ".bash", ".c", ".cc", ".cpp", ".cu", ".cuh", ".cxx", ".go", ".h", ".hpp", ".java", ".jl", ".js", ".lua", ".pl", ".py", ".pyi",
    ".pyx", ".r", ".rb", ".rs", ".sbatch", ".scala", ".sh", ".slurm", ".ts", ".zsh",
})  # fmt: skip
"""Endings of source code: a job fails without the file, so it is not left out for a token in it."""
_CODE_NAMES: Final = frozenset({
    *CODE, ".adoc", ".css", ".cs", ".fish", ".html", ".ipynb", ".j2", ".jinja", ".jinja2", ".jsx", ".kt", ".md", ".mjs", ".php", ".ps1",
    ".rst", ".sql", ".swift", ".tex", ".tf", ".tsx", ".vue",
})  # fmt: skip
"""Endings of code and text about it, which only a pattern with the same ending matches: `kubeconfig.py` is a module.

`.env.sh` and `.netrc.sh` are none: their names begin with a dot, and files of variables are written in each language.
"""
_ENDINGS = (
    r"(\.(cfg|conf|config|csv|dat|db|docx?|ini|jsonc?|kdbx?|key|list|ods|odt|pdf|pickle|pkl|plist|properties|rtf|sqlite|toml|tsv|txt|"
    r"xlsx?|xml|ya?ml))?"
)
_ENVIRONMENTS = r"([ _.-](dev|development|test|testing|qa|uat|stage|staging|prod|production|live|local|private|default|main|dec|\d+))?"
_SEPARATOR = "[ _.-]"
_KEY_ID = r"(?<!-[0-9a-f]{4}-)(?=\d*[a-f])[0-9a-f]{12}"
"""Without the assertions, the end of a UUID and a time such as 202611301200 would be ones."""
_ORDINARY = re.compile(
    r"(change|confirm|forgot|lost|new|reset|update)[_-]?password\..+|"
    r"(.*[_-])?(audio|bos|byte|char|class|cls|decoder|encoder|end|eos|eot|extra|first|image|input|last|mask|max|mean|min|multi|next|"
    r"num|output|pad|per|prefix|prev|prompt|sep|single|special|start|stop|text|top|unk|video|word)[_-]token(\.\w+)?"
)
"""Pages about passwords, and the tokens of a tokenizer."""
_TEMPLATE = re.compile(
    r".+[._-](example|sample|template|tmpl)(\.\w+)?|.+\.(dist|defaults?)|(example|sample|template)\.env"
)
"""Files that show which keys there are, and hold no values."""
_COPY = re.compile(
    r"[._-](bak|backup|copy|old|orig|original|rej|save|saved|swo|swp|tmp)|[._-]\d{4}-?\d\d-?\d\d|\.\d{1,2}| ?\(\d+\)| copy( \d+)?|[~-]"
)
_PREFIX = re.compile(r"copy[ _-]of[ _-]|(backup|bak|old)[._-]")
_PACKED = re.compile(
    r"\.(7z|aes|age|asc|b64|base64|bz2|crypt|enc|encrypted|gpg|gz|pgp|rar|sops|tar|tbz|tgz|txz|vault|xz|zip|zst)$"
)
_MAX_SPELLINGS = 40
"""A name of 255 characters could have thousands, and a folder may be of somebody else."""


def is_secret_name(name: str) -> bool:
    """Return whether a file usually holds credentials, by its path in the source folder alone."""
    return any(not row.content for row in find_rows(name))


def is_secret_file(source: Path, name: str) -> bool:
    """Return whether a file usually holds credentials: by its path in the source folder, and where a row has one, by its text."""
    if is_secret_name(name):
        return True
    rows = list(find_rows(name))
    if not rows or not _get_size(source / name):
        return False
    text = _read_text(source / name)
    if not text or _PACKED.search(name.lower()):  # its text cannot be read
        return True
    return any(re.search(row.content, text) for row in rows)


def names_secret(pattern: str) -> bool:
    """Return whether a pattern names files that may hold credentials, such as `*.pem`, rather than any files."""
    return next(find_rows(pattern), None) is not None


def find_rows(name: str) -> Iterator[SecretName]:
    """Yield the rows that match the path of a file in the source folder."""
    path = f"/{name.lower().rstrip('/')}"
    folders, _, file = path.rpartition("/")
    table = _compile_table()
    # A pattern such as `.huggingface` names the folder itself.
    yield from _find_by_folder(path if file.startswith(".") else folders)
    if _TEMPLATE.fullmatch(file):
        return
    for spelling in _list_spellings(file):
        yield from _find_by_name(spelling)
        if folders:
            ending = _get_code_ending(spelling)
            for row, pattern in table.paths:
                if _has_ending(row, ending) and pattern.search(f"{folders}/{spelling}"):
                    yield row


@dataclass(frozen=True)
class _Table:
    """The rows by what they match, so that few expressions are tried for a name."""

    exact: dict[str, SecretName]
    names: tuple[tuple[SecretName, re.Pattern[str]], ...]
    any_name: re.Pattern[str]
    """Matches if one of `names` does: a folder of data may have a million names."""
    paths: tuple[tuple[SecretName, re.Pattern[str]], ...]
    folders: tuple[tuple[SecretName, re.Pattern[str]], ...]


@cache
def _compile_table() -> _Table:
    exact, names, paths, folders = {}, [], [], []
    for row in SECRET_NAMES:
        if row.pattern.endswith("/"):
            folders.append((row, re.compile(f"/{_translate(row.pattern)}")))
        elif "/" in row.pattern:
            paths.append((row, re.compile(f"/{_translate(row.pattern)}$")))
        elif set(row.pattern) & set("*?[{~"):
            names.append((row, re.compile(_translate(row.pattern))))
        else:
            exact[row.pattern] = row
    any_name = re.compile("|".join(pattern.pattern for _, pattern in names))
    return _Table(exact, tuple(names), any_name, tuple(paths), tuple(folders))


def _translate(pattern: str) -> str:
    """Return a pattern of the table as a regular expression."""
    if pattern.endswith("~"):
        words = pattern.removesuffix("~").removeprefix("*_").replace("_", f"{_SEPARATOR}?")
        before = rf".+{_SEPARATOR}" if pattern.startswith("*_") else r"\.?"
        return f"{before}{words}{_ENVIRONMENTS}{_ENDINGS}"
    parts = re.split(r"(\*\*/|\*|\?|\[[^]]*\]|\{[^}]*\})", pattern)
    return "".join(map(_translate_part, parts))


def _translate_part(part: str) -> str:
    if part == "{key id}":
        return _KEY_ID
    if part.startswith("{"):
        return f"({'|'.join(_translate(choice) for choice in part[1:-1].split(','))})"
    if part.startswith("["):
        return part
    return {"**/": "(.*/)?", "*": "[^/]*", "?": "[^/]"}.get(part) or re.escape(part)


@lru_cache(maxsize=4096)
def _find_by_folder(folder: str) -> tuple[SecretName, ...]:
    return tuple(row for row, pattern in _compile_table().folders if pattern.search(f"{folder}/"))


@lru_cache(maxsize=4096)
def _find_by_name(file: str) -> tuple[SecretName, ...]:
    table, ending = _compile_table(), _get_code_ending(file)
    found = [row] if (row := table.exact.get(file)) else []
    if table.any_name.fullmatch(file) and not _ORDINARY.fullmatch(file):
        found += [row for row, pattern in table.names if _has_ending(row, ending) and pattern.fullmatch(file)]
    return tuple(found)


def _get_code_ending(file: str) -> str:
    """Return the ending of a name of code; empty for all others."""
    ending = os.path.splitext(file)[1]  # noqa: PTH122 - faster
    return ending if ending in _CODE_NAMES else ""


def _has_ending(row: SecretName, ending: str) -> bool:
    """Return whether a row is for files with this ending of code, which is empty for all other files."""
    return row.pattern.endswith(ending) or row.pattern.startswith((".env", ".netrc"))


@lru_cache(maxsize=4096)
def _list_spellings(file: str) -> tuple[str, ...]:
    """Return a name, and those without what editors, users and archives add to it."""
    spellings = [file]
    for spelling in spellings:
        if len(spellings) > _MAX_SPELLINGS:
            break
        stem, ending = os.path.splitext(spelling)  # noqa: PTH122 - faster
        shorter = {
            spelling.strip("#"),
            _PREFIX.sub("", spelling, count=1),
            _PACKED.sub("", spelling),
            *(
                spelling[: match.start()] + spelling[match.end() :]
                for match in _COPY.finditer(spelling)
                if match.end() in {len(spelling), len(stem)}
            ),
        }
        if ending in {".swp", ".swo"}:  # vim writes `.name.swp`
            shorter.add(stem.removeprefix("."))
        spellings += sorted(shorter - {*spellings, ""})
    return tuple(spellings)


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
    ("age Key", "age-secret-key-1", r"AGE-SECRET-KEY-1([0-9A-Z]{58})(?!\w)"),
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
