"""An etcd that shows a certificate and asks for users, as a cluster's does; and the certificates for it."""

from __future__ import annotations

import asyncio
import sys
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from laminar.buffer.etcd import prefix_range
from laminar.buffer.etcd3_shim import rpc
from laminar.buffer.etcd_access import EtcdAccess
from laminar.errors import CoordinationError, CoordinationUnavailable
from laminar.workers.supervisor.etcd_process import EtcdProcess, _free_port


class SecureEtcd(EtcdProcess):
    """A member that shows a certificate of `certificates` to clients, and asks them for a user and password."""

    def __init__(self, data_dir: Path, certificates: Path, *, flags: tuple[str, ...] = (), peer_port: int = 0) -> None:
        self.certificates = certificates
        port = _free_port()
        url = f"https://127.0.0.1:{port}"
        certificate, key = str(certificates / "server.pem"), str(certificates / "server.key")
        secured = (
            "--listen-client-urls", url, "--advertise-client-urls", url, "--cert-file", certificate, "--key-file", key,
            "--auth-token-ttl", "1",
        )  # fmt: skip
        super().__init__(data_dir, client_port=port, peer_port=peer_port, flags=(*secured, *flags))

    def access(self, user: str = "laminar") -> EtcdAccess:
        (self.certificates / "password").write_text("secret\n")
        secret = str(self.certificates / "password")
        return EtcdAccess((self.endpoint,), ca=str(self.certificates / "ca.pem"), user=user, password_file=secret)

    async def wait_healthy(self, deadline_s: float = 30.0) -> None:
        client = self.access("").connect()
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    assert self.returncode is None, self.log_path.read_text()
                    try:
                        await client.get("/health")
                        return
                    except CoordinationUnavailable:
                        await asyncio.sleep(0.05)
                    except CoordinationError:
                        return  # it asks for a user, so it serves
        finally:
            await client.close()


async def ask_for_users(member: SecureEtcd, password: str = "secret", prefix: str = "/") -> None:
    """Users `root`, `laminar` (everything under `prefix`) and `guest` (nothing), all with this password."""
    client = member.access("").connect()
    call = client._connection.call
    permission = sys.modules["etcd3.etcdrpc.auth_pb2"].Permission  # etcd3 leaves it out of its own names
    start, end = prefix_range(prefix)
    everything = permission(permType=permission.READWRITE, key=start, range_end=end)
    requests: list[tuple[str, Any]] = [
        *(("UserAdd", rpc.AuthUserAddRequest(name=n, password=password)) for n in ("root", "laminar", "guest")),
        *(("RoleAdd", rpc.AuthRoleAddRequest(name=n)) for n in ("root", "laminar")),
        ("RoleGrantPermission", rpc.AuthRoleGrantPermissionRequest(name="laminar", perm=everything)),
        *(("UserGrantRole", rpc.AuthUserGrantRoleRequest(user=n, role=n)) for n in ("root", "laminar")),
        ("AuthEnable", rpc.AuthEnableRequest()),
    ]
    for name, request in requests:
        await call(lambda link: getattr(link.auth, name), request, name)  # noqa: B023 - awaited at once
    await client.close()


def make_certificates(folder: Path) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def make(subject: str, names: list[x509.GeneralName], signer: tuple[str, Any] | None) -> Any:
        key = ec.generate_private_key(ec.SECP256R1())
        issuer, signing = signer or (subject, key)
        made = x509.CertificateBuilder().subject_name(name(subject)).issuer_name(name(issuer))
        made = made.public_key(key.public_key()).serial_number(x509.random_serial_number())
        now = datetime.now(UTC)
        made = made.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(days=2))
        made = made.add_extension(x509.BasicConstraints(ca=signer is None, path_length=None), critical=True)
        if names:
            made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = made.sign(signing, hashes.SHA256())
        (folder / f"{subject}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        encoding = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        (folder / f"{subject}.key").write_bytes(key.private_bytes(*encoding))
        return key

    authority = ("ca", make("ca", [], None))
    make("stranger", [], None)
    make("server", [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))], authority)
    make("elsewhere", [x509.DNSName("etcd.example")], authority)
