"""sigstore's own library, offline: what it is given and what it refuses."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from package_folder import EVIDENCE

from zerolora.errors import UserError
from zerolora.evidence import envelope, sigstore_bundle, statement
from zerolora.evidence.verify import Trust, signer_of

pytestmark = pytest.mark.skipif(EVIDENCE.missing() is not None, reason=EVIDENCE.missing() or "")
PAYLOAD = statement.written({"a.safetensors": "1" * 64}, statement.PROVENANCE, {})


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Put the library on the path, without a network or an identity of the CI, and take its modules away again."""

    def unreachable(*_: object, **__: object) -> None:
        raise OSError("no network")

    before = {*sys.modules}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EVIDENCE.folder))
        patch.setattr("socket.getaddrinfo", unreachable)
        for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME"):
            patch.setenv(name, str(tmp_path_factory.mktemp("home")))
        for name in [each for each in os.environ if each.startswith(("GITHUB_", "ACTIONS_", "SIGSTORE_"))]:
            patch.delenv(name)
        yield
    for name in sys.modules.keys() - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(EVIDENCE.folder)):
            del sys.modules[name]


def test_without_a_network_nothing_is_signed() -> None:
    with pytest.raises(
        UserError, match="^--sign sigstore: nothing was signed (.*); check the network, or use a key"
    ) as raised:
        sigstore_bundle.sign(PAYLOAD)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("material", [{}, [], {"certificate": {"rawBytes": "MAA="}, "tlogEntries": []}])
def test_a_bundle_without_a_valid_certificate_is_wrong(material: object, tmp_path: Path) -> None:
    sealed = json.loads(envelope.sealed(PAYLOAD, b"signature", "key"))
    media = "application/vnd.dev.sigstore.bundle.v0.3+json"
    bundle = {"mediaType": media, "verificationMaterial": material, "dsseEnvelope": sealed}
    path = tmp_path / "provenance.json"
    path.write_text(json.dumps(bundle))
    signer = signer_of(envelope.read(path), Trust())
    assert signer.word == "wrong", signer
    assert signer.about.startswith("its signature by sigstore is not valid (") and "\n" not in signer.about
