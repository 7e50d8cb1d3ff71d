"""How an S3 store is reached: the same settings, told to fsspec and to Lance in the words of each.

Keys are no part of it. Both find them where AWS's own tools do: in `AWS_ACCESS_KEY_ID` and
`AWS_SECRET_ACCESS_KEY`, in the user's AWS files, or in the role of the machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from laminar.errors import ConfigError

SCHEMES = ("s3", "s3a")
ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
REGION_VARIABLES = ("AWS_REGION", "AWS_DEFAULT_REGION")
DEFAULT_REGION = "us-east-1"
"""What services other than AWS take for theirs; AWS has no default, but tells the right one for a bucket."""

CONNECT_S, ANSWER_S, ATTEMPTS = 5, 30, 4
"""Bounds of one request: seconds to connect, seconds without a byte of the answer, and how often it is made."""


@dataclass(frozen=True)
class S3Settings:
    """`endpoint_url` empty: AWS. `region` empty: whatever AWS's tools are set up with."""

    endpoint_url: str = ""
    region: str = ""

    @classmethod
    def of(cls, options: Mapping[str, str]) -> S3Settings:
        """From `storage.*` of the config, else from the environment. Raises ConfigError for an unusable endpoint."""
        endpoint = options.get("endpoint_url") or _first_set(ENDPOINT_VARIABLES)
        check_endpoint(endpoint)
        region = options.get("region") or _first_set(REGION_VARIABLES)
        return cls(endpoint, region or (DEFAULT_REGION if endpoint else ""))

    def for_fsspec(self) -> dict[str, Any]:
        """Keyword arguments of `s3fs.S3FileSystem`."""
        client = {"region_name": self.region} if self.region else {}
        config = {
            "connect_timeout": CONNECT_S,
            "read_timeout": ANSWER_S,
            "retries": {"mode": "standard", "total_max_attempts": ATTEMPTS},
        }
        return {"endpoint_url": self.endpoint_url or None, "client_kwargs": client, "config_kwargs": config}

    def for_lance(self) -> dict[str, str]:
        """`storage_options` of a data set."""
        options = {"connect_timeout": f"{CONNECT_S}s", "timeout": f"{ANSWER_S}s", "client_max_retries": f"{ATTEMPTS}"}
        if self.endpoint_url:
            options["aws_endpoint"] = self.endpoint_url
            if urlsplit(self.endpoint_url).scheme == "http":
                options["allow_http"] = "true"
        if self.region:
            options["aws_region"] = self.region
        return options


def check_endpoint(url: str) -> None:
    """Raises ConfigError unless `url` is empty or `http[s]://HOST[:PORT]` without a user or password."""
    if not url:
        return
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            f"the address of the S3 service at {parts.hostname} holds a user or password, which run.json would keep; "
            "take it out and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url!r} is no address of an S3 service: write http://HOST:PORT or https://HOST")


def client_errors() -> tuple[type[Exception], ...]:
    """What s3fs lets through besides OSError: a service that cannot be reached, keys that are missing or refused."""
    from botocore import exceptions

    return (exceptions.BotoCoreError, exceptions.ClientError)


def status_of(error: BaseException) -> int:
    """The HTTP status behind an error of s3fs; 0 if there was none."""
    answer = getattr(error.__cause__, "response", None) or getattr(error, "response", None) or {}
    return int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _first_set(names: tuple[str, ...]) -> str:
    return next((os.environ[name] for name in names if os.environ.get(name)), "")
