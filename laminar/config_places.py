"""The sections of the config that say where a run's state lies: the object store and etcd."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from laminar.buffer.etcd_access import PASSWORD_VARIABLE, EtcdAccess
from laminar.buffer.s3 import check_endpoint
from laminar.config_values import refuse_disguised
from laminar.errors import ConfigError

SECTION = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
"""What all sections have in common."""


class Section(BaseModel):
    model_config = SECTION

    @field_validator("*", mode="before")
    @classmethod
    def _no_number_in_disguise(cls, value: object, info: ValidationInfo) -> object:
        """`"16"` and `true` are no numbers."""
        refuse_disguised(value, cls.model_fields[str(info.field_name)].annotation)
        return value


class StorageConfig(Section):
    endpoint_url: str = ""
    """Address of an S3 service other than AWS, for a `run.store` of s3://; empty: the environment's `AWS_ENDPOINT_URL`.
    Keys are not part of the config: `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, or what AWS's tools find."""
    region: str = ""
    """Region of the bucket; empty: the environment's `AWS_REGION`."""

    @field_validator("endpoint_url")
    @classmethod
    def _without_keys(cls, url: str) -> str:
        try:
            check_endpoint(url)
        except ConfigError as e:
            raise ValueError(f"storage.endpoint_url: {e}") from None
        return url


class CoordinationConfig(Section):
    endpoints: list[str] = []
    """etcd addresses HOST:PORT, or https://HOST:PORT; empty: `laminar run` starts an etcd of its own."""
    ca: str = ""
    """PEM file of the authority that vouches for etcd's certificates; setting it turns TLS on. Empty with https://
    endpoints: the system's authorities. A host may name another path in `LAMINAR_ETCD_CA`."""
    certificate: str = ""
    """PEM file of this client's own certificate, where etcd asks for one (`LAMINAR_ETCD_CERT`)."""
    key: str = ""
    """PEM file of that certificate's key (`LAMINAR_ETCD_KEY`)."""
    user: str = ""
    """User of an etcd with authentication; empty: none (`LAMINAR_ETCD_USER`)."""
    password_env: str = Field(PASSWORD_VARIABLE, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable that holds the user's password. The password itself is never written or logged."""
    password_file: str = ""
    """File that holds the password, instead of the variable (`LAMINAR_ETCD_PASSWORD_FILE`)."""
    lease_ttl: float = Field(10.0, ge=2, le=3600)
    """Seconds after which a silent worker loses what it owns. 10 on one machine, 15 on clusters."""

    @model_validator(mode="after")
    def _secure(self) -> CoordinationConfig:
        if bool(self.certificate) != bool(self.key):
            raise ValueError("coordination.certificate and coordination.key belong together: give both or neither")
        if (self.ca or self.certificate or self.user) and not self.endpoints:
            raise ValueError(
                "coordination.ca, certificate, key and user are for an etcd that runs already: give its endpoints"
            )
        return self

    def access(self) -> EtcdAccess:
        """How the configured etcd is reached, with what the environment says in place of the config's paths."""
        named = self.model_dump(exclude={"endpoints", "lease_ttl"})
        return EtcdAccess(tuple(self.endpoints), **named).overlaid()
