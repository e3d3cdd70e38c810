"""Keys: the coordinator's certificate, the workers' keys, tokens, and the signatures that prove them.

The coordinator has a self-signed certificate whose fingerprint stands in the join line: over TLS a worker accepts that certificate and no
other; over plain HTTP the coordinator signs the worker's nonce with the same key. A worker's name is bound to an Ed25519 key that never leaves
its machine. Tokens and session secrets are kept as sha256 only.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import os
import secrets
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import NameOID

from blocktrain.errors import CheckpointError, ProtocolError

CHALLENGE_S = 600.0  # a challenge is taken for at least this long, by the coordinator's clock
PEM = serialization.Encoding.PEM


def new_token() -> str:
    return secrets.token_hex(16)


def hashed(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def fingerprint(certificate_pem: str) -> str:
    """The first 32 hex digits of the sha256 of a certificate."""
    try:
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate_pem)).hexdigest()[:32]
    except ValueError as error:
        raise ProtocolError(f"certificate: not PEM ({error})") from None


def new_certificate(common_name: str) -> str:
    """A P-256 key and a certificate for it, valid for twenty years, as one PEM text (clocks may be wrong, so it begins in the past)."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:60] or "blocktrain")])
    today = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(today - datetime.timedelta(days=3650))
        .not_valid_after(today + datetime.timedelta(days=7300))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return private.decode() + certificate.public_bytes(PEM).decode()


def certificate_of(pem: str) -> str:
    """Only the first certificate of a PEM text, without the key."""
    begin, end = pem.find("-----BEGIN CERTIFICATE-----"), pem.find("-----END CERTIFICATE-----")
    if begin < 0 or end < 0:
        raise ProtocolError("certificate: no certificate in the PEM text")
    return pem[begin : end + len("-----END CERTIFICATE-----")] + "\n"


def sign_as_coordinator(pem: str, text: bytes) -> str:
    key = serialization.load_pem_private_key(pem.encode(), None)
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return key.sign(text, ec.ECDSA(hashes.SHA256())).hex()
    return ""  # a certificate of somebody's own with another kind of key: TLS proves it


def check_coordinator(certificate_pem: str, text: bytes, signature: str) -> None:
    """Raises ProtocolError unless the certificate's key signed the text."""
    try:
        key = x509.load_pem_x509_certificate(certificate_pem.encode()).public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ProtocolError("certificate: has no P-256 key")
        key.verify(bytes.fromhex(signature), text, ec.ECDSA(hashes.SHA256()))
    except (ValueError, InvalidSignature):
        raise ProtocolError("the coordinator's signature is not that of the key in the join line") from None


def challenge(secret: str, now: float, back: int = 0) -> str:
    """A number that only the coordinator can make, the same for CHALLENGE_S seconds: nothing has to be remembered."""
    return hmac.new(secret.encode(), f"challenge {int(now // CHALLENGE_S) - back}".encode(), "sha256").hexdigest()[:32]


def is_challenge(secret: str, now: float, given: str) -> bool:
    return any(hmac.compare_digest(challenge(secret, now, back), given) for back in (0, 1))


class WorkerKey:
    """A worker's Ed25519 key."""

    def __init__(self, private: ed25519.Ed25519PrivateKey) -> None:
        self.private = private
        self.public = private.public_key().public_bytes_raw().hex()

    def sign(self, text: bytes) -> str:
        return self.private.sign(text).hex()


def worker_key(path: Path) -> WorkerKey:
    """The key in a file, made at the first call; only its owner may read it."""
    if not path.exists():
        private = ed25519.Ed25519PrivateKey.generate()
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}.tmp")
        with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(private.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
        os.replace(scratch, path)
    try:
        private = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not a worker's key ({error}); move it away to join as a new worker") from None
    if not isinstance(private, ed25519.Ed25519PrivateKey):
        raise CheckpointError(f"{path}: not an Ed25519 key; move it away to join as a new worker")
    return WorkerKey(private)


def new_worker_key() -> WorkerKey:
    return WorkerKey(ed25519.Ed25519PrivateKey.generate())


def check_worker(public_key: str, text: bytes, signature: str) -> None:
    """Raises ProtocolError unless the key signed the text."""
    try:
        ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key)).verify(bytes.fromhex(signature), text)
    except (ValueError, InvalidSignature):
        raise ProtocolError("signature: not that of public_key over this join") from None


def worker_name(name: str, public_key: str) -> str:
    """What a worker is called everywhere: the name it chose, and a piece of its key's digest that nobody else can have."""
    return f"{name}-{hashlib.sha256(bytes.fromhex(public_key)).hexdigest()[:8]}"
