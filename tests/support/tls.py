"""A certificate authority for tests, and a server certificate for 127.0.0.1 from it."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def make_ca_and_server(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """The CA's PEM file, and a context for a server on 127.0.0.1 that the CA vouches for."""
    ca_key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca_name = _name(f"s3kv test CA {folder.name}")  # authorities of one name cannot be told apart in a bundle
    ca = _builder(ca_name, ca_name, ca_key).add_extension(x509.BasicConstraints(True, None), True)
    ca_certificate = ca.sign(ca_key, hashes.SHA256())
    server = (
        _builder(_name("127.0.0.1"), ca_name, server_key)
        .add_extension(x509.BasicConstraints(False, None), True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
    )
    server_certificate = server.sign(ca_key, hashes.SHA256())

    ca_file, chain = folder / "ca.pem", folder / "server.pem"
    pem = serialization.Encoding.PEM
    ca_file.write_bytes(ca_certificate.public_bytes(pem))
    key_bytes = server_key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    chain.write_bytes(server_certificate.public_bytes(pem) + key_bytes)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain)
    return ca_file, context


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=2))
    )
