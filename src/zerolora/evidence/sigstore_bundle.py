"""Signatures of sigstore, by its own library, which is installed only by who wants it."""

import importlib.util
import logging
from collections.abc import Sequence
from typing import NamedTuple

from zerolora.errors import UserError
from zerolora.model.foreign import reason


class Identity(NamedTuple):
    """An identity that sigstore's certificates have."""

    name: str
    """An address of e-mail, or of a workflow."""
    issuer: str
    """Address of the OpenID provider that vouched for it."""


class InvalidSignatureError(Exception):
    """A bundle is not one by sigstore of these bytes."""


def missing() -> str | None:
    """Return, in words, how to install the library; None if it is there."""
    if importlib.util.find_spec("sigstore") is not None:
        return None
    return "its library is not installed: `pip install 'zerolora[sigstore]'`"


def sign(payload: bytes) -> str:
    """Return a bundle with a statement, signed by the identity that sigstore asks for in a browser, or that a CI has.

    The identity and the statement's hash go to sigstore's public log. Raises UserError without the library, the network
    or an identity.
    """
    if why := missing():
        raise UserError(f"--sign sigstore: {why}")
    from sigstore import dsse, models, oidc
    from sigstore import sign as signing

    _quiet()
    try:
        config = models.ClientTrustConfig.production()
        found = oidc.detect_credential()
        issuer = oidc.Issuer(config.signing_config.get_oidc_url())
        token = oidc.IdentityToken(found) if found else issuer.identity_token()
        with signing.SigningContext.from_trust_config(config).signer(token) as signer:
            return str(signer.sign_dsse(dsse.Statement(payload)).to_json()) + "\n"
    except Exception as error:  # its clients raise errors without a common class, such as oidc.IssuerError
        raise UserError(
            f"--sign sigstore: nothing was signed ({reason(error)}); check the network, or use a key of SSH"
        ) from None


def signer(text: str, payload: bytes, trusted: Sequence[Identity]) -> tuple[str, bool]:
    """Return the name of who signed the bundle in `text`, and whether it is one of the `trusted`, without a network.

    Raises InvalidSignatureError if the signature, the certificate or the entry of the log is not valid.
    """
    from cryptography import x509
    from sigstore import errors
    from sigstore.models import Bundle
    from sigstore.verify import Verifier, policy

    _quiet()
    try:
        bundle = Bundle.from_json(text)
        _, signed = Verifier.production(offline=True).verify_dsse(bundle, policy.UnsafeNoOp())
    except Exception as error:  # of its parsers too
        raise InvalidSignatureError(reason(error)) from None
    if signed != payload:
        raise InvalidSignatureError("it is of another statement")
    certificate = bundle.signing_certificate
    for each in trusted:
        try:
            policy.Identity(identity=each.name, issuer=each.issuer).verify(certificate)
        except errors.VerificationError:
            continue
        return each.name, True
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return ", ".join(str(name.value) for name in names), False


def _quiet() -> None:
    """Keep the library's remarks on how it is used from the user."""
    logging.getLogger("sigstore").setLevel(logging.ERROR)
