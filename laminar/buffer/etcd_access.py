"""How a run's etcd is reached: addresses, certificates, user. All of it may be written down: where to find the
password is part of it, the password is not."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laminar.errors import ConfigError

if TYPE_CHECKING:
    from laminar.buffer.etcd import EtcdCoordination
    from laminar.buffer.etcd_connection import Tls

PASSWORD_VARIABLE = "LAMINAR_ETCD_PASSWORD"
VARIABLES = {
    "ca": "LAMINAR_ETCD_CA",
    "certificate": "LAMINAR_ETCD_CERT",
    "key": "LAMINAR_ETCD_KEY",
    "user": "LAMINAR_ETCD_USER",
    "password_file": "LAMINAR_ETCD_PASSWORD_FILE",
}
"""Environment variables that take the place of the config's values: hosts may keep their certificates elsewhere."""
OPTIONS = {
    "ca": "--etcd-ca",
    "certificate": "--etcd-cert",
    "key": "--etcd-key",
    "user": "--etcd-user",
    "password_env": "--etcd-password-env",
    "password_file": "--etcd-password-file",
}
"""Options of `laminar worker` for the same."""


@dataclass(frozen=True)
class EtcdAccess:
    """`endpoints`: HOST:PORT, or http(s)://HOST:PORT. `ca`, `certificate`, `key`: paths of PEM files. The password is
    read from `password_file` if one is named, else from the environment variable `password_env`."""

    endpoints: tuple[str, ...] = ()
    ca: str = ""
    certificate: str = ""
    key: str = ""
    user: str = ""
    password_env: str = PASSWORD_VARIABLE
    password_file: str = ""

    def connect(self, *, timeout_s: float = 2.0, retry_s: float = 15.0) -> EtcdCoordination:
        """A client. Raises ConfigError for addresses, files or a password that cannot be used."""
        from laminar.buffer.etcd import EtcdCoordination

        return EtcdCoordination(
            list(self.endpoints),
            timeout_s=timeout_s,
            retry_s=retry_s,
            tls=self.tls(),
            user=self.user,
            password=self.password() if self.user else "",
        )

    def tls(self) -> Tls | None:
        """None for connections in the clear: neither certificates nor an https:// address was given."""
        from laminar.buffer.etcd_connection import Tls

        secure = any(e.startswith("https://") for e in self.endpoints)
        if not (secure or self.ca or self.certificate or self.key):
            return None
        tls = Tls(self.ca, self.certificate, self.key)
        tls.credentials()  # so that a file that cannot be read is said now, and not at the first call
        return tls

    def password(self) -> str:
        """Raises ConfigError naming the file or variable that has none."""
        if not self.password_file:
            if password := os.environ.get(self.password_env, ""):
                return password
            raise ConfigError(
                f"etcd user {self.user!r} has no password: set the environment variable {self.password_env}, or name a "
                "file that holds it (coordination.password_file, --etcd-password-file)"
            )
        try:
            password = Path(self.password_file).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(
                f"the password of etcd user {self.user!r} cannot be read from {self.password_file}: {e}"
            ) from e
        if not password:
            raise ConfigError(f"the file {self.password_file} with the password of etcd user {self.user!r} is empty")
        return password

    def at(self, endpoints: Sequence[str]) -> EtcdAccess:
        return replace(self, endpoints=tuple(endpoints))

    def overlaid(self) -> EtcdAccess:
        """With what the environment says in place of the config's values."""
        said: dict[str, Any] = {name: os.environ[v] for name, v in VARIABLES.items() if os.environ.get(v)}
        return replace(self, **said)

    def arguments(self) -> list[str]:
        """The options of `laminar worker` that say the same."""
        given = ["--etcd", ",".join(self.endpoints)]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in OPTIONS and value != field.default:
                given += [OPTIONS[field.name], value]
        return given

    def __str__(self) -> str:
        return ", ".join(self.endpoints)


def parse_endpoint(endpoint: str, tls: bool) -> tuple[str, int]:
    """Host and port of `HOST:PORT`, `[IPV6]:PORT`, or a URL with either. Raises ConfigError."""
    scheme, separator, rest = endpoint.rpartition("://")
    if separator and scheme not in ("http", "https"):
        raise ConfigError(f"etcd endpoint {endpoint!r}: unknown scheme {scheme!r}, use HOST:PORT")
    if scheme == "https" and not tls:
        raise ConfigError(f"etcd endpoint {endpoint!r} asks for TLS, but no certificates were given")
    if scheme == "http" and tls:
        raise ConfigError(
            f"etcd endpoint {endpoint!r} asks for a connection in the clear, but TLS is set up (coordination.ca, "
            "certificate, key, or another endpoint with https://): write https:// or HOST:PORT, or leave TLS out"
        )
    host, _, port = rest.rstrip("/").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"etcd endpoint {endpoint!r} is not HOST:PORT")
    return host, int(port)
